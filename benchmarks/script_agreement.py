"""Scripts under castwise beside the same scripts with the precision written by hand: their losses and their pace.

    python benchmarks/script_agreement.py [--device cuda] [--turns N] [--out FILE] [SCRIPT ...]
    python benchmarks/script_agreement.py --contract [--device cuda] [--out FILE]

The scripts are those of tests/training_scripts/, so large that a GPU is busy; on a CPU they are small. In each turn
every script runs alone, then under castwise; after the last turn it runs alone once more. Each run is a process of its
own. Alone, a step's time is taken from two lines of the script's log that wait for the device, and no code of castwise
runs. The variable CUDA_VISIBLE_DEVICES chooses the GPU; `ddp`, `fsdp` and `fsdp2` need two. What fails is null.
With --turns 0 only losses are compared. With --contract those of the cases of tests/trial/test_script_contract.py are.
"""

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stored import RECORDS, markdown, place_of, visible_gpus, write

from castwise.analysis.statistics import estimate
from castwise.orchestrator.machine import detect_machine
from castwise.spec.quantities import format_share

SCRIPTS = Path(__file__).resolve().parent.parent / "tests" / "training_scripts"
LAUNCHERS = dict.fromkeys(("ddp", "fsdp", "fsdp2"), ("torchrun", "--standalone", "--nproc-per-node", "2"))
# Lines of the log that an optimizer step writes.
LINES = {"accumulation": 3, "accelerate_loop": 2, "transformers_trainer": 2}
# --size and --depth: few wide layers, so that a GPU has work for at least 10 ms a step, and the CPU for less.
SIZES = {
    "accelerate_loop": (384, 5),
    "accumulation": (768, 4),
    "ddp": (448, 5),
    "fsdp": (448, 5),
    "fsdp2": (448, 5),
    "gan": (1024, 3),
    "imagenet": (112, 8),
    "lightning_module": (640, 5),
    "mnist": (512, 5),
    "nano_gpt": (208, 2),
    "own_amp": (64, 12),
    "timm_train": (384, 1),
    "transformers_trainer": (480, 1),
    "word_language_model": (320, 0),
}
WAYS = {"as-written": "none", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}


@dataclass(frozen=True)
class Lengths:
    """Optimizer steps of a run, the same everywhere, since scripts draw as much data."""

    all: int
    timed: int  # a multiple of the epochs' lengths
    warm_up: int  # under castwise: more than those whose losses the log has, which wait for the device


_FULL, _SHORT = Lengths(112, 72, 36), Lengths(60, 6, 12)  # the short one is for losses alone
_NUM_COMPARED = 8  # optimizer steps whose losses are compared
_LIMIT_SECONDS = 120  # of a process, or of one under castwise


class Failed(Exception):  # noqa: N818  it is said, and the next one goes on
    """A script that did not run."""


@dataclass(frozen=True)
class Run:
    """What a script's log says."""

    losses: list[list[float]]  # of the first lines
    times: tuple[float, float] | None  # between which steps were timed; None if it was stopped before
    seconds: float = math.nan  # of an optimizer step
    megahertz: float | None = None  # the GPU's clock, which heat and power lower


def main() -> None:
    """Measure, print a line for each script and precision, and write the record after each script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--contract", action="store_true")
    arguments = parser.parse_args()
    if arguments.contract:
        write(arguments.out, run_contract(arguments.device, arguments.scripts))
        return
    rows: list[dict[str, Any]] = []
    environment: dict[str, Any] = {}
    for name in arguments.scripts or SIZES:
        size, depth = SIZES[name] if arguments.device == "cuda" else (1, 0)
        lengths = _FULL if arguments.turns else _SHORT
        more = ["--device", arguments.device, "--size", f"{size}", "--depth", f"{depth}"]
        alone: dict[str, list[Run | None]] = {precision: [] for precision in WAYS}
        hooked: dict[str, list[Run | None]] = {precision: [] for precision in WAYS}
        for turn in range(arguments.turns + 1):
            for precision, amp in WAYS.items():
                alone[precision].append(run_alone(name, [*more, "--amp", amp], lengths))
            if turn < max(1, arguments.turns):
                found, where = run_under_castwise(name, more, lengths)
                environment = environment or where
                for precision in WAYS:
                    hooked[precision].append(found.get(precision))
        for precision in WAYS:
            rows.append(
                {
                    "script": name,
                    "precision": precision,
                    "loss_gap": loss_gap(alone[precision], hooked[precision]),
                    "loss_gap_alone": loss_gap(alone[precision][:1], alone[precision][1:]),
                    "losses": {
                        side: [run and run.losses for run in runs[precision]]
                        for side, runs in (("alone", alone), ("castwise", hooked))
                    },
                    "alone": [run and run.seconds for run in alone[precision] if arguments.turns],
                    "castwise": [run and run.seconds for run in hooked[precision] if arguments.turns],
                    "megahertz": {
                        side: [run and run.megahertz for run in runs[precision]]
                        for side, runs in (("alone", alone), ("castwise", hooked))
                    },
                }
            )
            print({key: value for key, value in rows[-1].items() if key != "losses"}, flush=True)
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        write(arguments.out, {"environment": environment, "date": date, "rows": rows})


def run_contract(device: str, names: list[str]) -> dict[str, Any]:
    """Return the losses of the contract test's cases, by hand and under castwise; print those that differ."""
    sys.path[:0] = [str(SCRIPTS.parent), str(SCRIPTS.parent / "trial")]
    from test_script_contract import CASES, jobs_of, logs_of

    cases = [case for case in CASES if not names or case[0] in names]
    logs = logs_of([job for case in cases for job in jobs_of(*case, device)])
    rows = []
    for case in cases:
        hooked, by_hand = (logs[job] for job in jobs_of(*case, device))
        rows.append(dict(zip(("case", "way", "precision", "amp"), case, strict=True)))
        rows[-1].update(alone=by_hand, castwise=hooked)
        if by_hand != hooked:
            print(rows[-1], flush=True)
    print(f"{sum(row['alone'] == row['castwise'] for row in rows)} of {len(rows)} equal", flush=True)
    environment = detect_machine(device, None).environment.model_dump(mode="json")
    return {"environment": environment, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "rows": rows}


