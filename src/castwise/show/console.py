"""Lines on a console."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from castwise.errors import printable
from castwise.show.units import format_duration, wrap

_PIPED_WIDTH = 250


class SafeConsole(Console):
    """A console on which names of files, and what records and exceptions say, command no terminal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what `Console.render` yields, printable."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def result_console() -> Console:
    """Return a console on stdout: as wide as the terminal, or wide enough for every column if it is piped."""
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=_PIPED_WIDTH)


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Print a line without reading markup; a terminal wraps it with its indent, a pipe gets one line for `grep`.

    A command stays one line in a terminal, too, and so does a long path, for who copies it.
    """
    if console.is_terminal:
        lines = line.split("\n")
        line = "\n".join(each if each.lstrip().startswith("castwise ") else wrap(each, console.width) for each in lines)
    console.print(Text(line), style=style, highlight=False, soft_wrap=True)


def print_ending(console: Console, line: str) -> None:
    """Print the last line of a result, if there is one, below an empty line."""
    if line:
        console.print()
        print_line(console, line, "dim")


def took_words(num_trials: int, num_recorded: int, seconds: float) -> str:
    """Return how many trials there are, how many of them were on record already, and how long the others took."""
    trials = f"{num_trials} trial{'' if num_trials == 1 else 's'}"
    if num_recorded:
        which = "all" if num_recorded == num_trials else num_recorded
        trials += f", {which} of them on record already,"
    return f"{trials} in {format_duration(seconds)}"
