"""The charts of docs/climbs.md and docs/fit.md: a waterfall a climb, and the curve of each largest batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from climb_tables import Climb, picture_of
from climbs import known_account, names
from fit_tables import is_shared, measured_fits
from fit_tables import picture_of as curve_of
from stored import RECORDS, load

from castwise.analysis import steady_metrics
from castwise.render.table import DataTable
from castwise.report.charts.batch_curve import batch
from castwise.report.charts.chart import Chart, TopicSubject
from castwise.report.charts.static_images import Picture
from castwise.report.charts.waterfall import Link, drawn
from castwise.report.collection import collect
from castwise.tune.rows import LIMITED


def pictures() -> Iterator[Picture]:
    """Return all of them, as far as there are records."""
    for name in names():
        account = known_account(name)
        chart = None if account is None else climb_chart((name, account, load(RECORDS / "tune" / name)))
        if chart is not None:
            yield Picture(Path(picture_of(name)).stem, "", chart)
    for name, groups in measured_fits(RECORDS / "fit").items():
        if is_shared(groups[0]):
            continue
        topic = collect(load(RECORDS / "fit" / name)).topics[0]
        chart = batch(TopicSubject(topic, lambda trial: trial.spec.key))
        if chart is not None:
            yield Picture(Path(curve_of(name)).stem, f"{name} on {topic.first.environment.device_name}", chart)


def climb_chart(climb: Climb) -> Chart | None:
    """Return the rungs of a climb as a waterfall, each with its speed-up over the one below; None without any."""
    name, account, trials = climb
    first, *others = account["rows"]
    rungs = [row for row in others if row["outcome"] == "taken" and not row["tried"].endswith(LIMITED)]
    if not rungs or first["throughput_per_second"] is None:
        return None
    plain = first["throughput_per_second"]
    links = [
        Link(f"plain loop, {first['precision']}", plain, None),
        *(_link(row, plain * row["total_speedup"]) for row in rungs[:-1]),
        _link(rungs[-1], rungs[-1]["throughput_per_second"]),
    ]
    unit, precision = steady_metrics.unit_of(trials[0]), account["fastest"]["precision"]
    title = (
        f"{name}, batch {trials[0].spec.batch_size}, on {trials[0].environment.device_name}: what each change bought"
    )
    return drawn(links, unit, precision, title, DataTable((), ()))


def _link(row: dict[str, Any], rate: float) -> Link:
    """Return a rung as a bar.

    What is between the first and the last has its height of the speed-up over the plain loop: throughputs of sittings
    apart can fall where the loops beside each other, which the bar's figure is of, say that they rise.
    """
    words = row["tried"] if row["tried"].startswith(row["precision"]) else f"+ {row['tried']}"
    return Link(words, rate, row["speedup"])
