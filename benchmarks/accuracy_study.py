"""Train many seeds in every precision, on several GPUs: what README and docs say about accuracy.

    python benchmarks/accuracy_study.py DIR [--gpus N] [--lanes N] [--seconds S] [--more] [--out FOLDER] JOB ...

A JOB is a key of `JOBS`. Each GPU trains all seeds in one precision before the next, so that it compiles few loops, and
takes what no other has begun, of this command or another. Trials are kept under DIR, and the same command goes on from
them. --lanes trains several at once on each GPU, for scores alone: their times say nothing. --more leaves out the runs
that are on record, of any GPU, and precisions whose verdict is decided. --out writes a record for each job, which
belongs under benchmarks/records/accuracy/.
"""

import argparse
import fcntl
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stored import RECORDS, load, markdown, visible_gpus

from castwise.accuracy.options import SEEDS, AccuracyOptions
from castwise.accuracy.result import Metric, curve_of, metric_of, seconds_per_step
from castwise.accuracy.search import prepare_accuracy
from castwise.analysis.equivalence import FIRST_LOOK, AccuracyVerdict, judge, verdict_after
from castwise.orchestrator.runner import CachedMeasure
from castwise.records.schema import Trial
from castwise.registry.precisions import precision_sort_key
from castwise.registry.suites import find_suite

_MODELS = str(Path(__file__).parent / "accuracy_models.py")
_EVERY = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-master", "bf16-master", "fp16-true", "bf16-true")
APEX = ("tf32", "fp16-mixed", "fp16-master", "fp16-true")  # its levels O0 to O3
PAIRS = 8  # of one verdict on a planted fault
CLAIMS = "claims"  # a file for each run: locked by the lane that trains it, and not empty once that has ended
_PLANTED_MARGIN = 0.003
_STEPS_OF_WRN = 10 * 391  # of a run
_WORSE, _NO_CLAIM = ("worse", "diverged"), ("as good", "not enough runs")
# The precision of each case, what it is, and which verdicts are right.
PLANTED = {
    "sound": ("bf16-mixed", "no fault, `bf16-mixed`", _NO_CLAIM),
    "small_gradients": ("fp16-mixed", "`fp16-mixed` with a loss scale of 1", _WORSE),
    "small_updates": ("bf16-true", "`bf16-true` with a small learning rate", _WORSE),
    "rounding_bug": ("bf16-mixed", "`bf16-mixed`, a layer rounds without a gradient", _WORSE),
}


@dataclass(frozen=True)
class Job:
    """What is trained, and with how many seeds."""

    workload: str
    precisions: tuple[str, ...]
    seeds: int
    techniques: str | None = None
    epochs: int | None = None
    loss_scale: str | None = None
    suite: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `castwise accuracy`."""
        chosen = {"epochs": self.epochs, "loss_scale": self.loss_scale, "suite": self.suite, "seeds": self.seeds}
        return chosen | {
            "workload": self.workload,
            "precisions": self.precisions,
            "techniques": self.techniques and (self.techniques,),
        }


def _planted(name: str, precision: str, loss_scale: str | None = None) -> Job:
    return Job(f"{_MODELS}:{name}", ("fp32", precision), 5 * PAIRS, epochs=2, loss_scale=loss_scale)


JOBS = {
    "fast-mnist": Job("mnist-cnn", _EVERY, 30, "tuned", suite="fast-mnist"),
    "mnist": Job("mnist-cnn", _EVERY, 30, "resident-data+cuda-graph"),
    "fast-cifar10": Job("resnet9", _EVERY, 20, "tuned"),
    # Without fp32, in which a run takes 9 minutes.
    "wrn-cifar10": Job("wrn-28-10", _EVERY[1:], 30, "tuned", loss_scale="dynamic-apex"),
    "fast-wikitext2": Job("lstm-lm", _EVERY, 90, "tuned", suite="fast-wikitext2"),
    "sound": _planted("sound", "bf16-mixed"),
    "small_gradients": _planted("small_gradients", "fp16-mixed", "1"),
    "small_updates": _planted("small_updates", "bf16-true"),
    "rounding_bug": _planted("rounding_bug", "bf16-mixed"),
}


def main() -> int:
    """Train, and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("jobs", nargs="+", metavar="JOB", choices=JOBS)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=1, help="runs at once on each GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    count = arguments.gpus * arguments.lanes
    if arguments.lane is not None:
        _train(arguments)
        return 0
    lanes = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--lane", str(lane)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": visible_gpus(arguments.gpus)[lane % arguments.gpus]},
        )
        for lane in range(count)
    ]
    codes = [lane.wait() for lane in lanes]
    for name in arguments.jobs if arguments.out else ():
        if trials := load(arguments.folder / name):
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{name}.json").write_text(json.dumps(record_of(trials, arguments.lanes)) + "\n")
    return max(codes)


