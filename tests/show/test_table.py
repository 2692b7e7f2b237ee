"""Tables of any columns and rows: terminal widths, Markdown, JSON."""

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from castwise.show.console import print_line, result_console
from castwise.show.fields import FIELDS, Field, FlatRow, find_field, short_ratio_text, worth_showing
from castwise.show.presentation import Grid
from castwise.show.table import DataTable, json_values, markdown_grid

FIGURE, WORDS = Field("figure", "figure", "count"), Field("words", "words", wraps=True)
RESULTS: list[FlatRow] = [
    {"precision": "fp32", "throughput_per_second": 853.3, "unit": "images", "step_seconds": 0.3, "status": "ok"},
    {"precision": "bf16-mixed", "throughput_per_second": 2560.0, "unit": "images", "step_seconds": 0.1, "status": "ok"},
    {"precision": "fp16-mixed", "status": "oom"},
]
RESULT_FIELDS = [find_field(name) for name in ("precision", "throughput_per_second", "step_seconds", "status")]


def printed(table: DataTable[FlatRow], width: int, *drop_first: Any, terminal: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    Grid(table, drop_first=drop_first).print(console)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def results() -> DataTable[FlatRow]:
    return DataTable(RESULT_FIELDS, RESULTS, lambda row: "all" if row["status"] == "ok" else None)


def test_a_table_has_a_line_a_row() -> None:
    assert printed(results(), 80) == [
        "precision       throughput  step time  status",
        "fp32        853.3 images/s   300.0 ms  ok",
        "bf16-mixed  2,560 images/s   100.0 ms  ok",
        "fp16-mixed               –          –  oom",
    ]


def test_rows_of_a_section_come_together_below_its_line() -> None:
    out = io.StringIO()
    rows = [RESULTS[0], RESULTS[2], RESULTS[1]]
    Grid(DataTable(RESULT_FIELDS, rows), setting=["status"]).print(Console(file=out, width=80))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "precision         throughput  step time  status",
        "ok",
        "  fp32        853.3 images/s   300.0 ms  ok",
        "  bf16-mixed  2,560 images/s   100.0 ms  ok",
        "oom",
        "  fp16-mixed               –          –  oom",
    ]


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80])
def test_a_table_fits_any_width_and_breaks_no_word_that_fits(width: int) -> None:
    lines = printed(results(), width, "step_seconds", terminal=True)
    assert all(len(line) <= width for line in lines)
    if width >= 30:
        words = " ".join(lines).split()
        assert {"bf16-mixed", "images/s", "853.3", "oom", "throughput"} <= set(words)


def test_columns_are_dropped_in_order_and_some_together() -> None:
    fields = [Field(name, name * 10) for name in "abcd"]
    table = DataTable[FlatRow](fields, [{"a": "1" * 8, "b": "2" * 8, "c": "3" * 8, "d": "4" * 8}])
    everything, without_b, only_a = (" ".join(printed(table, width, "b", ("c", "d"))) for width in (46, 34, 33))
    assert "left out" not in everything
    assert "left out, the terminal is too narrow: bbbbbbbbbb (--format csv has all)" in without_b
    assert "44444444" in without_b
    assert "3333" not in only_a
    assert "4444" not in only_a


def test_only_columns_that_wrap_give_way() -> None:
    row = {"figure": 123456789, "words": "one of two words, cut to three"}
    table = DataTable[FlatRow]([FIGURE, WORDS], [row])
    assert printed(table, 30) == ["   figure  words", "123456789  one of two words,", "           cut to three"]
    assert len(printed(table, 80)) == 2


def test_a_word_wider_than_the_terminal_is_folded() -> None:
    text = "".join(printed(DataTable[FlatRow]([FIGURE], [{"figure": 123456789}]), 4))
    assert "".join(character for character in text if character.isdigit()) == "123456789"


def test_thousands_of_rows_are_a_line_each() -> None:
    rows: list[FlatRow] = [{"figure": number, "words": "[one] of some words"} for number in range(2000)]
    lines = printed(DataTable([FIGURE, WORDS], rows), 12, "words")
    assert len(lines) == 2001
    assert lines[-1] == "  1999  [one] of some words"


def test_markdown_cells_cannot_end_a_cell() -> None:
    lines = markdown_grid([FIGURE, WORDS], [{"figure": "1|2", "words": "3\n<b>4"}])
    assert lines == ["| figure | words |", "|---:|---|", "| 1\\|2 | 3 &lt;b>4 |"]


