"""All charts, in the order in which a report shows them: one row each."""

from castwise.report.charts import bars, batch, curves, largest, memory, parts, scaling, turns, waterfall
from castwise.report.charts.chart import Chart, ChartKind, OverviewSubject, TopicSubject

OVERVIEW_CHARTS: tuple[ChartKind[OverviewSubject], ...] = (ChartKind("overview", bars.overview),)

TOPIC_CHARTS: tuple[ChartKind[TopicSubject], ...] = (
    ChartKind("largest", largest.largest),
    ChartKind("throughput", bars.throughput),
    ChartKind("speedup", bars.speedup),
    ChartKind("memory", memory.memory),
    ChartKind("batch", batch.batch),
    ChartKind("parts", parts.parts),
    ChartKind("waterfall", waterfall.waterfall),
    ChartKind("loss", curves.loss),
    ChartKind("accuracy", curves.accuracy),
    ChartKind("perplexity", curves.perplexity),
    ChartKind("time", curves.time_split),
    ChartKind("scaling", scaling.scaling),
    ChartKind("blocks", turns.blocks),
    ChartKind("telemetry", turns.telemetry),
)

# What a search for the largest batch is about; bars of each batch that it tried would drown it.
_OF_FITS = ("largest", "batch", "parts")


def charts_of(subject: TopicSubject) -> list[Chart]:
    """Return the charts of a topic that its records have something for."""
    kinds = [kind for kind in TOPIC_CHARTS if not subject.topic.is_fit or kind.name in _OF_FITS]
    return [chart for kind in kinds if (chart := kind.make(subject)) is not None]


def overview_charts(subject: OverviewSubject) -> list[Chart]:
    """Return the charts of all records together."""
    return [chart for kind in OVERVIEW_CHARTS if (chart := kind.make(subject)) is not None]