def loss_gap(alone: list[Run | None], hooked: list[Run | None]) -> float | None:
    """Return by how much the first losses differ from those by hand at the most, as a share; None if a side failed."""
    theirs, own = (next((run.losses for run in side if run is not None), None) for side in (alone, hooked))
    if theirs is None or own is None:
        return None
    pairs = [pair for lines in zip(theirs, own, strict=True) for pair in zip(*lines, strict=True)]
    return max(abs(other - each) / max(abs(each), 1e-6) for each, other in pairs)


def run_alone(name: str, more: list[str], lengths: Lengths) -> Run | None:
    """Run a script by itself; None if it failed."""
    launcher = LAUNCHERS.get(name, ("python",))
    command = ["-m", "torch.distributed.run", *launcher[1:], "--"] if launcher[0] == "torchrun" else []
    with tempfile.NamedTemporaryFile() as log:
        ends = [str(line) for line in _timed_lines(name, lengths)]
        command += [
            str(SCRIPTS / f"{name}.py"),
            "--log",
            log.name,
            "--times",
            *ends,
            "--steps",
            str(lengths.all),
            *more,
        ]
        try:
            with clock(more[1]) as readings:
                _, err = run([sys.executable, *command])
            found = runs_in(Path(log.name), name, err, lengths)[0]
            if found.times is None:
                raise Failed(_last_line(err))
            begin, end = found.times
            timed = [megahertz for moment, megahertz in readings if begin <= moment <= end]
            return replace(
                found, seconds=(end - begin) / lengths.timed, megahertz=statistics.fmean(timed) if timed else None
            )
        except Failed as failed:
            print(f"{name} {' '.join(more)}: alone: {failed}", flush=True)
            return None


def run_under_castwise(name: str, more: list[str], lengths: Lengths) -> tuple[dict[str, Run], dict[str, Any]]:
    """Run a script as castwise measures it; return what became of each precision, and where it ran.

    The losses are from the script's log, the time of a step is castwise's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "castwise", "run", "--precision", ",".join(WAYS), "--rounds", "1"]
        command += ["--steps", str(lengths.timed), "--warm-up", str(lengths.warm_up), "--timeout", f"{_LIMIT_SECONDS}s"]
        command += ["--format", "json", "--results", f"{folder}/results", "--device", more[1], "--"]
        command += [*LAUNCHERS.get(name, ("python",)), str(SCRIPTS / f"{name}.py"), "--log", f"{folder}/log", "--times"]
        try:
            _, err = run([*command, "--steps", str(lengths.all), *more])
            trials = [json.loads(path.read_text()) for path in Path(folder, "results").rglob("*.json")]
            if not trials:
                raise Failed(_last_line(err))
            trials.sort(key=lambda trial: trial["started_at"])
            # The first process of all finds out what the script trains.
            logged = runs_in(Path(folder, "log"), name, err, lengths)[-len(trials) :]
        except Failed as failed:
            print(f"{name}: under castwise: {failed}", flush=True)
            return {}, {}
    found = {}
    for trial, own in zip(trials, logged, strict=False):
        blocks = [block for rank in trial["ranks"][:1] for block in rank["blocks"]]
        precision = trial["spec"]["precision"]
        if trial["status"] == "ok" and len(logged) == len(trials):
            steps = sum(block["num_steps"] for block in blocks)
            hertz = [reading["sm_clock_hertz"] for reading in trial["readings"] if reading["sm_clock_hertz"]]
            megahertz = statistics.fmean(hertz) / 1e6 if hertz else None
            found[precision] = Run(own.losses, None, sum(block["seconds"] for block in blocks) / steps, megahertz)
        else:
            print(f"{name} {precision}: under castwise: {trial.get('message') or trial['status']}", flush=True)
    return found, trials[0]["environment"]


def runs_in(log: Path, name: str, err: str, lengths: Lengths) -> list[Run]:
    """Return what each process wrote into a script's log, in the order of their third steps.

    castwise has several take their first step at once, and then warms up one after another.

    Raises:
        Failed: One of them did not get as far as the losses that are compared.
    """
    lines: dict[str, list[list[str]]] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        process, *values = line.split()
        lines.setdefault(process, []).append(values)
    if not lines:
        raise Failed(_last_line(err))
    per_step, found = LINES.get(name, 1), []
    for written in sorted(lines.values(), key=lambda written: float(written[: 2 * per_step + 1][-1][0])):
        losses = [[float(value) for value in values[1:]] for values in written[: _NUM_COMPARED * per_step]]
        first, last = _timed_lines(name, lengths)
        found.append(Run(losses, (float(written[first][0]), float(written[last][0])) if len(written) > last else None))
    return found


def _timed_lines(name: str, lengths: Lengths) -> tuple[int, int]:
    """Return the lines of a log, from 0, between which a script's steps are timed."""
    per_step = LINES.get(name, 1)
    return (lengths.all - lengths.timed) * per_step - 1, lengths.all * per_step - 1


