"""Scripts under castwise beside the same scripts with the precision written by hand: their losses and their pace.

    python benchmarks/script_agreement.py [--device cuda] [--size N] [--turns N] [--out FILE] [SCRIPT ...]

The scripts are those of tests/training_scripts/. In each turn every script runs alone, then under castwise, then alone
again. Alone, a step's time is taken from when the script wrote its losses, and no code of castwise runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stored import RECORDS, markdown, write

TESTS = Path(__file__).resolve().parent.parent / "tests"
SCRIPTS = TESTS / "training_scripts"
# Losses that a script writes in an optimizer step, in lines of its log.
LINES = {"accumulation": 3, "accelerate_loop": 2, "transformers_trainer": 2}
NAMES = tuple(sorted(each.stem for each in SCRIPTS.glob("*.py") if each.stem not in ("by_hand", "ddp")))
WAYS = {"as-written": "none", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}
_STEPS, _TIMED = 400, 150  # of a run alone: those of its second half are timed


def main() -> None:
    """Measure, print a line for each script and precision, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", default=NAMES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    environment: dict[str, Any] = {}
    for name in arguments.scripts:
        more = ["--device", arguments.device, "--size", str(arguments.size)]
        gaps = loss_gaps(name, more)
        alone: dict[str, list[float]] = {precision: [] for precision in WAYS}
        hooked: dict[str, list[float]] = {precision: [] for precision in WAYS}
        for _ in range(arguments.turns):
            for side in range(2):
                for precision, amp in WAYS.items():
                    alone[precision].append(seconds_alone(name, [*more, "--amp", amp]))
                if side == 0:
                    found, environment = seconds_under_castwise(name, more)
                    for precision, seconds in found.items():
                        hooked[precision].append(seconds)
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


def loss_gaps(name: str, more: list[str]) -> dict[str, float | None]:
    """Return by how much the first losses differ from those by hand, as a share; None if a run failed."""
    file = str(SCRIPTS / f"{name}.py")
    gaps: dict[str, float | None] = {}
    for precision, amp in WAYS.items():
        jobs = json.dumps([[file, precision, "none"], [file, "alone", amp]])
        run = subprocess.run(
            [sys.executable, "-P", str(TESTS / "hooked_scripts.py"), jobs],
            env=os.environ | {"SCRIPT_ARGUMENTS": " ".join(more), "PYTHONPATH": _python_path()},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            print(name, precision, run.stderr[-400:], file=sys.stderr)
            gaps[precision] = None
            continue
        under, by_hand = json.loads(run.stdout.splitlines()[-1])
        pairs = [pair for lines in zip(under, by_hand, strict=False) for pair in zip(*lines, strict=True)]
        gaps[precision] = max(abs(own - other) / max(abs(other), 1e-6) for own, other in pairs)
    return gaps


def seconds_alone(name: str, more: list[str]) -> float:
    """Return the seconds of an optimizer step of a script that runs by itself."""
    with tempfile.NamedTemporaryFile() as log:
        command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--log", log.name, "--times", "--steps", str(_STEPS)]
        subprocess.run([*command, *more], check=True, capture_output=True)
        times = [float(line.split()[-1]) for line in Path(log.name).read_text().splitlines()]
    lines = LINES.get(name, 1)
    last = times[-_TIMED * lines :]
    return (last[-1] - last[0]) / (len(last) - 1) * lines


def seconds_under_castwise(name: str, more: list[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the seconds of a step by precision as castwise measures them in one process each, and where it ran."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "castwise", "run", "--precision", ",".join(WAYS), "--rounds", "1"]
        command += ["--steps", str(_TIMED), "--warm-up", "30", "--format", "json", "--results", f"{folder}/results"]
        script = ["python", str(SCRIPTS / f"{name}.py"), "--log", f"{folder}/log", "--times"]
        command += ["--device", more[1], "--", *script, "--steps", str(_STEPS), *more]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if not run.stdout:
            sys.exit(f"{name}: {run.stderr[-800:]}")
        trials = [json.loads(path.read_text()) for path in Path(folder, "results").rglob("*.json")]
    found = {}
    for trial in trials:
        blocks = [block for rank in trial["ranks"] for block in rank["blocks"]]
        if trial["status"] == "ok":
            steps = sum(block["num_steps"] for block in blocks)
            found[trial["spec"]["precision"]] = sum(block["seconds"] for block in blocks) / steps
    return found, trials[0]["environment"]


def _python_path() -> str:
    own = [str(TESTS), str(TESTS.parent / "src")]
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


def table(name: str) -> str:
    """Return the agreement of each script and precision."""
    record = json.loads((RECORDS / "scripts" / f"{name}.json").read_text())
    cells = []
    for row in record["rows"]:
        if not row["castwise"] or not row["alone"]:
            continue
        alone, own = statistics.median(row["alone"]), statistics.median(row["castwise"])
        pairs = zip(row["alone"][::2], row["alone"][1::2], strict=True)
        apart = max(abs(second / first - 1) for first, second in pairs)
        gap = "failed" if row["loss_gap"] is None else "equal" if row["loss_gap"] == 0 else f"{row['loss_gap']:.1e}"
        pace = (
            f"{1000 * alone:.2f} ms",
            f"{1000 * own:.2f} ms",
            f"{100 * (own / alone - 1):+.1f} %",
            f"{100 * apart:.1f} %",
        )
        cells.append([f"`{row['script']}`", f"`{row['precision']}`", gap, *pace])
    heading = "script | precision | losses | by hand | castwise | difference | by hand, twice"
    return "\n".join(markdown(heading, "lllrrrr", cells)) + "\n"


if __name__ == "__main__":
    main()
