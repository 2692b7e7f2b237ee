"""A chart: a plotly figure as a plain dictionary, what it shows in a sentence, and the table of its values."""

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from castwise.render.fields import Field, FlatRow, find_field, find_fields
from castwise.render.table import DataTable
from castwise.report.charts.plotly_parts import Document, hover, line
from castwise.report.collection import ComparisonGroup, Configuration, FileOf

RATE_FIELDS = (
    find_field("throughput_per_second"),
    Field("throughput_per_second_low", "from", "rate"),
    Field("throughput_per_second_high", "to", "rate"),
    find_field("processes"),
)
SPEEDUP_FIELDS = (
    Field("speedup", "speed-up", "ratio"),
    Field("speedup_low", "from", "ratio"),
    Field("speedup_high", "to", "ratio"),
    *find_fields(("processes", "verdict")),
)


@dataclass(frozen=True)
class Chart:
    """One chart."""

    name: str  # of its files, and its place in the registry
    title: str
    summary: str  # what it shows, in a sentence, for those who do not see it
    traces: list[Document]
    layout: Document  # colours of the page left to the theme
    table: DataTable[Any]
    note: str = ""  # what a reader must know of it
    narrow: Document = field(default_factory=dict)  # what differs in the layout on a narrow screen


@dataclass(frozen=True)
class GroupSubject:
    """What a chart is drawn from: a comparison group, and a function that names the file of a trial."""

    group: ComparisonGroup
    file_of: FileOf

    def hover(self, config: Configuration, *lines: str) -> str:
        """Return the text at the pointer for a configuration: its label, these lines, and its file."""
        return hover([self.group.label(config), *lines, self.file_of(config.trial)])

    def line(
        self, config: Configuration, x: Sequence[float], y: Sequence[float | None], text: str, place: int = 0
    ) -> Document:
        """Return a configuration's line in a panel; `text` is the template of the text at the pointer."""
        return line(self.group.label(config), config.precision, x, y, text, place)

    def table(
        self,
        configurations: Sequence[Configuration],
        fields: Sequence[Field],
        more_values: Callable[[Configuration], FlatRow] = lambda _: {},
    ) -> DataTable[FlatRow]:
        """Return the table below a chart: which configurations, these fields, and the files."""
        rows: list[FlatRow] = [
            {
                **config.values,
                "setting": self.group.setting(config),
                "file": self.file_of(config.trial),
                **more_values(config),
            }
            for config in configurations
        ]
        setting = [Field("setting", "setting")] if any(row["setting"] for row in rows) else []
        return DataTable([find_field("precision"), *setting, *fields, *find_fields(("status", "file"))], rows)


def left_out(text: str, shown: Sized, every: Sized) -> str:
    """Return how many of all are drawn, in a text with a place for each number; empty if all are drawn."""
    return text.format(len(shown), len(every)) if len(shown) < len(every) else ""
