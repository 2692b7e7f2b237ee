"""Climb with several workloads on a host of several GPUs, a climb a GPU at a time.

    python benchmarks/climb_streams.py --out FOLDER [--time 9min] NAME[@BUDGET][+MEMORY] …

Each climb is an ordinary `castwise tune NAME` that sees one GPU; the next begins on the first that is free, in the
order of the command line. FOLDER/NAME.json is the account, without its trials, for benchmarks/records/climbs/;
FOLDER/NAME/ has the trials, for benchmarks/records/tune/; FOLDER/NAME.log what was printed. The climbs share the
host's cores: loops that it paces are slower for it, in all their precisions.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from castwise.errors import UsageError
from castwise.spec.quantities import parse_duration

_SPARE_SECONDS = 90.0  # of a climb whose last trial ends behind its budget


@dataclass(frozen=True)
class Asked:
    """One climb.

    Attributes:
        name: The workload.
        budget: What `--budget` is told; None leaves it out.
        memory: What `--memory` is told; None leaves it out.
    """

    name: str
    budget: str | None = None
    memory: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Asked":
        """Return `resnet50@330s+8GiB` as a climb."""
        text, _, memory = text.partition("+")
        name, _, budget = text.partition("@")
        return cls(name, budget or None, memory or None)

    def options(self) -> list[str]:
        """Return what the command line says of it."""
        named = {"--budget": self.budget, "--memory": self.memory}
        return [self.name, *(part for option, value in named.items() if value for part in (option, value))]


@dataclass(frozen=True)
class Streams:
    """Where climbs run.

    Attributes:
        command: castwise's.
        gpus: The GPUs' numbers.
        folder: Where accounts, trials and logs go.
        deadline: When no climb is begun any more, and those under way are ended soon; as `time.monotonic` counts.
    """

    command: Sequence[str]
    gpus: Sequence[str]
    folder: Path
    deadline: float

    def run(self, climbs: Sequence[Asked]) -> dict[str, str]:
        """Return what became of each climb, by its workload."""
        free: queue.Queue[str] = queue.Queue()
        for gpu in self.gpus:
            free.put(gpu)

        def climb(asked: Asked) -> str:
            gpu = free.get()
            try:
                return self._climb(asked, gpu)
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(len(self.gpus)) as pool:
            return dict(zip((each.name for each in climbs), pool.map(climb, climbs), strict=True))

    def _climb(self, asked: Asked, gpu: str) -> str:
        left = self.deadline - time.monotonic()
        if left <= 0:
            return "no time was left"
        trials, log = self.folder / asked.name, self.folder / f"{asked.name}.log"
        trials.mkdir(parents=True, exist_ok=True)
        command = [*self.command, "tune", *asked.options(), "--results", str(trials), "--format", "json"]
        with log.open("w") as errors:
            try:
                done = subprocess.run(
                    command,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    check=False,
                    timeout=left + _SPARE_SECONDS,
                )
            except subprocess.TimeoutExpired:
                return "did not end in time; its trials are kept"
        if done.returncode:
            return f"ended with {done.returncode}: {log.read_text().strip().splitlines()[-1:]}"
        account = json.loads(done.stdout)
        account.pop("trials", None)
        (self.folder / f"{asked.name}.json").write_text(json.dumps(account, indent=1) + "\n")
        return "ok"


def _visible() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    return [str(index) for index in range(len(listed.strip().splitlines()))]


def main() -> int:
    """Run the climbs, and say what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("climbs", nargs="+", type=Asked.parse, metavar="NAME[@BUDGET][+MEMORY]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--time", default="1h", help="when no further climb is begun")
    arguments = parser.parse_args()
    try:
        seconds = parse_duration("--time", arguments.time)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    streams = Streams([sys.executable, "-m", "castwise"], _visible(), arguments.out, time.monotonic() + seconds)
    ends = streams.run(arguments.climbs)
    for name, end in ends.items():
        print(f"{name}: {end}")
    return 0 if set(ends.values()) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
