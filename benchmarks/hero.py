"""Draw the SVG pictures of docs/images/ from records: the main result, what each precision brings, charts of reports.

    python benchmarks/hero.py

The main result is of the searches. A search of a workload counts if it started from PyTorch's default. The pale part of
a bar is the fastest precision in the plain loop. A bar whose search had no final session says so.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from search_tables import fastest_row, is_proven, searches
from stored import RECORDS, load

from castwise.analysis.decide import WORTHWHILE, decide
from castwise.analysis.result_table import Row, rows_of_steps
from castwise.cli.compare import CompareOptions, compare_folders
from castwise.registry.gpus import short_device_name
from castwise.registry.precisions import PRECISIONS
from castwise.report.charts.machines import pictures_of_machines
from castwise.report.charts.registry import pictures_of
from castwise.report.charts.svg import escape, nice_ticks, path, text
from castwise.report.files import SelectionOptions, find
from castwise.show.theme import FAINT, INK, LIGHT, PAGE, SOFT

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
# By name: a folder of records, and the name that `castwise report --charts` gives one of its charts.
_CHARTS = {
    "accuracy-curves.svg": ("accuracy_runs", "mnist-cnn-on-mnist-training-score.svg"),
    "accuracy-equivalence.svg": ("accuracy_runs", "mnist-cnn-on-mnist-training-equivalence.svg"),
    "max-batch-curve.svg": ("fit/resnet50", "resnet50-largest-batch-batch.svg"),
    "own-model.svg": ("trials", "gpt2-py-build-h100-throughput.svg"),
    "run.svg": ("trials", "resnet50-h200-throughput.svg"),
    "scaling.svg": ("scaling", "resnet50-h200-scaling.svg"),
    "tune-ladder.svg": ("tune/resnet50", "resnet50-ladder.svg"),
    "why-profile.svg": ("why", "resnet50-profile.svg"),
}
_COMPARED = ("why", "trials/nvidia-h200-68f0f403")  # of an H100 and an H200
_WIDTH, _HEAD, _LINE = 900, 96, 27
_DEFAULT, _ALONE, _TUNED, _SLOWER = "#8c959f", "#9fc5e8", "#0969da", "#cf222e"
# Each colour on a dark page: those of the report's page, and of the two pictures that are drawn here.
_DARK = {INK: "#e8eaed", SOFT: "#aab3bd", FAINT: "#383f48", PAGE: "#14171b"}
_PAIRS = {LIGHT[name]: dark for name, dark in _DARK.items()} | {
    _DEFAULT: "#6e7681",
    _ALONE: "#2f5d8a",
    _TUNED: "#58a6ff",
    _SLOWER: "#ff7b72",
}


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and the SVG of each picture."""
    yield "speedups.svg", for_dark_pages(_speedups())
    yield "precisions.svg", for_dark_pages(_map())
    charts: dict[str, dict[str, str]] = {}
    for name, (folder, file) in _CHARTS.items():
        if folder not in charts:
            found = find([RECORDS / folder], SelectionOptions())
            charts[folder] = dict(pictures_of(found.collection, found.file_of))
        yield name, for_dark_pages(charts[folder][file])
    machines = tuple(str(RECORDS / each) for each in _COMPARED)
    compared = compare_folders(CompareOptions(machines=machines, results=RECORDS))
    yield "compare.svg", for_dark_pages(dict(pictures_of_machines(compared.comparison, compared.file_of))["ratios.svg"])


def for_dark_pages(svg: str) -> str:
    """Return a picture that has other colours on a dark page, in programs that know of such."""
    rules = (f'[{part}="{light}"]{{{part}:{dark}}}' for light, dark in _PAIRS.items() for part in ("fill", "stroke"))
    return svg.replace("><", f"><style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style><", 1)


def _speedups() -> str:
    """Return a bar for each search: PyTorch's default, the fastest precision alone, the fastest loop."""
    found = [each for each in searches().values() if each["precision"] == "default" and ":" not in each["workload"]]
    found.sort(key=lambda search: -fastest_row(search)["total_speedup"])
    totals = [fastest_row(search)["total_speedup"] for search in found]
    left, bottom = 160, _HEAD + _LINE * len(found)
    scale = (_WIDTH - left - 290) / totals[0]  # the rest is for the words behind the longest bar
    one = path(f"M{left + scale:g} {_HEAD - 4}V{bottom}", INK, 1.2, "2 3")  # behind the bars, where figures stand
    parts = [one, text(left + scale, bottom + 16, "1×", "middle", 12)]
    for tick in nice_ticks(0, totals[0], 4)[1:]:
        x = left + tick * scale
        parts += [path(f"M{x:g} {_HEAD}V{bottom}", FAINT), text(x, bottom + 16, f"{tick:g}×", "middle", 12, SOFT)]
    for index, (search, total) in enumerate(zip(found, totals, strict=True)):
        top, last = _HEAD + _LINE * index + 5, fastest_row(search)
        alone = [row["total_speedup"] for row in search["rows"] if row["techniques"] == "none" and row["total_speedup"]]
        best = min(max(alone, default=1.0), total)
        for value, colour in ((total, _TUNED), (best, _ALONE), (1, _DEFAULT)):
            parts.append(f'<rect x="{left}" y="{top}" width="{value * scale:.1f}" height="18" fill="{colour}"/>')
        inside = (best - 1) * scale > 24 or best - 1 > total - best  # else the figure stands in the dark part
        x, anchor = (left + best * scale - 2, "end") if inside else (left + max(best, 1) * scale + 5, "")
        size = 10 if inside and (best - 1) * scale < 28 else 12  # a narrow part has room for small figures
        parts.append(text(round(x, 1), top + 13, f"{best:.1f}×", anchor, size, INK if inside else PAGE))
        gpu = short_device_name(search["environment"]["gpu"])
        parts += [
            text(left - 48, top + 14, search["workload"], "end", 14),
            text(left - 8, top + 14, gpu, "end", 11, SOFT),
        ]
        end = round(left + total * scale + 8, 1)
        parts.append(f'<g font-weight="700">{text(end, top + 14, f"{total:.1f}×", size=14)}</g>')
        rest = last["precision"] + ("" if is_proven(last) else ", not measured again")
        parts.append(text(end + 12 + 8 * len(f"{total:.1f}×"), top + 14, rest, size=12, fill=SOFT))
    title = f"{_times(totals[-1])} to {_times(totals[0])} times as fast as PyTorch's default, on {len(found)} models"
    keys = {
        "PyTorch's default": _DEFAULT,
        "fastest precision alone": _ALONE,
        "fastest loop (castwise tune)": _TUNED,
    }
    x = 16
    for name, colour in keys.items():
        parts.append(f'<rect x="{x}" y="63" width="12" height="12" fill="{colour}"/>' + text(x + 18, 74, name))
        x += 44 + round(6.8 * len(name))
    note = "Not measured again: no new processes confirmed this loop at the end of the search."
    is_open = [not is_proven(fastest_row(search)) for search in found]
    first = "Each model was measured in minutes on one GPU. The default uses TF32 in convolutions and RNNs."
    lines = [_where([(each["environment"], each["started_at"]) for each in found]), *([note] if any(is_open) else [])]
    return _picture(title, first, lines, bottom + 22, parts)


