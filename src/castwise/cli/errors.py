"""What was typed and is no command line, in one line, as every other error is."""

from typing import Any

import typer

# Click's error for what cannot be parsed. Typer has a Click of its own, older ones the package; of its errors they
# export this subclass alone.
PARSING_ERROR: type[Any] = typer.BadParameter.__bases__[0]


def parsing_line(error: Any) -> str:
    """Return what was wrong, and which help says more; empty where there was no command, and help was shown for it.

    Args:
        error: A `PARSING_ERROR`.
    """
    message = " ".join(
        error.format_message().replace("Value error, ", "").split()
    )  # the words of pydantic's own errors
    if message and not message.endswith((".", "?")):
        message += "."
    if not message or error.ctx is None:
        return message
    return f"{message} `{error.ctx.command_path} --help` says what there is."
