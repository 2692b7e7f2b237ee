"""The accounts of climbs: what `castwise tune` decided over the trials under benchmarks/records/tune/.

    castwise tune resnet50 --results … --format json > benchmarks/records/climbs/resnet50.json
    python benchmarks/climbs.py [NAME…] [--memory 8GiB]

A trial says what a loop took, and not which loop it was set beside or whether it was taken: an account does, and stays
what it was when castwise climbs otherwise one day. It is what `--format json` prints, without the trials, which lie
beside. For climbs that were run without it, the second line climbs again over their trials, where nothing is measured,
and keeps the account; it is right while castwise decides as it did then. Those that are named are climbed again even
where there is an account.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from stored import RECORDS, load

from castwise.orchestrator.job import Job
from castwise.orchestrator.session import Session
from castwise.orchestrator.trial import NullListener, TrialRunner
from castwise.records.schema import Trial
from castwise.registry.precisions import place_of
from castwise.registry.techniques import find_technique
from castwise.spec.plan import Plan, TrialSpec
from castwise.spec.quantities import parse_memory
from castwise.tune.candidates import NUMERICS, SearchSpace, TuningResult, allowed_techniques
from castwise.tune.render import json_tuning
from castwise.tune.search import TuningSearch

Account = dict[str, Any]


class OtherClimbError(Exception):
    """Trials are of a climb that castwise would not make today."""


class Replay(TuningSearch):
    """A climb over trials that are on record: each sitting ends at once, in the order in which they were.

    Where the next one is not what the climb asks for, its time is up.
    """

    def play(self, trials: Sequence[Trial]) -> TuningResult:
        """Climb again over some trials, oldest first."""
        sittings: dict[str, list[Trial]] = {}
        for trial in trials:
            sittings.setdefault(trial.sitting or trial.spec.key, []).append(trial)
        self.ahead = list(sittings.values())
        return replace(self.run(), seconds=seconds_of(trials), budget_seconds=None)  # no record has it

    def _has_time_for(self, specs: Sequence[TrialSpec], keep: float = 1.0) -> bool:
        del keep
        return self._next(specs) > 0

    def _in_time(self, below: Sequence[TrialSpec], group: Sequence[TrialSpec]) -> list[TrialSpec]:
        count = self._next([*below, *group])
        measured = {trial.spec.cell for sitting in self.ahead[:count] for trial in sitting}
        return [spec for spec in group if spec.cell in measured]

    def _next(self, specs: Sequence[TrialSpec]) -> int:
        """Return how many of the next sittings measure some loops together, 0 where the next one has others."""
        wanted = {spec.cell for spec in specs}
        waiting = {spec.cell for spec in specs if not self._of(spec)} or wanted
        count = 0
        while waiting and count < len(self.ahead):
            cells = {trial.spec.cell for trial in self.ahead[count]}
            if not cells <= wanted:
                break
            waiting -= cells
            count += 1
        return count

    def _rounds(self, specs: Sequence[TrialSpec], baseline: TrialSpec, *, again: bool = False) -> None:
        del baseline, again
        self._belong(specs)
        count = self._next(specs)
        self.known += [trial for sitting in self.ahead[:count] for trial in sitting]
        self.ahead = self.ahead[count:]


class _NoEngine:
    """Starts nothing."""

    def start(self, timeout_seconds: float, num_processes: int = 1) -> Session:
        """Refuse."""
        del timeout_seconds, num_processes
        raise AssertionError("a replay measures nothing")


def seconds_of(trials: Iterable[Trial]) -> float:
    """Return the wall time from the first of some trials to the end of the last."""
    times = [(datetime.fromisoformat(trial.started_at).timestamp(), trial.duration_seconds) for trial in trials]
    return max(start + lasted for start, lasted in times) - min(start for start, _ in times)


def replay(trials: Sequence[Trial], memory_bytes: float | None = None) -> TuningResult:
    """Return the climb that led to some trials.

    Args:
        trials: All of it, oldest first: the first is the plain loop's.
        memory_bytes: What `--memory` said, None where it was not named.

    Raises:
        OtherClimbError: castwise climbs otherwise today.
    """
    start = trials[0].spec.model_copy(update={"repeat": 0})
    precisions = sorted({trial.spec.precision for trial in trials} - {start.precision}, key=place_of)
    named = {name for trial in trials for name in trial.spec.techniques}
    changes = {"draws", *(find_technique(name).numerics for name in named)}
    allowed = allowed_techniques(max((each for each in NUMERICS if each in changes), key=NUMERICS.index), start.kind)
    is_larger = any(trial.spec.batch_size > start.batch_size for trial in trials)
    ladder = SearchSpace((start.precision, *precisions), allowed, start if is_larger else None)
    runner = TrialRunner(_NoEngine(), None, trials[0].environment, NullListener())
    job = Job(Plan(specs=(start,)), (), {}, (), (), runner)
    climb = Replay(start, ladder, job, 0.0, memory_bytes=memory_bytes)
    climbed = climb.play(trials)
    if climb.ahead:
        left = sum(map(len, climb.ahead))
        raise OtherClimbError(f"{left} of {len(trials)} trials are not what castwise would try today")
    return climbed


def account_of(climbed: TuningResult, memory_bytes: float | None = None) -> Account:
    """Return what `--format json` says of a climb, without its trials."""
    document: Account = json.loads(json_tuning(climbed, memory_bytes))
    return without_trials(document)


def without_trials(document: Account) -> Account:
    """Return an account without the trials that lie beside it."""
    return {key: value for key, value in document.items() if key != "trials"}


@cache
def names() -> list[str]:
    """Return the workloads whose climbs are on record."""
    return sorted(path.name for path in (RECORDS / "tune").glob("*") if any(path.rglob("*.json")))


def known_account(name: str) -> Account | None:
    """Return a climb's account: the one that is kept, or else what its trials come to; None where neither is there."""
    path = _path(name)
    if path.is_file():
        return without_trials(json.loads(path.read_text()))
    try:
        return account_of(replay(load(RECORDS / "tune" / name)))
    except OtherClimbError:
        return None


def keep(name: str, account: Account) -> None:
    """Write an account, unless the one that is kept says the same."""
    path = _path(name)
    text = json.dumps(account, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"{path.relative_to(RECORDS.parent)}: account written")


def keep_all() -> None:
    """Write the accounts that are missing, and leave out of the others the trials that lie beside."""
    for name in names():
        account = known_account(name)
        if account is None:
            print(
                f"{name}: no account, and castwise climbs otherwise today: it is left out. With a checkout of the "
                f"commit that measured it, `python benchmarks/climbs.py {name}` writes one.",
                file=sys.stderr,
            )
        else:
            keep(name, account)


def _path(name: str) -> Path:
    return RECORDS / "climbs" / f"{name}.json"


def main() -> None:
    """Climb again over the trials on record, and keep the accounts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="folders under benchmarks/records/tune/")
    parser.add_argument("--memory", help="what --memory said")
    arguments = parser.parse_args()
    memory = None if arguments.memory is None else parse_memory("--memory", arguments.memory)
    for name in arguments.names:
        try:
            keep(name, account_of(replay(load(RECORDS / "tune" / name), memory), memory))
        except OtherClimbError as error:
            sys.exit(f"{name}: {error}; its account is left as it is")
    keep_all()


if __name__ == "__main__":
    main()
