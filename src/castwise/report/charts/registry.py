"""All charts, in the order in which a report shows them: one row each."""

from castwise.report.charts import (
    batch_curve,
    block_times,
    max_batch,
    memory,
    memory_breakdown,
    scaling,
    throughput_speedup,
    training_curves,
    waterfall,
)
from castwise.report.charts.chart import Chart, ChartKind, CollectionSubject, GroupSubject

OVERVIEW_CHARTS: tuple[ChartKind[CollectionSubject], ...] = (ChartKind("overview", throughput_speedup.overview),)

TOPIC_CHARTS: tuple[ChartKind[GroupSubject], ...] = (
    ChartKind("largest", max_batch.largest),
    ChartKind("throughput", throughput_speedup.throughput),
    ChartKind("speedup", throughput_speedup.speedup),
    ChartKind("memory", memory.memory),
    ChartKind("batch", batch_curve.batch),
    ChartKind("parts", memory_breakdown.parts),
    ChartKind("waterfall", waterfall.waterfall),
    ChartKind("loss", training_curves.loss),
    ChartKind("accuracy", training_curves.accuracy),
    ChartKind("perplexity", training_curves.perplexity),
    ChartKind("time", training_curves.time_split),
    ChartKind("scaling", scaling.scaling),
    ChartKind("blocks", block_times.blocks),
    ChartKind("telemetry", block_times.telemetry),
)

# What a search for the largest batch is about; bars of each batch that it tried would drown it.
_OF_FITS = ("largest", "batch", "parts")


def charts_of(subject: GroupSubject) -> list[Chart]:
    """Return the charts of a topic that its records have something for."""
    kinds = [kind for kind in TOPIC_CHARTS if not subject.group.is_max_batch or kind.name in _OF_FITS]
    return [chart for kind in kinds if (chart := kind.make(subject)) is not None]


def overview_charts(subject: CollectionSubject) -> list[Chart]:
    """Return the charts of all records together."""
    return [chart for kind in OVERVIEW_CHARTS if (chart := kind.make(subject)) is not None]
