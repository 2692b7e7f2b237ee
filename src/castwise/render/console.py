"""Lines that several commands say."""

from rich.console import Console
from rich.markup import escape

from castwise.render.units import format_duration


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Print a line as it stands: wrapped on a terminal, and one line to `grep` where it is piped."""
    console.print(escape(line), style=style, highlight=False, soft_wrap=not console.is_terminal)


def took_words(num_trials: int, num_recorded: int, seconds: float) -> str:
    """Return how many trials there are, how many of them were not measured now, and what the others took."""
    trials = f"{num_trials} trial{'' if num_trials == 1 else 's'}"
    if num_recorded:
        which = "all" if num_recorded == num_trials else num_recorded
        trials += f", {which} of them on record already,"
    return f"{trials} in {format_duration(seconds)}"
