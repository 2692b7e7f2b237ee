"""How commands print: results on stdout, everything else on stderr."""

import sys
from typing import TYPE_CHECKING

from castwise.errors import printable
from castwise.show.units import pluralize

if TYPE_CHECKING:
    from rich.console import Console

    from castwise.show.presentation import Presentation


def show(output_format: str, shown: "Presentation", ending: str = "") -> None:
    """Print what a command shows on stdout: in a "table" with the ending below it, or as a text of another format."""
    if output_format == "table":
        from castwise.show.console import print_ending, result_console
        from castwise.show.presentation import print_parts

        console = result_console()
        print_parts(shown.parts, console)
        print_ending(console, ending)
    else:
        text = printable(shown.text(output_format))
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


def error_console() -> "Console":
    from castwise.show.console import SafeConsole

    return SafeConsole(stderr=True)


def say(line: str, style: str | None = None) -> None:
    """Print a line on stderr; only a terminal wraps it, so that `grep` finds it whole."""
    from castwise.show.console import print_line

    print_line(error_console(), line, style)


def format_size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def say_problems(problems: list[tuple[str, str]]) -> None:
    """Say which files were left out: first the records of a newer castwise, which are no accident."""
    ordered = sorted(problems, key=lambda problem: not problem[1].startswith("a record of schema"))
    for path, reason in ordered[:5]:
        say(f"Left out: {path}: {reason}")
    if len(problems) > 5:
        say(f"Left out: {pluralize(len(problems) - 5, 'more file')} without a record to read")
