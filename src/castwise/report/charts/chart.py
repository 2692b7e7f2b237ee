"""A chart: a plotly figure as a plain dictionary, what it shows in a sentence, and the table of its values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from castwise.max_batch.result import MaxBatch, max_batches_of
from castwise.records.schema import Trial
from castwise.render.fields import Field, FlatRow, find_field, find_fields
from castwise.render.table import DataTable
from castwise.report.charts.plotly_parts import Document, hover
from castwise.report.collection import ComparisonGroup, Configuration

FileOf = Callable[[Trial], str]  # names the file that a trial was read from


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: What its files are called, and its place in the registry: "throughput".
        title: Its heading.
        says: What it shows, in a sentence, for those who do not see it.
        traces: plotly's traces.
        layout: plotly's layout, colours of the page left to the theme.
        table: The values.
        note: What a reader must know of it; empty if there is nothing.
        narrow: What differs in the layout on a narrow screen.
    """

    name: str
    title: str
    says: str
    traces: list[Document]
    layout: Document
    table: DataTable[Any]
    note: str = ""
    narrow: Document = field(default_factory=dict)


@dataclass(frozen=True)
class GroupSubject:
    """What a chart is drawn from: a comparison group, and a function that names the file of a trial."""

    group: ComparisonGroup
    file_of: FileOf

    @property
    def max_batches(self) -> list[MaxBatch]:
        """Return the group's searches for the largest batch."""
        return max_batches_of(trial for config in self.group.configurations for trial in config.trials)

    def hover(self, config: Configuration, *lines: str) -> str:
        """Return the text at the pointer for a configuration: its label, these lines, and its file."""
        return hover([self.group.label(config), *lines, self.file_of(config.trial)])

    def table(
        self,
        configurations: Sequence[Configuration],
        fields: Sequence[Field],
        more_values: Callable[[Configuration], FlatRow] = lambda _: {},
    ) -> DataTable[FlatRow]:
        """Return the table below a chart: which configurations, these fields, and the files.

        Args:
            configurations: The rows.
            fields: The columns.
            more_values: Returns values of a configuration besides `Configuration.values`, by field name.
        """
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
