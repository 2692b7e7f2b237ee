"""All charts, in the order in which a report shows them: one row each."""

from castwise.report.charts import bars, batch, curves, memory, scaling, turns, waterfall
from castwise.report.charts.chart import Chart, ChartKind, OverviewSubject, TopicSubject

OVERVIEW_CHARTS: tuple[ChartKind[OverviewSubject], ...] = (ChartKind("overview", bars.overview),)

TOPIC_CHARTS: tuple[ChartKind[TopicSubject], ...] = (
    ChartKind("throughput", bars.throughput),
    ChartKind("speedup", bars.speedup),
    ChartKind("memory", memory.memory),
    ChartKind("batch", batch.batch),
    ChartKind("waterfall", waterfall.waterfall),
    ChartKind("loss", curves.loss),
    ChartKind("accuracy", curves.accuracy),
    ChartKind("perplexity", curves.perplexity),
    ChartKind("time", curves.time_split),
    ChartKind("scaling", scaling.scaling),
    ChartKind("blocks", turns.blocks),
    ChartKind("telemetry", turns.telemetry),
)


def charts_of(subject: TopicSubject) -> list[Chart]:
    """Return the charts of a topic that its records have something for."""
    return [chart for kind in TOPIC_CHARTS if (chart := kind.make(subject)) is not None]


def overview_charts(subject: OverviewSubject) -> list[Chart]:
    """Return the charts of all records together."""
    return [chart for kind in OVERVIEW_CHARTS if (chart := kind.make(subject)) is not None]
