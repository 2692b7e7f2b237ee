"""A line in a terminal."""

from rich.console import Console
from rich.markup import escape


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line as it stands: wrapped on a terminal, and one line to `grep` where it is piped."""
    console.print(escape(line), style=style, highlight=False, soft_wrap=not console.is_terminal)
