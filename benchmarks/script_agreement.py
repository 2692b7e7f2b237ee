"""Scripts under castwise beside the same scripts with the precision written by hand: their losses and their pace.

    python benchmarks/script_agreement.py [--device cuda] [--size N] [--turns N] [--out FILE] [SCRIPT ...]

The scripts are those of tests/training_scripts/. In each turn every script runs alone, then under castwise; after the
last turn it runs alone once more. Alone, a step's time is taken from when the script wrote its losses, and no code of
castwise runs. CUDA_VISIBLE_DEVICES chooses the GPU; `ddp` needs two. What fails is null in the record.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stored import RECORDS, markdown, place_of, write

TESTS = Path(__file__).resolve().parent.parent / "tests"
SCRIPTS = TESTS / "training_scripts"
# Losses that a script writes in an optimizer step, in lines of its log.
LINES = {"accumulation": 3, "accelerate_loop": 2, "transformers_trainer": 2}
LAUNCHERS = {"ddp": ("torchrun", "--standalone", "--nproc-per-node", "2")}
NAMES = tuple(sorted(each.stem for each in SCRIPTS.glob("*.py") if each.stem != "by_hand"))
WAYS = {"as-written": "none", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}
_STEPS, _TIMED = 400, 150  # of a run alone: those of its second half are timed
_LIMIT_SECONDS = 240  # of a process, or of one under castwise


class Failed(Exception):  # noqa: N818  it is said, and the next one goes on
    """A script that did not run."""


def main() -> None:
    """Measure, print a line for each script and precision, and write the record after each script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", default=NAMES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    environment: dict[str, Any] = {}
    host = Host()
    for name in arguments.scripts:
        more = ["--device", arguments.device, "--size", str(arguments.size)]
        gaps = loss_gaps(name, more)
        alone: dict[str, list[float | None]] = {precision: [] for precision in WAYS}
        hooked: dict[str, list[float | None]] = {precision: [] for precision in WAYS}
        for turn in range(arguments.turns + 1):
            for precision, amp in WAYS.items():
                alone[precision].append(seconds_alone(host, name, [*more, "--amp", amp]))
            if turn < arguments.turns:
                found, where = seconds_under_castwise(name, more)
                environment = environment or where
                for precision in WAYS:
                    hooked[precision].append(found.get(precision))
        for precision in WAYS:
            rows.append(
                {
                    "script": name,
                    "precision": precision,
                    "loss_gap": gaps[precision],
                    "alone": alone[precision],
                    "castwise": hooked[precision],
                }
            )
            print(rows[-1], flush=True)
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        write(arguments.out, {"environment": environment, "date": date, "size": arguments.size, "rows": rows})


