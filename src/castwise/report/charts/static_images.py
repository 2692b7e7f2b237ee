"""Charts as pictures, PNG and SVG, for papers and READMEs: drawn by kaleido in an installed Chrome or Chromium."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from castwise.errors import UsageError
from castwise.records.store import free_name, slug
from castwise.render.theme import THEMES
from castwise.report.charts.chart import Chart, GroupSubject
from castwise.report.charts.machines import ratios
from castwise.report.charts.plotly_parts import LEGEND_ROW, PICTURE, Document, escape, legend_rows
from castwise.report.charts.registry import charts_of
from castwise.report.charts.throughput import overview
from castwise.report.collection import Collection, FileOf
from castwise.report.machine_comparison import MachineComparison

FORMATS = ("png", "svg")
_WIDTH = 900  # pixels, of a column in a paper at twice its size
_TITLE_HEIGHT = 60
_NAME_LENGTH = 80


Picture = tuple[str, Document]  # the name of its file, without a suffix, and the figure


def write_pictures(pictures: Iterable[Picture], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a picture of each chart in each format into a folder and return their paths.

    Raises:
        UsageError: kaleido is not installed, or it finds no browser.
    """
    try:
        import kaleido
        from choreographer.errors import ChromeNotFoundError
    except ImportError:
        raise UsageError("Pictures of charts need kaleido: pip install 'castwise[charts]'.") from None
    folder.mkdir(parents=True, exist_ok=True)
    orders = [
        {
            "fig": figure,
            "path": str(folder / f"{name}.{kind}"),
            "opts": {"format": kind, "scale": 2 if kind == "png" else 1},
        }
        for name, figure in pictures
        for kind in formats
    ]
    try:
        # MathJax would be fetched from the network.
        kaleido.write_fig_from_object_sync(orders, kopts={"mathjax": False})
    except ChromeNotFoundError:
        raise UsageError(
            "Pictures of charts need Chrome or Chromium, and none was found. On Debian: apt-get install chromium."
        ) from None
    return [Path(str(order["path"])) for order in orders]


def on_white(chart: Chart, subject: str = "") -> Document:
    """Return a chart as a figure of its own, in light colours on white; the subject extends its title."""
    title = escape(f"{chart.title}: {subject}" if subject else chart.title)
    head = _TITLE_HEIGHT  # the legend is below the title
    if chart.layout.get("showlegend") is not False:
        head += LEGEND_ROW * legend_rows(chart.traces, PICTURE)
    margin = chart.layout["margin"]
    layout = chart.layout | {
        "title": {"text": title, "font": {"size": 16}, "x": 0.02, "y": 1, "yanchor": "top", "pad": {"t": 16}},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "width": _WIDTH,
        "height": chart.layout["height"] + head,
        "margin": margin | {"t": margin["t"] + head},
    }
    return {"data": _light(chart.traces), "layout": _light(layout)}


def pictures_of(collection: Collection, file_of: FileOf) -> Iterator[Picture]:
    """Yield all charts of a collection; no two have the same file name."""
    taken: set[str] = set()
    all_groups = overview(collection, file_of)
    if all_groups is not None:
        yield all_groups.name, on_white(all_groups)
    for group in collection.groups:
        name = _file_name(group.title, taken)
        for chart in charts_of(GroupSubject(group, file_of)):
            yield f"{name}-{chart.name}", on_white(chart, group.title)


def pictures_of_machines(comparison: MachineComparison, file_of: FileOf) -> Iterator[Picture]:
    """Yield the chart of compared machines, if they have a ratio."""
    chart = ratios(comparison, file_of)
    if chart is not None:
        yield chart.name, on_white(chart)


def _file_name(title: str, taken: set[str]) -> str:
    """Return what files about a group are named by, and take it."""
    name = free_name(slug(title)[:_NAME_LENGTH] or "group", taken, "-")
    taken.add(name)
    return name


def _light(value: Any) -> Any:
    if isinstance(value, str):
        return THEMES["light"].get(value, value)
    if isinstance(value, dict):
        return {key: _light(each) for key, each in value.items()}
    return [_light(each) for each in value] if isinstance(value, list) else value
