"""The charts of a comparison group, in the order in which a report shows them: one row each."""

from collections.abc import Callable

from castwise.report.charts import blocks, memory, scaling, throughput, training, waterfall
from castwise.report.charts.chart import Chart, GroupSubject

GROUP_CHARTS: dict[str, Callable[[GroupSubject], Chart | None]] = {
    "largest": memory.max_batch,
    "throughput": throughput.throughput,
    "speedup": throughput.speedup,
    "memory": memory.memory,
    "batch": scaling.batch,
    "parts": memory.memory_breakdown,
    "waterfall": waterfall.waterfall,
    "loss": training.loss,
    "accuracy": training.accuracy,
    "perplexity": training.perplexity,
    "time": training.time_split,
    "scaling": scaling.scaling,
    "blocks": blocks.blocks,
    "telemetry": blocks.telemetry,
}

# Of a search for the largest batch; bars of every batch that it tried would be too many.
_OF_MAX_BATCH = ("largest", "batch", "parts")


def charts_of(subject: GroupSubject) -> list[Chart]:
    """Return the charts that the records have something for."""
    makers = [make for name, make in GROUP_CHARTS.items() if not subject.group.is_max_batch or name in _OF_MAX_BATCH]
    return [chart for make in makers if (chart := make(subject)) is not None]
