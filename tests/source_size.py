"""What `make lint` checks of the source's size: how complex each function is, and what the source has grown for.

    python tests/source_size.py

A function has a complexity of at most 20, by radon. The source has at most 300 lines more than the newest line under
"Size" in CHANGELOG.md says: whoever needs more writes a new one, which says what for.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from radon.complexity import cc_visit

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "castwise"
MOST_COMPLEX, MOST_NEW_LINES = 20, 300


def complex_functions() -> Iterator[str]:
    """Yield the functions that are too complex, with their files."""
    for path in sorted(SOURCE.rglob("*.py")):
        for block in cc_visit(path.read_text()):
            if block.letter != "C" and block.complexity > MOST_COMPLEX:
                yield f"{path.relative_to(SOURCE)}:{block.fullname}"


def main() -> int:
    """Print what is wrong; return 1 if anything is."""
    wrong = [f"{name}: a complexity above {MOST_COMPLEX}" for name in complex_functions()]
    lines = sum(len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py"))
    size = (ROOT / "CHANGELOG.md").read_text().partition("### Size")[2]
    stated = int(re.findall(r"([\d,]+) lines", size)[0].replace(",", ""))
    if lines > stated + MOST_NEW_LINES:
        wrong.append(f"src has {lines:,} lines, {lines - stated:,} more than CHANGELOG.md says: say there what for")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