def test_values_are_json() -> None:
    values = {"a": math.nan, "b": -math.inf, "c": 1.5, "d": None, "e": "nan"}
    assert json_values(values) == {"a": "nan", "b": "-inf", "c": 1.5, "d": None, "e": "nan"}
    json.dumps(json_values(values), allow_nan=False)


def test_every_field_has_a_name_of_its_own_and_a_text_without_a_value() -> None:
    assert len({field.name for field in FIELDS}) == len(FIELDS)
    assert {field.text({}) for field in FIELDS} == {"–"}


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.876, 1.924, "1.90× [1.88, 1.92]"),
        (None, None, "1.90×"),
        (1.9, 1.9, "1.90×"),
        (0.64, 5.6, "1.90× [0.64, 5.60]"),
        (0.63, 5.6, "1.90× (too noisy)"),
        (0.64, 5.8, "1.90× (too noisy)"),
    ],
)
def test_a_speedup_has_its_interval_if_it_says_something(low: float | None, high: float | None, text: str) -> None:
    assert find_field("speedup").text({"speedup": 1.9, "speedup_low": low, "speedup_high": high}) == text


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (1.31, 1.295, 1.325, "1.31 ± 0.02"),
        (1.9, None, None, "1.90"),
        (1.9, 1.9, 1.9, "1.90"),
        (1.22, 0.6, 2.47, "[0.60, 2.47]"),
        (0.99, 0.981, 0.998, "0.990 ± 0.009"),
        (5.85, 2.6, 9.1, "5.85 ± 3.25"),
        (1.09, 0.63, 1.91, "[0.63, 1.91]"),
        (1.0012, 1.0010, 1.0016, "1.001 ± 0.001"),
        (1.0, 0.30, 1.2, "too noisy"),
        (8.56, 0.0, 196072080242519.41, "too noisy"),
    ],
)
def test_a_narrow_ratio_is_honest(value: float, low: float | None, high: float | None, text: str) -> None:
    assert short_ratio_text("x")({"x": value, "x_low": low, "x_high": high}) == text


def test_a_figure_that_is_too_noisy_is_not_the_best() -> None:
    field = find_field("speedup")
    rows = [{"speedup": 3.0, "speedup_low": 0.5, "speedup_high": 20.0}, {"speedup": 2.0}, {"speedup": 1.0}]
    assert DataTable([field], rows, lambda _: "all").best(field) == {1}


def test_fields_worth_showing() -> None:
    fields = [Field("a", varies=True), Field("b", default=("none",)), Field("c"), Field("d")]
    one: FlatRow = {"a": 1, "b": "none", "c": 0, "d": None}
    other: FlatRow = {"a": 1, "b": None, "c": 0}
    assert [field.name for field in worth_showing(fields, [one, other])] == ["c"]
    assert [field.name for field in worth_showing(fields, [one, {**other, "a": 2, "b": "4"}], ["d"])] == [*"abcd"]


LINE = "[bold]resnet50[/bold] takes 3 s in 'fp16' " + "and so on " * 10


def line(terminal: bool, indent: str = "", text: str = LINE, width: int = 40) -> list[str]:
    out = io.StringIO()
    print_line(Console(file=out, width=width, force_terminal=terminal, color_system=None), indent + text)
    return out.getvalue().splitlines()


def test_a_piped_line_stays_one_line() -> None:
    assert line(terminal=False) == [LINE]


def test_a_terminal_breaks_no_path() -> None:
    path = "/scratch/a-long-name/" + "another/" * 5 + "results"
    shown = line(terminal=True, text=f"3 results in {path}/. Next:\ncastwise report {path}")
    assert shown == ["3 results in", f"{path}/.", "Next:", f"castwise report {path}"]


def test_a_terminal_wraps_a_line_behind_its_indent() -> None:
    lines = line(terminal=True, indent="  ")
    assert len(lines) > 1
    assert all(each.startswith("  ") and each[2] != " " for each in lines)
    assert " ".join(lines).split() == LINE.split()


@pytest.mark.parametrize("width", [80, 30])
def test_a_terminal_breaks_no_line_before_a_unit_or_within_a_command(width: int) -> None:
    whole = ["31 %", "700 W", "1,980 MHz", "12.3 GiB", "5 min", "03 s", "2,560 images/s", "`castwise run --help`"]
    for before in range(1, width):
        text = "x" * before + " " + " of ".join(whole)
        lines = line(terminal=True, text=text, width=width)
        assert max(map(len, lines)) <= width
        assert [part for part in whole if not any(part in each for each in lines)] == []
        assert " ".join(lines).split(" ") == text.split(" "), "plain spaces, as in a pipe"


def test_a_piped_table_is_as_wide_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert result_console().width >= 160