def _train(arguments: argparse.Namespace) -> None:
    """Train what no other lane has begun, until the time is up."""
    end = time.monotonic() + arguments.seconds
    for name in arguments.jobs:
        job, claims = JOBS[name], arguments.folder / name / CLAIMS
        wanted, known = dict.fromkeys(job.precisions, job.seeds), set()
        if arguments.more:
            record = record_named(name)
            wanted = seeds_wanted(record, job)
            known = {(run["precision"], run["seed"]) for run in record["runs"]}
        search = prepare_accuracy(AccuracyOptions(results=arguments.folder / name, **job.options))
        measure = CachedMeasure(search.job.runner)
        claims.mkdir(parents=True, exist_ok=True)
        missing = {
            precision: [seed for seed in range(count) if (precision, seed) not in known]
            for precision, count in wanted.items()
        }
        # What is soon decided comes first; each lane begins with another precision.
        specs = [spec for spec in search.specs if missing[spec.precision]]
        specs.sort(key=lambda spec: len(missing[spec.precision]))
        start = arguments.lane % max(1, len(specs))
        begun = Counter(path.name.rpartition("-")[0] for path in claims.iterdir())
        for spec in sorted((*specs[start:], *specs[:start]), key=lambda spec: begun[spec.precision]):
            for seed in missing[spec.precision]:
                if time.monotonic() > end:
                    return
                path = claims / f"{spec.precision}-{seed}"
                with path.open("a") as claim:
                    try:
                        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError:
                        continue
                    if path.stat().st_size:
                        continue
                    trial = measure(spec.model_copy(update={"seed": seed}))
                    claim.write(f"{trial.status}\n")
                print(
                    f"{name} {spec.precision} seed {seed}: {trial.status}, {trial.duration_seconds:.0f} s", flush=True
                )


def seeds_wanted(record: Mapping[str, Any], job: Job) -> dict[str, int]:
    """Return by precision how many seeds its verdict takes, none if it is decided; the baseline has those of all."""
    baseline, *others = job.precisions
    wanted = {}
    for precision in others:
        verdict = verdict_of(record, scores_of(record, baseline), scores_of(record, precision), record["margin"])
        needed = 0 if verdict.is_decided else verdict.pairs_needed or job.seeds
        wanted[precision] = min(needed, job.seeds)
    return {baseline: max(wanted.values())} | wanted


def record_of(trials: Sequence[Trial], lanes: int) -> dict[str, Any]:
    """Return what a table needs of a job's trials: each run's score after every epoch, and its time for a step."""
    first = min(trials, key=lambda trial: trial.started_at)
    metric = metric_of([trial for trial in trials if trial.spec.precision == "fp32"] or trials)
    runs = [
        {
            "precision": trial.spec.precision,
            "seed": trial.spec.seed,
            "status": trial.status,
            "gpu": trial.environment.gpu_uuid,
            "curve": [round(score, 6) for _, score in curve_of(trial, metric) if math.isfinite(score)],
            "seconds_per_step": seconds_per_step(trial) if lanes == 1 else None,
        }
        for trial in sorted(trials, key=lambda trial: (trial.spec.precision, trial.spec.seed))
    ]
    environment = first.environment.model_dump(mode="json", include={"gpu", "cpu", "torch", "driver", "commit"})
    return {
        "workload": Path(first.spec.workload).name,
        "metric": metric.name,
        "margin": metric.margin(metric.usual_margin),
        "larger_is_better": metric.larger_is_better,
        "techniques": first.spec.techniques,
        "environment": environment,
        "date": first.started_at[:10],
        "lanes": lanes,
        "runs": runs,
    }


Scores = dict[int, float | None]