def _times(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _map() -> str:
    """Return how many times as fast as PyTorch's default each model is in each precision, without other changes."""
    rows = [row for folder in ("transformers", "trials") for row in rows_of_steps(load(RECORDS / folder))]
    names = [each.name for each in PRECISIONS if each.name != "default"]
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row.trial.spec.workload, []).append(row)
    ordered = sorted(models.items(), key=lambda item: -max(row.default_speedup or 0 for row in item[1]))
    left, width = 170, (_WIDTH - 170 - 12) / len(names)
    middles = [left + width * (place + 0.5) for place in range(len(names))]
    parts = [text(round(x), _HEAD - 12, name, "middle", 12) for x, name in zip(middles, names, strict=True)]
    for index, (model, own) in enumerate(ordered):
        top = _HEAD + _LINE * index
        gpu = short_device_name(own[0].trial.environment.device_name)
        parts += [
            text(left - 48, top + 17, model.removesuffix(":build"), "end", 14),
            text(left - 8, top + 17, gpu, "end", 11, SOFT),
        ]
        taken = [advice.precision for advice in decide(own)]
        for row in own:
            if row.precision in names:
                x = left + width * names.index(row.precision)
                parts.append(_cell(row, round(x, 1), top, round(width - 4, 1), row.precision in taken))
    where = _where([(row.trial.environment.model_dump(), row.trial.started_at) for row in rows])
    first = "Outlined: what castwise run takes. Red: slower than the default. ✕: the training diverged."
    note = "The precision is the only change. Precisions that end on true have no float32 weights; others are taken."
    title = "How many times as fast as PyTorch's default, by model and precision"
    return _picture(title, first, [where, note], _HEAD + _LINE * len(ordered), parts)


def _cell(row: Row, x: float, top: float, width: float, is_taken: bool) -> str:
    speedup = row.default_speedup if row.trial.status == "ok" else None
    strength = min(1.0, abs(math.log(speedup)) / math.log(10)) if speedup else 0.0
    colour = _SLOWER if (speedup or 1) < 1 / WORTHWHILE else _TUNED
    opacity = round(0.05 + 0.55 * strength, 2)
    outline = f' stroke="{INK}" stroke-width="2"' if is_taken else ""
    box = f'<rect x="{x}" y="{top}" width="{width}" height="23" rx="3" fill="{colour}" fill-opacity="{opacity}"'
    return f"{box}{outline}/>" + text(
        round(x + width / 2, 1), top + 16.5, f"{speedup:.2f}" if speedup else "✕", "middle"
    )


def _where(found: Sequence[tuple[dict[str, Any], str]]) -> str:
    """Return on which GPUs, with which torch and when figures were measured."""
    gpus = sorted({environment["gpu"] for environment, _ in found})
    versions = sorted({environment["torch"].partition("+")[0] for environment, _ in found})
    dates = sorted(started[:10] for _, started in found)
    return f"{', '.join(gpus)}, torch {', '.join(versions)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."


def _picture(title: str, first: str, last: Sequence[str], bottom: float, parts: Sequence[str]) -> str:
    """Return a whole file: title, a sentence, the picture and what must be known of it."""
    lines = [text(16, bottom + 18 + 17 * place, words, size=12, fill=SOFT) for place, words in enumerate(last)]
    height = bottom + 18 + 17 * len(last)
    whole = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
        f'height="{height:g}" font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{escape(title)}">'
        f'<rect width="100%" height="100%" fill="{PAGE}"/><g font-size="13" fill="{INK}">'
        f'<g font-weight="700">{text(16, 30, title, size=20)}</g>{text(16, 51, first, fill=SOFT)}'
        f"{''.join(parts)}{''.join(lines)}</g></svg>\n"
    )
    for name, colour in LIGHT.items():
        whole = whole.replace(name, colour)
    return whole


if __name__ == "__main__":
    for path_of, svg in pictures():
        (IMAGES / path_of).write_text(svg)
