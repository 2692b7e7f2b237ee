"""A chart: a plotly figure as a plain document, what it shows in words, and the table of what is in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from castwise.max_batch.result import MaxBatch, max_batches_of
from castwise.records.schema import Trial
from castwise.render.table import DataTable
from castwise.report.collection import Collection, ComparisonGroup

R = TypeVar("R")


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: What its files are called, and its place in the registry: "throughput".
        title: Its heading.
        says: What it shows, in a sentence, for those who do not see it.
        traces: plotly's traces.
        layout: plotly's layout, colours of the page left to the theme.
        table: What is in it.
        note: What a reader must know of it; empty where there is nothing.
        narrow: What of the layout is another on a narrow screen; empty where nothing is.
    """

    name: str
    title: str
    says: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    table: DataTable[Any]
    note: str = ""
    narrow: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupSubject:
    """What a chart of one topic is drawn from.

    Attributes:
        group: The group.
        file_of: Returns the name of the file that a trial was read from.
    """

    group: ComparisonGroup
    file_of: Callable[[Trial], str]

    @property
    def fits(self) -> list[MaxBatch]:
        """Return the topic's searches for the largest batch."""
        return max_batches_of(trial for cell in self.group.configurations for trial in cell.trials)


@dataclass(frozen=True)
class CollectionSubject:
    """What a chart of all records is drawn from.

    Attributes:
        collection: The records.
        file_of: Returns the name of the file that a trial was read from.
    """

    collection: Collection
    file_of: Callable[[Trial], str]


S = TypeVar("S")


@dataclass(frozen=True)
class ChartKind(Generic[S]):
    """A row of the registry of charts.

    Attributes:
        name: The chart's name.
        make: Draws it; None where the records have nothing for it.
    """

    name: str
    make: Callable[[S], Chart | None]
