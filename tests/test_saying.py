"""A line in a terminal."""

import io

from rich.console import Console

from castwise.render.console import print_line

LINE = "[bold]resnet50[/bold] takes 3 s in 'fp16' " + "and so on " * 10


def said(style: str | None = None, *, terminal: bool) -> str:
    out = io.StringIO()
    print_line(
        Console(file=out, width=40, force_terminal=terminal, color_system="standard" if terminal else None), LINE, style
    )
    return out.getvalue()


def test_a_line_that_is_piped_stays_one_line_as_it_stands() -> None:
    assert said(terminal=False) == f"{LINE}\n"
    assert said("bold", terminal=False) == f"{LINE}\n"


def test_on_a_terminal_a_line_wraps_between_words_and_has_its_style_alone() -> None:
    lines = said(terminal=True).splitlines()
    assert len(lines) > 1
    assert [word for line in lines for word in line.split()] == LINE.split(), "no word has a colour of its own"
    assert all(line.startswith("\x1b[33m") for line in said("yellow", terminal=True).splitlines())
