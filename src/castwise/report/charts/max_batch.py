"""The largest batch of each precision, and what sources published of it."""

from castwise.max_batch.columns import batch_text, loop_name, rate_text, shown_summary
from castwise.max_batch.result import MaxBatch
from castwise.render.table import DataTable
from castwise.render.theme import INK, look_of
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.plotly_parts import axis, escape, hover, layout


def largest(subject: GroupSubject) -> Chart | None:
    """Return the largest batch that trained, and the knee, of each loop; None where none was looked for."""
    fits = [fit for fit in subject.fits if fit.largest is not None]
    if not fits:
        return None
    best = max(fits, key=_size)
    names = [escape(loop_name(fit)) for fit in fits]
    document = layout()
    document["barmode"] = "group"
    document["showlegend"] = False
    document["xaxis"] = axis(type="category", showgrid=False)
    document["yaxis"] = axis("largest batch that trains", rangemode="tozero")
    bars = {
        "type": "bar",
        "name": "largest batch",
        "x": names,
        "y": [_size(fit) for fit in fits],
        "text": [batch_text(fit.largest) for fit in fits],
        "textposition": "auto",
        "marker": {
            "color": [look_of(fit.spec.precision).colour for fit in fits],
            "line": {"color": INK, "width": 0.5},
        },
        "hovertext": [
            hover([loop_name(fit), f"batch {batch_text(fit.largest)}", rate_text(fit.largest), *_files(subject, fit)])
            for fit in fits
        ],
        "hoverinfo": "text",
    }
    return Chart(
        name="largest",
        title="Largest batch that trains",
        says=f"The largest batch that trained is {batch_text(best.largest)}, with {loop_name(best)}.",
        traces=[bars],
        layout=document,
        table=DataTable(shown_summary(subject.fits), subject.fits),
        note="Each was trained in a process of its own, and so was the next one, which ran out of memory.",
    )


def _files(subject: GroupSubject, fit: MaxBatch) -> list[str]:
    return [subject.file_of(trial) for trial in (fit.largest, fit.failing) if trial is not None]


def _size(fit: MaxBatch) -> int:
    return 0 if fit.largest is None else fit.largest.spec.batch_size
