"""A chart: a plotly figure as a plain dictionary, what it shows in a sentence, and the table of its values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from castwise.analysis.statistics import Estimate
from castwise.max_batch.result import MaxBatch, max_batches_of
from castwise.records.schema import Trial
from castwise.render.table import Column, DataTable
from castwise.report.charts.plotly_parts import Document, hover
from castwise.report.collection import Collection, ComparisonGroup, Configuration


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
    """What a chart of one comparison group is drawn from.

    Attributes:
        group: The group.
        file_of: Returns the name of the file that a trial was read from.
    """

    group: ComparisonGroup
    file_of: Callable[[Trial], str]

    @property
    def max_batches(self) -> list[MaxBatch]:
        """Return the group's searches for the largest batch."""
        return max_batches_of(trial for config in self.group.configurations for trial in config.trials)

    def hover(self, config: Configuration, *lines: str) -> str:
        """Return the text at the pointer for a configuration: its label, these lines, and its file."""
        return hover([self.group.label(config), *lines, self.file_of(config.trial)])

    def table(
        self, configurations: Sequence[Configuration], columns: Sequence[Column[Configuration]]
    ) -> DataTable[Configuration]:
        """Return the table below a chart: which configurations, these columns, and the files."""
        group = self.group
        which = [words("precision", lambda c: c.precision)]
        if any(group.setting(config) for config in configurations):
            which.append(words("setting", group.setting))
        files = [words("status", lambda c: c.trial.status), words("file", lambda c: self.file_of(c.trial))]
        return DataTable([*which, *columns, *files], configurations)


@dataclass(frozen=True)
class CollectionSubject:
    """What a chart of all records is drawn from.

    Attributes:
        collection: The records.
        file_of: Returns the name of the file that a trial was read from.
    """

    collection: Collection
    file_of: Callable[[Trial], str]


def words(title: str, text: Callable[[Any], str]) -> Column[Any]:
    """Return a column of text."""
    return Column(title.replace(" ", "_"), title, text, text, left=True)


def value_of(found: Estimate | None) -> float:
    """Return a figure, 0 if there is none."""
    return found.value if found is not None else 0.0
