"""Tables of how far the figures can be trusted: a cell against itself, two invocations, neighbours that wait."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import ttest_1samp
from stored import NOT_MEASURED, load, place_of

from castwise.analysis import steady_metrics
from castwise.analysis.energy import power_watts
from castwise.analysis.result_table import Row, compare
from castwise.analysis.speedup import process_stds
from castwise.analysis.statistics import TOLERANCE, noise_of, required_blocks
from castwise.records.schema import Trial
from castwise.registry.techniques import GRAPHS
from castwise.render.provenance import measured_on

_VERDICTS = ("same", "inconclusive", "faster", "slower")
# Mean power of a stretch of steps over the board's limit: the lower ends of the rows of `stretches`.
_POWERS = (0.0, 0.8, 0.9, 0.98)


def same_or_slower(paths: Iterable[Path]) -> str:
    """Return what aa.py found, a row a cell and slowdown, all its runs together.

    Args:
        paths: What its `--out` wrote.
    """
    documents = [_read(path) for path in sorted(paths)]
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for account in (account for document in documents for account in document["cells"]):
        for each in account["comparisons"]:
            found.setdefault((account["cell"], each["slowdown"]), []).append(each)
    if not found:
        return NOT_MEASURED
    lines = [
        _places(documents),
        "",
        f"| cell | slowed down by | comparisons | {' | '.join(_VERDICTS)} | right | rounds | half-width |",
        "|---|---:|---:|" + "---:|" * (len(_VERDICTS) + 3),
    ]
    return (
        "\n".join([*lines, *(_line(cell, slowdown, found[cell, slowdown]) for cell, slowdown in sorted(found))]) + "\n"
    )


def _line(cell: str, slowdown: float, comparisons: Sequence[dict[str, Any]]) -> str:
    counts = [sum(each["verdict"] == kind for each in comparisons) for kind in _VERDICTS]
    # Of a cell and itself nothing is to be found: not to be wrong is all.
    right = counts[0] + counts[1] if slowdown == 0 else counts[3]
    width = statistics.fmean((each["high"] - each["low"]) / 2 / each["speedup"] for each in comparisons)
    cells = (
        cell,
        f"{slowdown:.0%}" if slowdown else "–",
        str(len(comparisons)),
        *map(str, counts),
        f"{right / len(comparisons):.0%}",
        f"{statistics.fmean(each['rounds'] for each in comparisons):.1f}",
        f"{width:.2%}",
    )
    return "| " + " | ".join(cells) + " |"


def neighbours(path: Path) -> str:
    """Return what residents.py found: how processes that wait lengthen the step of the one that is timed."""
    document = _read(path)
    lines = [
        _places([document]),
        "",
        "| cell | timed | longer by | 95 % interval | blocks differ by |",
        "|---|---|---:|---:|---:|",
    ]
    for cell in document["cells"]:
        lines.append(f"| {cell['cell']} | alone | – | – | {statistics.fmean(cell['spreads']['alone']):.2%} |")
        for way, logs in cell["logs"].items():
            longer, low, high = lengthening(logs)
            spread = statistics.fmean(cell["spreads"][way])
            lines.append(f"| {cell['cell']} | {way} | {longer:+.2%} | {low:+.2%} … {high:+.2%} | {spread:.2%} |")
    return "\n".join(lines) + "\n"


def lengthening(logs: Sequence[float]) -> tuple[float, float, float]:
    """Return by what share steps got longer, with its 95 % interval: Student's, on the logarithms of their ratios."""
    interval = ttest_1samp(logs, 0.0).confidence_interval(0.95)
    longer, low, high = map(math.expm1, (statistics.fmean(logs), interval.low, interval.high))
    return longer, low, high