def scores_of(record: Mapping[str, Any], precision: str) -> Scores:
    """Return the score after the last epoch by seed; None of a run that diverged."""
    runs = (run for run in record["runs"] if run["precision"] == precision)
    return {run["seed"]: run["curve"][-1] if run["status"] == "ok" else None for run in runs}


def verdict_of(record: Mapping[str, Any], theirs: Scores, own: Scores, margin: float) -> AccuracyVerdict:
    """Return castwise's verdict on the seeds that both have: it takes its usual number for planned, or all of these."""
    seeds = sorted(set(theirs) & set(own))
    return verdict_after(
        [theirs[seed] for seed in seeds],
        [own[seed] for seed in seeds],
        margin,
        larger_is_better=record["larger_is_better"],
        num_seeds=max(SEEDS, len(seeds)),
    )


def record_named(name: str) -> dict[str, Any]:
    """Return the last record of a name, such as `h200-mnist`, or of all GPUs `mnist`, with the runs of all dates."""
    named = re.compile(rf"\d+-\d+-\d+-(\w-)?(h\d+-)?{re.escape(name)}")
    paths = sorted(path for path in (RECORDS / "accuracy").glob("*.json") if named.fullmatch(path.stem))
    records = [json.loads(path.read_text()) for path in paths]
    lanes = records[0]["lanes"] if len(records) == 1 else None  # times on several GPUs are not compared
    return {**records[-1], "lanes": lanes, "runs": [run for record in records for run in record["runs"]]}


def real_table(name: str) -> str:
    """Return the scores and verdicts of each precision on a data set."""
    record = record_named(name)
    baseline, paces, cells = scores_of(record, "fp32"), paces_of(record), []
    metric = Metric(record["metric"], larger_is_better=record["larger_is_better"])
    of_accuracy, has_pace = metric.name == "accuracy", record["lanes"] == 1
    for precision in sorted(paces, key=precision_sort_key):
        own = scores_of(record, precision)
        verdict = verdict_of(record, baseline, own, record["margin"])
        gap, is_baseline = verdict.difference, precision == "fp32"
        difference = (
            "–"
            if is_baseline or gap is None
            else "{:+.2f} [{:+.2f}, {:+.2f}]".format(
                *(100 * metric.shown_difference(value) for value in (gap.value, gap.low, gap.high))
            )
        )
        known = [(100 if of_accuracy else 1) * metric.shown(score) for score in own.values() if score is not None]
        row = [f"`{precision}`", f"{len(own)}", spread_text(known), difference]
        row += ["baseline", "–"] if is_baseline else [verdict.kind, _pairs(verdict)]
        if has_pace:
            slow, pace = paces["fp32"], paces[precision]
            row.append(f"{slow / pace:.2f}×" if slow and pace else "–")
        cells.append(row)
    heading = f"precision | runs | {'accuracy, %' if of_accuracy else metric.name} | difference, "
    heading += f"{'points' if of_accuracy else '%'} | verdict | pairs"
    heading += " | step" if has_pace else ""
    return "\n".join(markdown(heading, "lrrrlr" + "r" * has_pace, cells)) + "\n"


def _pairs(verdict: AccuracyVerdict) -> str:
    """Return the pairs of runs, and how many a verdict needs if the mean and the spread of more were the same."""
    return f"{verdict.num_pairs}" + (f" of {verdict.pairs_needed:,}" if verdict.pairs_needed else "")


