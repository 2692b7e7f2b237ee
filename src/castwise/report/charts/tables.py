"""The columns of the tables below charts that show cells."""

from collections.abc import Callable, Sequence

from castwise.analysis.statistics import Estimate, has_interval
from castwise.render.table import Column, DataTable
from castwise.render.units import format_bytes, format_percent, format_rate, format_ratio
from castwise.report.charts.chart import GroupSubject
from castwise.report.collection import Configuration

Getter = Callable[[Configuration], Estimate | None]


def cell_grid(
    subject: GroupSubject, cells: Sequence[Configuration], figures: Sequence[Column[Configuration]]
) -> DataTable[Configuration]:
    """Return a table of cells: which they are, these figures, and the file they are from."""
    topic = subject.group
    columns = [text_column("precision", lambda cell: cell.precision)]
    if any(topic.setting(cell) for cell in cells):
        columns.append(text_column("setting", topic.setting))
    columns += figures
    columns += [
        text_column("status", lambda cell: cell.trial.status),
        text_column("file", lambda cell: subject.file_of(cell.trial)),
    ]
    return DataTable(columns, cells)


def text_column(name: str, text: Callable[[Configuration], str]) -> Column[Configuration]:
    """Return a column of words."""
    return Column(name, name, text, text, left=True)


def bytes_column(name: str, title: str, value: Callable[[Configuration], float | None]) -> Column[Configuration]:
    """Return a column of bytes."""
    return Column(name, title, value, lambda cell: format_bytes(value(cell)))


def share_column(name: str, title: str, value: Callable[[Configuration], float | None]) -> Column[Configuration]:
    """Return a column of shares, in per cent."""
    return Column(name, title, value, lambda cell: format_percent(value(cell)))


def rate_columns() -> list[Column[Configuration]]:
    """Return throughput with its interval."""
    return _with_ends("throughput", lambda cell: cell.throughput, _rate, format_rate)


def ratio_columns() -> list[Column[Configuration]]:
    """Return the speed-up with its interval and verdict."""
    verdict = text_column("verdict", lambda cell: cell.verdict.kind if cell.verdict else "–")
    return [*_with_ends("speedup", lambda cell: cell.speedup, _ratio, format_ratio), verdict]


def _rate(cell: Configuration) -> str:
    return "–" if cell.throughput is None else f"{format_rate(cell.throughput.value)} {cell.unit}/s"


def _ratio(cell: Configuration) -> str:
    return format_ratio(cell.speedup.value if cell.speedup else None)


def _with_ends(
    name: str, get: Getter, text: Callable[[Configuration], str], form: Callable[[float | None], str]
) -> list[Column[Configuration]]:
    title = {"speedup": "speed-up"}.get(name, name)

    def end(which: str) -> Callable[[Configuration], float | None]:
        def value(cell: Configuration) -> float | None:
            found = get(cell)
            return getattr(found, which) if has_interval(found) else None

        return value

    def value(cell: Configuration) -> float | None:
        found = get(cell)
        return found.value if found is not None else None

    low, high = end("low"), end("high")
    return [
        Column(name, title, value, text),
        Column(f"{name}_low", "from", low, lambda cell: form(low(cell))),
        Column(f"{name}_high", "to", high, lambda cell: form(high(cell))),
        Column("processes", "processes", lambda cell: len(cell.trials), lambda cell: str(len(cell.trials))),
    ]