class Host:
    """The process that scripts are forked from: it has imported what takes seconds, and nothing of castwise."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-P", str(TESTS / "script_host.py")]
        # Else an import that asks whether there is a GPU begins CUDA.
        environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def run(self, file: Path, arguments: list[str]) -> None:
        """Run a script as `python FILE ARGUMENTS` does.

        Raises:
            Failed: It ended with another exit code than 0.
        """
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        with tempfile.NamedTemporaryFile() as err:
            request = {"command": [str(file), *arguments], "folder": str(file.parent), "text": file.read_text()}
            request |= {"out": os.devnull, "err": err.name, "seconds": _LIMIT_SECONDS}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            code = self._process.stdout.readline().strip()
            if not code:
                self._process.wait()
                self._start()
                raise Failed("its host died")
            if code != "0":
                raise Failed(f"exit code {code}: {_last_line(Path(err.name).read_text())}")


def run(command: list[str], **environment: str) -> tuple[str, str]:
    """Return what a command prints, on standard output and on standard error.

    Raises:
        Failed: It took too long; all that it started is ended.
    """
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=len(WAYS) * _LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise Failed(f"no end within {len(WAYS) * _LIMIT_SECONDS} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def loss_gaps(name: str, more: list[str]) -> dict[str, float | None]:
    """Return by how much the first losses differ from those by hand, as a share; None if a run failed."""
    file = str(SCRIPTS / f"{name}.py")
    jobs = [[file, *way] for precision, amp in WAYS.items() for way in ((precision, "none"), ("alone", amp))]
    path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH")]))
    gaps: dict[str, float | None] = dict.fromkeys(WAYS)
    try:
        command = [sys.executable, "-P", str(TESTS / "hooked_scripts.py"), json.dumps(jobs)]
        out, err = run(command, SCRIPT_ARGUMENTS=" ".join(more), PYTHONPATH=path)
        if not out:
            raise Failed(_last_line(err))
        losses = json.loads(out.splitlines()[-1])
        for precision, under, by_hand in zip(WAYS, losses[::2], losses[1::2], strict=True):
            if under is None or by_hand is None:
                raised = [line for line in err.splitlines() if "Error" in line]
                print(f"{name} {precision}: no losses to compare: {_last_line(chr(10).join(raised))}", flush=True)
                continue
            pairs = [pair for lines in zip(under, by_hand, strict=False) for pair in zip(*lines, strict=True)]
            gaps[precision] = max(abs(own - other) / max(abs(other), 1e-6) for own, other in pairs)
    except (Failed, ValueError) as error:
        print(f"{name}: no losses to compare: {error}", flush=True)
    return gaps


def seconds_alone(host: Host, name: str, more: list[str]) -> float | None:
    """Return the seconds of an optimizer step of a script that runs by itself; None if it failed."""
    file = SCRIPTS / f"{name}.py"
    count = _TIMED * LINES.get(name, 1)
    with tempfile.NamedTemporaryFile() as log:
        arguments = ["--log", log.name, "--times", "--steps", str(_STEPS), *more]
        try:
            if name in LAUNCHERS:
                program, *options = LAUNCHERS[name]
                assert program == "torchrun", "the only one here"
                _, err = run([sys.executable, "-m", "torch.distributed.run", *options, "--", str(file), *arguments])
            else:
                host.run(file, arguments)
                err = ""
            times = [float(line.split()[-1]) for line in Path(log.name).read_text().splitlines()][-count:]
            if len(times) < count:
                raise Failed(f"{len(times)} losses in its log; {_last_line(err)}")
        except (Failed, ValueError) as error:
            print(f"{name} {' '.join(more)}: alone: {error}", flush=True)
            return None
    return (times[-1] - times[0]) / (count - 1) * LINES.get(name, 1)


def seconds_under_castwise(name: str, more: list[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the seconds of a step by precision as castwise measures them in one process each, and where it ran."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "castwise", "run", "--precision", ",".join(WAYS), "--rounds", "1"]
        command += ["--steps", str(_TIMED), "--warm-up", "30", "--timeout", f"{_LIMIT_SECONDS}s"]
        command += ["--format", "json", "--results", f"{folder}/results", "--device", more[1], "--"]
        command += [*LAUNCHERS.get(name, ("python",)), str(SCRIPTS / f"{name}.py"), "--log", f"{folder}/log", "--times"]
        try:
            _, err = run([*command, "--steps", str(_STEPS), *more])
            trials = [json.loads(path.read_text()) for path in Path(folder, "results").rglob("*.json")]
            if not trials:
                raise Failed(_last_line(err))
        except (Failed, ValueError) as error:
            print(f"{name}: under castwise: {error}", flush=True)
            return {}, {}
    found = {}
    for trial in trials:
        blocks = [block for rank in trial["ranks"] for block in rank["blocks"]]
        if trial["status"] == "ok" and blocks:
            steps = sum(block["num_steps"] for block in blocks)
            found[trial["spec"]["precision"]] = sum(block["seconds"] for block in blocks) / steps
        else:
            said = trial.get("message") or trial["status"]
            print(f"{name} {trial['spec']['precision']}: under castwise: {said}", flush=True)
    return found, trials[0]["environment"]


def _last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def table(name: str) -> str:
    """Return the agreement of each script and precision, of all records whose names begin so."""
    records = [json.loads(path.read_text()) for path in sorted((RECORDS / "scripts").glob(f"{name}*.json"))]
    places = dict.fromkeys(place_of(each["environment"], each["date"]) for each in records)
    rows = [row for each in records for row in each["rows"]]
    cells = []
    for row in sorted(rows, key=lambda row: row["script"]):  # the precisions of one stay in their order
        alone, own = ([each for each in row[side] if each is not None] for side in ("alone", "castwise"))
        gap = "failed" if row["loss_gap"] is None else "equal" if row["loss_gap"] == 0 else f"{row['loss_gap']:.1e}"
        pace = ["failed"] * 4
        if alone and own:
            by_hand, hooked = statistics.median(alone), statistics.median(own)
            apart = max((abs(second / first - 1) for first, second in itertools.pairwise(alone)), default=0.0)
            pace = [f"{1000 * by_hand:.2f} ms", f"{1000 * hooked:.2f} ms", f"{100 * (hooked / by_hand - 1):+.1f} %"]
            pace.append(f"{100 * apart:.1f} %")
        cells.append([f"`{row['script']}`", f"`{row['precision']}`", gap, *pace])
    heading = "script | precision | losses | by hand | castwise | difference | by hand, twice"
    return "\n".join(["; ".join(places), "", *markdown(heading, "lllrrrr", cells)]) + "\n"


if __name__ == "__main__":
    main()