@contextmanager
def clock(device: str) -> Iterator[list[tuple[float, float]]]:
    """Yield a list to which times and the clock of the first GPU then are added, twenty a second."""
    readings: list[tuple[float, float]] = []
    if device != "cuda":
        yield readings
        return
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(int(visible_gpus(1)[0]))
    is_over = threading.Event()

    def read() -> None:
        while not is_over.wait(0.05):
            readings.append((time.perf_counter(), pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        is_over.set()
        thread.join()


def run(command: list[str]) -> tuple[str, str]:
    """Return what a command prints, on standard output and on standard error.

    Raises:
        Failed: It took too long; all that it started is ended.
    """
    limit = (len(WAYS) + 1) * _LIMIT_SECONDS
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        return process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise Failed(f"no end within {limit} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def table(name: str) -> str:
    """Return the agreement of each script and precision, of all records whose names begin so.

    Losses are those of the newest record that has them, times those of the newest that timed them.
    """
    records = [json.loads(path.read_text()) for path in sorted((RECORDS / "scripts").glob(f"{name}*.json"))]
    places = dict.fromkeys(place_of(each["environment"], each["date"]) for each in records)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for each in records for row in each["rows"]):
        known = rows.setdefault((row["script"], row["precision"]), row)
        known |= row if row["alone"] else {"loss_gap": row["loss_gap"]}
    cells, ratios, changes = [], [], []
    for row in sorted(rows.values(), key=lambda row: row["script"]):  # the precisions of one stay in their order
        alone, own = ([each for each in row[side] if each is not None] for side in ("alone", "castwise"))
        gaps = [_in_words(row["loss_gap"]), _in_words(row["loss_gap_alone"])]
        pace = ["failed"] * 4
        if alone and own:
            by_hand, hooked = statistics.median(alone), statistics.median(own)
            between = [second / first - 1 for first, second in itertools.pairwise(alone)]
            apart = max(map(abs, between), default=0.0)
            pace = [f"{1000 * by_hand:.2f} ms", f"{1000 * hooked:.2f} ms", f"{100 * (hooked / by_hand - 1):+.1f} %"]
            pace.append(f"{100 * apart:.1f} %")
            ratios.append(hooked / by_hand)
            changes += between
        cells.append([f"`{row['script']}`", f"`{row['precision']}`", *gaps, *pace])
    heading = "script | precision | losses | losses by hand, twice | by hand | castwise | difference | by hand, twice"
    lines = ["; ".join(places), "", *markdown(heading, "llllrrrr", cells)]
    if found := estimate(ratios):
        mean, low, high = (f"{100 * (ratio - 1):+.1f}" for ratio in (found.value, found.low, found.high))
        said = f"Over all {found.n} lines the mean difference is {mean} % (95 % interval: {low} to {high} %)."
        spread = statistics.pstdev(changes) / math.sqrt(2)
        lines += ["", f"{said} Runs by hand differ, too: their standard deviation is {format_share(spread)}."]
    return "\n".join(lines) + "\n"


def contract_table(name: str) -> str:
    """Return in which precisions each case of a record trains as by hand."""
    record = json.loads((RECORDS / "script_contract" / f"{name}.json").read_text())
    precisions = list(dict.fromkeys(row["precision"] for row in record["rows"]))
    found: dict[str, dict[str, list[bool]]] = {}
    for row in record["rows"]:
        cells = found.setdefault(f"`{row['case']}` {row['way']}".strip(), {})
        cells.setdefault(row["precision"], []).append(row["alone"] == row["castwise"])
    rows = [
        [case, *(f"{sum(equal)} of {len(equal)}" if (equal := cells.get(each)) else "" for each in precisions)]
        for case, cells in found.items()
    ]
    table = markdown(" | ".join(["case", *precisions]), "l" + "r" * len(precisions), rows)
    return "\n".join([place_of(record["environment"], record["date"]), "", *table]) + "\n"


def _in_words(gap: float | None) -> str:
    if gap is None:
        return "failed"
    return "equal" if gap == 0 else f"{gap:.0e}"


if __name__ == "__main__":
    main()
