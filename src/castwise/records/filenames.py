"""Names of topics and of files: what files can be named by, and each once."""

import itertools
import re
from collections.abc import Container

KEPT = "._"  # in the names of records and their folders


def slug(text: str, kept: str = "") -> str:
    """Return small letters and digits of ASCII with a hyphen for each stretch of anything else; none at the ends.

    Args:
        text: The text.
        kept: Further characters that stay, inside brackets of a regular expression; no point does at the ends.
    """
    return re.sub(rf"[^a-z0-9{kept}]+", "-", text.lower()).strip("-.")


def free_name(name: str, taken: Container[str], before_number: str = " #") -> str:
    """Return a name, with a number from 2 on where it is taken: `resnet50 #2`.

    Args:
        name: The name.
        taken: Those that others have.
        before_number: What stands between the name and its number.
    """
    numbered = (f"{name}{before_number}{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)
