"""Draw the SVG pictures of docs/images/ from records: the main result over all models, and charts of reports.

    python benchmarks/hero.py

The main result is of the searches. A search of a workload counts if it started from PyTorch's default. The grey part of
a bar is the fastest precision in the plain loop. A bar whose search had no final session says so.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from search_tables import fastest_row, is_proven, searches
from stored import RECORDS

from castwise.report.charts.chart import Chart
from castwise.report.charts.registry import pictures_of
from castwise.report.charts.svg import Bar, Key, Segment, bar_chart
from castwise.report.files import SelectionOptions, find
from castwise.report.machine_names import short_name
from castwise.show.theme import FAINT, look_of
from castwise.show.units import format_rate

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
# By name: a folder of records, and which of its charts.
_CHARTS = {
    "accuracy-curves.svg": ("accuracy_runs", "score"),
    "accuracy-equivalence.svg": ("accuracy_runs", "equivalence"),
}


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and the SVG of each picture."""
    yield "speedups.svg", _speedups()
    for name, (folder, kind) in _CHARTS.items():
        found = find([RECORDS / folder], SelectionOptions())
        charts = pictures_of(found.collection, found.file_of)
        yield name, next(svg for file, svg in charts if file.endswith(f"-{kind}.svg"))


def _speedups() -> str:
    found = [each for each in searches().values() if each["precision"] == "default" and ":" not in each["workload"]]
    found.sort(key=lambda search: -fastest_row(search)["total_speedup"])
    bars = [_bar(search) for search in found]
    taken = dict.fromkeys(fastest_row(search)["precision"] for search in found)
    keys = [Key("fastest precision alone", FAINT)]
    keys += [Key(f"{name} and changes to the loop, by castwise tune", look_of(name).colour) for name in taken]
    chart = Chart(
        title="How many times as fast as PyTorch's default",
        summary="",
        draw=lambda _: bar_chart(bars, 900, "times as fast as PyTorch's default", keys),
    )
    return chart.as_file(_where(found))


def _bar(search: dict[str, Any]) -> Bar:
    last = fastest_row(search)
    speedup = last["total_speedup"]
    alone = [row for row in search["rows"] if row["techniques"] == "none" and row["total_speedup"]]
    best = min(max((row["total_speedup"] for row in alone), default=1.0), speedup)
    rate = f"{format_rate(last['throughput_per_second'])} {search['unit']}/s"
    rate += "" if is_proven(last) else ", not measured again"
    segments = [Segment(best, FAINT), Segment(speedup - best, look_of(last["precision"]).colour)]
    name = f"{search['workload']}, {short_name(search['environment']['gpu'])}"
    return Bar(name, segments, f"{speedup:.1f}× · {last['precision']}, {rate}")


def _where(found: list[dict[str, Any]]) -> str:
    gpus = sorted({search["environment"]["gpu"] for search in found})
    versions = sorted({search["environment"]["torch"].partition("+")[0] for search in found})
    dates = sorted({search["started_at"][:10] for search in found})
    return f"{', '.join(gpus)}, torch {', '.join(versions)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"


if __name__ == "__main__":
    for path, text in pictures():
        (IMAGES / path).write_text(text)
