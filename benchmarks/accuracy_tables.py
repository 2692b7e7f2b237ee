"""The tables of training runs in docs/evidence/accuracy.md, of their last scores in records/accuracy_scores/.

A verdict is castwise's on the seeds that both precisions have, in order, as if `castwise accuracy` had planned all that
are on record.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from stored import RECORDS, load, markdown, where_of

from castwise.accuracy.options import SEEDS
from castwise.accuracy.render import flat_row
from castwise.accuracy.result import Metric, runs_of
from castwise.analysis.equivalence import AccuracyVerdict, verdict_after
from castwise.records.schema import Trial
from castwise.registry.precisions import precision_sort_key
from castwise.registry.suites import find_suite

APEX = ("tf32", "fp16-mixed", "fp16-master", "fp16-true")  # its levels O0 to O3
Scores = dict[int, float | None]  # by seed; None of a run that diverged


def _record(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / "accuracy_scores" / f"{name}.json").read_text())  # type: ignore[no-any-return]


def _scores(record: Mapping[str, Any], precision: str) -> Scores:
    return {run["seed"]: run["score"] for run in record["runs"] if run["precision"] == precision}


def _verdict(record: Mapping[str, Any], theirs: Scores, own: Scores) -> AccuracyVerdict:
    seeds = sorted(set(theirs) & set(own))
    return verdict_after(
        [theirs[seed] for seed in seeds],
        [own[seed] for seed in seeds],
        record["margin"],
        larger_is_better=record["larger_is_better"],
        num_seeds=max(SEEDS, *(run["seed"] + 1 for run in record["runs"])),
    )


def _judged(verdict: AccuracyVerdict) -> tuple[str, str]:
    """Return a verdict, with the runs that diverged, and its pairs with how many would do."""
    lost = f"diverged {verdict.num_diverged} of {verdict.num_runs}" if verdict.num_diverged else ""
    kind = "" if verdict.kind == "diverged" else verdict.kind
    needed = f" of {verdict.pairs_needed:,}" if verdict.pairs_needed else ""
    return ", ".join(filter(None, (kind, lost))), f"{verdict.num_pairs}{needed}"


def _mean_text(known: Sequence[float]) -> str:
    return f"{statistics.fmean(known):.2f} ± {statistics.stdev(known):.2f}" if known else "–"


def real(name: str) -> str:
    """Return the scores and verdicts of each precision on a data set."""
    record = _record(name)
    baseline, cells = _scores(record, "fp32"), []
    metric = Metric(record["metric"], larger_is_better=record["larger_is_better"])
    paces = {
        precision: statistics.median(
            run["seconds_per_step"] or 0.0 for run in record["runs"] if run["precision"] == precision
        )
        for precision in {run["precision"] for run in record["runs"]}
    }
    places = {(run["gpu"], run["commit"]) for run in record["runs"]}
    has_pace, unit = len(places) == 1 and all(paces.values()), 100 if metric.name == "accuracy" else 1
    for precision in sorted(paces, key=precision_sort_key):
        own = _scores(record, precision)
        verdict, found = _verdict(record, baseline, own), "–"
        if precision != "fp32" and (gap := verdict.difference) is not None:
            ends = (100 * metric.shown_difference(value) for value in (gap.value, gap.low, gap.high))
            found = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*ends)
        mean = _mean_text([unit * metric.shown(score) for score in own.values() if score is not None])
        judged = ("baseline", "–") if precision == "fp32" else _judged(verdict)
        pace = [f"{paces['fp32'] / paces[precision]:.2f}×"] if has_pace else []
        cells.append([f"`{precision}`", len(own), mean, found, *judged, *pace])
    heading = "precision | runs | accuracy, % | difference, points | verdict | pairs"
    if metric.name != "accuracy":
        heading = heading.replace("accuracy, %", metric.name).replace("points", "%")
    return "\n".join(markdown(heading + " | step" * has_pace, "lrrrlr" + "r" * has_pace, cells)) + "\n"


def of_states(name: str) -> str:
    """Return what `castwise accuracy` found of the networks of a file of this folder, adam_mnist or adam_gpu."""
    networks: dict[str, list[Trial]] = {}
    for trial in load(RECORDS / "accuracy_state" / name):
        networks.setdefault(trial.spec.workload.rpartition(":")[2], []).append(trial)
    parts = list[str]()
    for network, trials in networks.items():
        place = "; ".join(dict.fromkeys(map(where_of, trials)))
        cells, (score, factor) = [], ("perplexity", 1) if network in ("lstm", "transformer") else ("accuracy, %", 100)
        found = [*map(flat_row, runs_of(trials, None, None))]
        if found[0]["seeds"] == 1:
            continue  # not measured to its end
        for row in found:
            spread = row["score_spread"]
            mean = f"{factor * row['score']:.2f}" + (f" ± {factor * spread:.2f}" if spread is not None else "")
            cells.append([row["name"], row["seeds"], mean, row["difference_text"] or "–", row["verdict"]])
        choice = "choice" if network == "build" else f"{network}, choice"
        heading = f"{choice} | runs | {score} | difference, % | verdict"
        parts.append("\n".join([place, "", *markdown(heading, "lrrrl", cells)]) + "\n")
    return "\n".join(parts)


def sources(name: str) -> str:
    """Return the single figures that were published for Apex's opt levels, beside runs with several seeds."""
    record = _record(name)
    levels = {precision: f"O{level} (`{precision}`)" for level, precision in enumerate(APEX)}
    levels = {run["precision"]: f"`{run['precision']}`" for run in record["runs"]} | levels
    published = [each for each in find_suite("wrn-cifar10").published if each.accuracy is not None]
    baseline, cells = _scores(record, APEX[0]), []
    for precision in sorted(levels, key=lambda each: (each not in APEX, levels[each])):
        own = _scores(record, precision)
        theirs = ", ".join(
            f"{100 * (each.accuracy or 0):.2f} ({each.gpu.removeprefix('Tesla ')})"
            for each in published
            if each.precision == precision.replace("tf32", "fp32")
        )
        known = [100 * score for score in own.values() if score is not None]
        ends = f"{min(known):.2f} to {max(known):.2f}" if known else "–"
        judged = ("baseline", "–") if precision == APEX[0] else _judged(_verdict(record, baseline, own))
        otherwise = "diverged (T4)" if precision in APEX else "–"
        cells.append([levels[precision], theirs or otherwise, len(own), _mean_text(known), ends, *judged])
    heading = "level | published, one run each, % | runs | here, % | from, to | verdict | pairs"
    return "\n".join(markdown(heading, "llrrrlr", cells)) + "\n"