def invocations(folders: Sequence[Path]) -> str:
    """Return what two invocations of one command found, cell by cell.

    Args:
        folders: The results folders of both.
    """
    first, second = ({_name(row): row for row in compare(load(folder))} for folder in folders)
    trials = [trial for rows in (first, second) for row in rows.values() for trial in row.trials]
    lines = [
        f"On {measured_on(trials)}",
        "",
        "| cell | step time | again | apart | speed-up | again | apart |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in first:
        before, after = first[name], second[name]
        assert before.step_seconds is not None
        assert after.step_seconds is not None
        cells = [f"{1e3 * before.step_seconds:.2f} ms", f"{1e3 * after.step_seconds:.2f} ms"]
        cells.append(f"{after.step_seconds / before.step_seconds - 1:+.2%}")
        ratios = [row.speedup_estimate for row in (before, after)]
        known = [each for each in ratios if each is not None and each.half_width > 0]
        cells += [f"{each.value:.3f} [{each.low:.3f}, {each.high:.3f}]" for each in known] or ["–", "–"]
        cells.append(f"{known[1].value / known[0].value - 1:+.2%}" if len(known) == len(ratios) else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def by_hand(path: Path) -> str:
    """Return what hand_runs.py found: one run a precision, its step and what it took from start to end."""
    document = _read(path)
    runs = document["runs"]
    lines = [_places([document]), "", "| precision | step time | speed-up | the run took |", "|---|---:|---:|---:|"]
    for run in runs:
        cells = (
            run["precision"],
            f"{1e3 * run['step_seconds']:.2f} ms",
            f"{runs[0]['step_seconds'] / run['step_seconds']:.2f}×" if run is not runs[0] else "–",
            f"{run['seconds']:.1f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, f"| all | – | – | {sum(run['seconds'] for run in runs):.1f} s |"]) + "\n"


def processes(folders: Sequence[Path]) -> str:
    """Return what blocks say of how well a process's step time is known, beside what the cell's processes differ by.

    Args:
        folders: The results folders of invocations of one command.
    """
    trials = [trial for folder in folders for trial in load(folder)]
    lines = [
        f"On {measured_on(trials)}",
        "",
        "| cell | processes | blocks each | blocks spread by | standard error by blocks | processes differ by "
        "| times as much |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    cells: dict[str, list[Trial]] = {}
    for trial in trials:
        cells.setdefault(trial.spec.cell, []).append(trial)
    for own in cells.values():
        spread = statistics.median(found for trial in own if (found := steady_metrics.spread(trial)) is not None)
        error, apart = statistics.median(standard_error(trial) for trial in own), process_stds(own)
        blocks = [len(steady_metrics.step_times(trial)) for trial in own]
        shown = (
            _name_of(own[0]),
            str(len(own)),
            f"{min(blocks)} to {max(blocks)}" if min(blocks) < max(blocks) else str(blocks[0]),
            f"{spread:.2%}",
            f"{error:.2%}",
            f"{apart:.2%}",
            f"{apart / error:.1f}",
        )
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def stretches(trials: Iterable[Trial]) -> str:
    """Return how much longer steps took where they ran on and on than in timed blocks, by the power that they drew.

    Args:
        trials: Trials; those count that one GPU paced: its steps are CUDA graphs.
    """
    found: dict[float, list[tuple[Trial, float]]] = {low: [] for low in _POWERS}
    for trial in trials:
        drawn, seconds = _drawn(trial), steady_metrics.step_seconds(trial)
        if drawn is not None and seconds and trial.metered is not None and trial.metered.step_seconds:
            low = max(each for each in _POWERS if each <= drawn)
            found[low].append((trial, trial.metered.step_seconds / seconds - 1))
    highs = [*(f"{high:.0%}" for high in _POWERS[1:]), ""]
    lines = ["| power, of the board's limit | processes | median | middle half | most |", "|---|---:|---:|---:|---:|"]
    for (low, own), high in zip(found.items(), highs, strict=True):
        named = f"{low:.0%} and more" if not high else f"{low:.0%} to {high}" if low else f"under {high}"
        if len(own) > 1:
            longer = [excess for _, excess in own]
            quarters = statistics.quantiles(longer, n=4, method="inclusive")
            cells = [f"{quarters[1]:+.2%}", f"{quarters[0]:+.2%} … {quarters[2]:+.2%}", f"{max(longer):+.2%}"]
            lines.append(f"| {named} | {len(own)} | {' | '.join(cells)} |")
    counted = [trial for own in found.values() for trial, _ in own]
    return "\n".join([f"On {measured_on(counted)}", "", *lines]) + "\n"


def _drawn(trial: Trial) -> float | None:
    """Return the share of its board's power limit that a trial's stretch drew; None where the host paced it."""
    limit = None if trial.gpu_facts is None else trial.gpu_facts.power_limit_watts
    watts = power_watts(trial)
    is_of_gpu = trial.spec.world_size == 1 and bool(set(GRAPHS) & set(trial.spec.techniques))
    if trial.status != "ok" or not limit or watts is None or not is_of_gpu:
        return None
    return watts / limit


def standard_error(trial: Trial) -> float:
    """Return how well a process's step time is known by its blocks alone, as a share of it."""
    times = steady_metrics.step_times(trial)
    # As many blocks as are wanted give the tolerance, and a quarter as many twice that.
    return TOLERANCE * math.sqrt(required_blocks(noise_of(times)) / len(times))


def _name(row: Row) -> str:
    return _name_of(row.trial)


def _name_of(trial: Trial) -> str:
    return f"{trial.spec.workload}, {trial.spec.precision}, batch {trial.spec.batch_size}"


def _read(path: Path) -> dict[str, Any]:
    """Return a record, with the date that its name begins with."""
    document: dict[str, Any] = json.loads(path.read_text())
    return document | {"date": path.stem[:10]}


def _places(documents: Iterable[dict[str, Any]]) -> str:
    return "; ".join(dict.fromkeys(place_of(document["environment"], document["date"]) for document in documents))