def paces_of(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the median seconds of a step by precision; None if all its runs diverged, or none had its GPU alone."""
    paces: dict[str, list[float]] = {}
    for run in record["runs"]:
        own = paces.setdefault(run["precision"], [])
        if run["status"] == "ok" and run["seconds_per_step"] is not None:
            own.append(run["seconds_per_step"])
    return {precision: statistics.median(known) if known else None for precision, known in paces.items()}


def spread_text(known: Sequence[float]) -> str:
    """Return mean ± standard deviation of scores."""
    if not known:
        return "diverged"
    return f"{statistics.fmean(known):.2f}" + (f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else "")


def sources_table(name: str) -> str:
    """Return the single figures that were published for Apex's opt levels, beside runs with several seeds."""
    record = record_named(name)
    levels = {precision: f"O{level} (`{precision}`)" for level, precision in enumerate(APEX)}
    levels |= {run["precision"]: f"`{run['precision']}`" for run in record["runs"] if run["precision"] not in levels}
    published = [each for each in find_suite("wrn-cifar10").published if each.accuracy is not None]
    baseline, cells = scores_of(record, APEX[0]), []
    for precision, title in levels.items():
        own = scores_of(record, precision)
        theirs = ", ".join(
            f"{100 * (each.accuracy or 0):.2f} ({each.gpu.removeprefix('Tesla ')})"
            for each in published
            if each.precision == precision.replace("tf32", "fp32")
        )
        known = [100 * score for score in own.values() if score is not None]
        verdict = verdict_of(record, baseline, own, record["margin"])
        cells.append(
            [
                title,
                theirs or ("diverged (T4)" if precision in APEX else "–"),
                spread_text(known),
                f"{min(known):.2f} to {max(known):.2f}" if known else "–",
                *(("baseline", "–") if precision == APEX[0] else (verdict.kind, _pairs(verdict))),
            ]
        )
    heading = "level | published, one run each, % | here, % | from, to | verdict | pairs"
    return "\n".join([*markdown(heading, "llrrlr", cells), "", _spread_of_pairs(record, baseline)]) + "\n"


def _spread_of_pairs(record: Mapping[str, Any], baseline: Scores) -> str:
    """Return in a sentence how pairs of runs spread, and how many would prove that there is no difference."""
    margin, paces, squares, degrees, seconds = record["margin"], paces_of(record), 0.0, 0, list[float]()
    for precision, pace in paces.items():
        own = scores_of(record, precision)
        pairs = [(one, other) for seed, one in own.items() if (other := baseline.get(seed)) is not None]
        differences = [one - other for one, other in pairs if one is not None]
        if precision != APEX[0] and pace is not None and len(differences) >= FIRST_LOOK:
            squares += (len(differences) - 1) * statistics.variance(differences)
            degrees += len(differences) - 1
            seconds.append(_STEPS_OF_WRN * (pace + (paces[APEX[0]] or 0.0)))
    spread = math.sqrt(squares / degrees)  # of all precisions alike, weighted by degrees of freedom
    alike = [spread, -spread, spread, -spread, 0.0]  # their standard deviation is the spread
    verdict = judge([0.0] * 5, alike, margin, larger_is_better=True)
    assert verdict.pairs_needed is not None
    return (
        f"The difference of a pair has a standard deviation of {100 * spread:.1f} points. If its mean is 0, *as good* "
        f"within {100 * margin:.1f} points takes {verdict.pairs_needed} pairs, for each precision "
        f"{verdict.pairs_needed * statistics.median(seconds) / 3600:.0f} hours of one GPU."
    )


def planted_table(name: str) -> str:
    """Return how often the verdict on eight pairs of runs was right, for each planted fault and without one."""
    cells = []
    for case, (precision, title, right) in PLANTED.items():
        record = record_named(f"{name}-{case}")
        theirs, own = scores_of(record, "fp32"), scores_of(record, precision)
        cells.append([title, *_counted(record, theirs, own, right)])
        for each, scores in (("fp32", theirs), (precision, own)) if case == "sound" else ():
            shifted = {seed: scores[(seed + PAIRS) % len(scores)] for seed in scores}
            cells.append([f"`{each}` beside itself with other seeds", *_counted(record, scores, shifted, right)])
    return "\n".join(markdown("case | verdicts | right | wrong", "lrrr", cells)) + "\n"


def _counted(record: Mapping[str, Any], theirs: Scores, own: Scores, right: Sequence[str]) -> list[str]:
    """Return the number of verdicts on eight pairs each, and how many are right, and wrong."""
    seeds = sorted(set(theirs) & set(own))
    margin = _PLANTED_MARGIN * statistics.fmean(score for score in theirs.values() if score is not None)
    found = Counter(
        verdict_of(record, theirs, {seed: own[seed] for seed in seeds[start : start + PAIRS]}, margin).kind
        for start in range(0, len(seeds) - PAIRS + 1, PAIRS)
    )
    count, num_right = sum(found.values()), sum(found[kind] for kind in right)
    parts = ", ".join(f"{number} {kind}" for kind, number in sorted(found.items()))
    return [parts, f"{num_right}", f"{count - num_right}"]


if __name__ == "__main__":
    sys.exit(main())
