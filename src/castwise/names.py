"""Names of topics and of files: each once."""

import itertools
from collections.abc import Container


def free_name(name: str, taken: Container[str], before_number: str = " #") -> str:
    """Return a name, with a number from 2 on where it is taken: `resnet50 #2`.

    Args:
        name: The name.
        taken: Those that others have.
        before_number: What stands between the name and its number.
    """
    numbered = (f"{name}{before_number}{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)
