"""Whether the scripts that `castwise tune --emit` writes are as fast as the loops that were measured.

    python benchmarks/emitted.py --out FILE [--rounds N] [--seconds S] [NAME ...]

NAME is a climb under benchmarks/records/climbs/ (without one: all); its fastest loop is measured, as the climb did, in
one process alone; its script is run in another, as it stands, and in a third, told to warm up and to time as many steps
as the first did. They take turns; which begins changes from round to round. Where a loop's next round would not end
within S seconds, by its longest so far, none begins. The GPU's clock and power are watched from outside, of all alike.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clocks import with_clock
from stored import RECORDS, load

from castwise.analysis.steady_metrics import throughput, units_per_step
from castwise.errors import CastwiseError
from castwise.orchestrator.machine import Machine, detect_machine
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.trial import NullListener, TrialRunner
from castwise.records.schema import Trial
from castwise.render.emit.script import script_of
from castwise.spec.plan import CUDA_ROUND, TrialSpec

# The sides. A script as it stands times three seconds, a rung less than one: a board at its power limit may slow down.
RUNG, SCRIPT, ALIKE = "rung", "script", "script, as many steps"
_FOREVER = 1800.0  # seconds that a process may take


@dataclass(frozen=True)
class Speed:
    """How fast one process was, and what its GPU did.

    Attributes:
        per_second: Units a second.
        at_a_stretch: Units a second of the steps that castwise runs on and on after its blocks; None of a script's.
        clock_hertz: The middle SM clock of the time in which most power was drawn; None without a GPU.
        power_watts: The middle power of that time.
    """

    per_second: float
    at_a_stretch: float | None = None
    clock_hertz: float | None = None
    power_watts: float | None = None


@dataclass(frozen=True, kw_only=True)
class Turn(Speed):
    """One process of one side.

    Attributes:
        side: `RUNG`, `SCRIPT` or `ALIKE`.
        seconds: Wall time of the process.
    """

    side: str
    seconds: float


Sides = Mapping[str, Callable[[], Speed]]


def fastest_of(name: str) -> TrialSpec:
    """Return the fastest loop of a climb on record, as it is measured today, and without its time limit.

    Args:
        name: The climb's.
    """
    account: dict[str, Any] = json.loads((RECORDS / "climbs" / f"{name}.json").read_text())
    wanted = account["fastest"]
    for trial in load(RECORDS / "tune" / name):
        spec = trial.spec
        if (spec.precision, list(spec.techniques), spec.batch_size) == (
            wanted["precision"],
            wanted["techniques"],
            wanted["batch_size"],
        ):
            update = {"timeout_seconds": _FOREVER, "lead_seconds": CUDA_ROUND.lead_seconds}
            protocol = spec.protocol.model_copy(update=update)
            return spec.model_copy(update={"repeat": 0, "protocol": protocol})
    sys.exit(f"records/tune/{name} has no trial of its fastest loop")


class Rung:
    """A loop in processes of castwise's."""

    def __init__(self, spec: TrialSpec, bench: Machine) -> None:
        self._spec, self._bench = spec, bench
        self._trial: Trial | None = None

    def measure(self) -> Speed:
        """Return how fast one process was.

        Raises:
            RuntimeError: The trial did not end well.
        """
        (trial,) = TrialRunner(ForkserverEngine(), None, self._bench.environment, NullListener()).run([self._spec])
        speed = throughput(trial)
        if trial.status != "ok" or speed is None:
            raise RuntimeError(f"{self._spec.label}: {trial.status}: {trial.message}")
        self._trial = trial
        if trial.metered is None or not trial.metered.step_seconds or trial.facts is None:
            return Speed(speed)
        return Speed(speed, units_per_step(trial.spec, trial.facts) / trial.metered.step_seconds)

    @property
    def options(self) -> list[str]:
        """Return what tells a script to run as many steps as the last process did.

        Raises:
            LookupError: None has run.
        """
        if self._trial is None or self._trial.facts is None:
            raise LookupError(f"{self._spec.label}: not measured yet")
        steps = sum(block.all_steps for block in self._trial.ranks[0].blocks)
        return ["--warm-up", str(self._trial.facts.warm_up_steps), "--steps", str(steps)]


def run_script(file: Path, options: Sequence[str] = ()) -> Speed:
    """Return how fast a script says it is.

    Raises:
        RuntimeError: It failed.
    """
    command = [sys.executable, "-P", file.name, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=file.parent, timeout=_FOREVER, check=False)
    if done.returncode:
        raise RuntimeError(f"{file}: {done.stderr[-2000:]}")
    return Speed(float(done.stdout.splitlines()[-1].split()[0]))


def take_turns(sides: Sides, rounds: int, deadline: float, keep: Callable[[list[Turn]], None]) -> list[Turn]:
    """Let the sides take turns.

    Args:
        sides: What measures each; the first and the last by name begin alike often.
        rounds: How many rounds.
        deadline: When a further round must have ended, by `time.perf_counter`.
        keep: Is told of all turns after each round.
    """
    turns: list[Turn] = []
    longest = 0.0
    for number in range(rounds):
        began = time.perf_counter()
        if began + longest > deadline:
            break
        for side in sorted(sides, reverse=bool(number % 2)):
            started = time.perf_counter()
            speed = sides[side]()
            turns.append(Turn(side=side, seconds=time.perf_counter() - started, **asdict(speed)))
        longest = max(longest, time.perf_counter() - began)
        keep(turns)
    return turns


def compare(spec: TrialSpec, bench: Machine, folder: Path, options: Sequence[str] = ()) -> Sides:
    """Return what measures a loop, and what runs its script, which is written into a folder, in two ways.

    Args:
        spec: The loop.
        bench: The machine.
        folder: The folder.
        options: What the script is told where it is not to run as many steps as the loop.
    """
    spec = spec.model_copy(update={"device": bench.device})
    file = folder / "train.py"
    file.write_text(script_of(spec))
    rung = Rung(spec, bench)
    sides: Sides = {
        RUNG: rung.measure,
        SCRIPT: lambda: run_script(file, options),
        ALIKE: lambda: run_script(file, rung.options),
    }
    return {name: partial(with_clock, bench.environment.gpu_uuid, measure) for name, measure in sides.items()}


def main() -> int:
    """Measure the climbs that are named and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(path.stem for path in (RECORDS / "climbs").glob("*.json")))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="wall time")
    arguments = parser.parse_args()
    deadline = time.perf_counter() + arguments.seconds
    bench = detect_machine(None, None)
    loops: list[dict[str, Any]] = []

    def write() -> None:
        document = {"environment": bench.environment.model_dump(mode="json"), "loops": loops}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")

    for name in arguments.names:
        spec = fastest_of(name)
        loop: dict[str, Any] = {"name": name, "spec": spec.model_dump(mode="json"), "turns": []}
        loops.append(loop)

        def keep(turns: list[Turn], loop: dict[str, Any] = loop) -> None:
            loop["turns"] = [asdict(turn) for turn in turns]
            write()

        with tempfile.TemporaryDirectory() as folder:
            try:
                take_turns(compare(spec, bench, Path(folder)), arguments.rounds, deadline, keep)
            except (RuntimeError, CastwiseError, subprocess.SubprocessError, ValueError, LookupError) as error:
                loop["failure"] = str(error) or repr(error)
                write()
        turns = loop["turns"]
        said = ", ".join(f"{turn['side']} {turn['per_second']:,.0f} ({turn['seconds']:.0f} s)" for turn in turns)
        print(f"{name}: {said} {loop.get('failure', '')}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
