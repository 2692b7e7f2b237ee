"""The columns of the tables below charts that show configurations."""

from collections.abc import Callable

from castwise.analysis.statistics import has_interval
from castwise.render.table import Column
from castwise.render.units import format_bytes, format_percent, format_rate, format_ratio
from castwise.report.charts.chart import words
from castwise.report.collection import Configuration


def bytes_column(name: str, title: str, value: Callable[[Configuration], float | None]) -> Column[Configuration]:
    """Return a column of bytes."""
    return Column(name, title, value, lambda config: format_bytes(value(config)))


def share_column(name: str, title: str, value: Callable[[Configuration], float | None]) -> Column[Configuration]:
    """Return a column of shares, in per cent."""
    return Column(name, title, value, lambda config: format_percent(value(config)))


def rate_columns() -> list[Column[Configuration]]:
    """Return throughput with its interval."""

    def value(config: Configuration) -> float | None:
        return config.throughput.value if config.throughput else None

    def text(config: Configuration) -> str:
        return f"{format_rate(value(config))} {config.unit}/s" if config.throughput else "–"

    return [Column("throughput", "throughput", value, text), *_interval_columns("throughput", format_rate)]


def ratio_columns() -> list[Column[Configuration]]:
    """Return the speed-up with its interval and verdict."""

    def value(config: Configuration) -> float | None:
        return config.speedup.value if config.speedup else None

    return [
        Column("speedup", "speed-up", value, lambda config: format_ratio(value(config))),
        *_interval_columns("speedup", format_ratio),
        words("verdict", lambda config: config.verdict.kind if config.verdict else "–"),
    ]


def _interval_columns(name: str, form: Callable[[float | None], str]) -> list[Column[Configuration]]:
    def column(end: str, title: str) -> Column[Configuration]:
        def value(config: Configuration) -> float | None:
            found = getattr(config, name)
            return getattr(found, end) if has_interval(found) else None

        return Column(f"{name}_{end}", title, value, lambda config: form(value(config)))

    processes = Column[Configuration]("processes", "processes", lambda c: len(c.trials), lambda c: str(len(c.trials)))
    return [column("low", "from"), column("high", "to"), processes]
