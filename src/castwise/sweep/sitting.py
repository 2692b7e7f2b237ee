"""A sitting: the cells of a comparison, each set up in a process of its own, take turns at being timed.

What drifts (clock, temperature, neighbours) then falls on all alike, and set-up is paid once.
"""

import random
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from castwise.analyze.estimates import settled
from castwise.plan import TrialSpec
from castwise.record import Trial
from castwise.sweep.engine import Session, TrialFailedError
from castwise.sweep.runner import Attempt, Sweep


@dataclass(frozen=True)
class Sat:
    """What came of a sitting.

    Attributes:
        trials: A record for each cell that was measured or failed for good, in the cells' order.
        postponed: The cells that ran out of memory beside others, and so may yet fit alone.
    """

    trials: tuple[Trial, ...]
    postponed: tuple[TrialSpec, ...]


class _Resident:
    """A cell in its process."""

    def __init__(self, spec: TrialSpec, sweep: Sweep) -> None:
        self.spec = spec
        self.attempt = Attempt(spec, sweep.environment)
        self.session: Session = sweep.engine.start(spec.protocol.timeout_seconds, spec.num_processes)
        self._started = time.perf_counter()
        self._sweep = sweep
        self.timed = 0.0

    @property
    def is_well(self) -> bool:
        """Return whether nothing has gone wrong with it."""
        return self.attempt.failure is None

    @property
    def goes_on(self) -> bool:
        """Return whether another turn is to be timed."""
        protocol, blocks = self.spec.protocol, self.attempt.blocks
        if not self.is_well or len(blocks) >= protocol.num_blocks:
            return False
        return len(blocks) < protocol.min_blocks or (self.timed <= protocol.max_seconds and not self._is_settled())

    def _is_settled(self) -> bool:
        return settled([block.seconds / block.num_steps for block in self.attempt.blocks])

    def move_in(self) -> None:
        """Set up and warm up."""
        self._try(self._set_up)

    def take_turn(self) -> None:
        """Time one block."""
        self._try(self._time_block)

    def finish(self) -> None:
        """Fetch what the process measured."""
        self._try(self._fetch)

    def record(self, sitting: str | None) -> Trial:
        """Return the trial."""
        trial = self.attempt.record(time.perf_counter() - self._started)
        return trial.model_copy(update={"sitting": sitting})

    def _set_up(self) -> None:
        self.attempt.environment = self.session.open(self.spec.device)
        self.session.set_up(self.spec)
        self.attempt.gpu_facts = self._sweep.telemetry.gpu_facts(self.attempt.environment)
        facts = self.session.warm_up()
        update = {"ready_seconds": self.session.ready_seconds, "data_note": self._sweep.data_note}
        self.attempt.facts = facts.model_copy(update=update)

    def _time_block(self) -> None:
        with self._sweep.telemetry.watch(self.attempt.environment) as watch:
            block = self.session.run_block()
        self.attempt.blocks.append(block)
        self.attempt.readings.append(watch.reading)
        self.timed += block.seconds

    def _fetch(self) -> None:
        self.attempt.samples = self.session.finish()

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except TrialFailedError as failure:
            self.attempt.failure = failure
            self.session.close()  # its memory is the others'


def sit(sweep: Sweep, specs: Sequence[TrialSpec], *, together: bool, number: int = 1) -> Sat:
    """Let cells take turns until each is settled or its time is up, and return their records.

    Args:
        sweep: Starts the processes and is told of progress.
        specs: The cells, the baseline first: it is the last to be short of memory.
        together: Whether the cells are set up all at once, which is quicker, or one by one, which tells
            what each one's own set-up takes, and which of them does not fit beside the others.
        number: The round's number, for progress and for the order of its turns.
    """
    residents: list[_Resident] = []
    try:
        if together:
            sweep.listener.phase(f"round {number}: setting up all", 0.05)
            for spec in specs:
                residents.append(_Resident(spec, sweep))
            _move_in_together(residents)
        else:
            _move_in_one_by_one(sweep, specs, residents, number)
        _take_turns(sweep, residents, number)
        for resident in residents:
            if resident.is_well:
                resident.finish()
    finally:
        for resident in residents:
            resident.session.close()
    name = secrets.token_hex(6) if sum(resident.is_well for resident in residents) > 1 else None
    postponed = [resident for resident in residents if _may_fit_alone(resident, residents)]
    trials = tuple(resident.record(name) for resident in residents if resident not in postponed)
    return Sat(trials, tuple(resident.spec for resident in postponed))


def _move_in_together(residents: list[_Resident]) -> None:
    with ThreadPoolExecutor(max_workers=len(residents)) as pool:
        try:
            list(pool.map(_Resident.move_in, residents))
        except BaseException:
            for resident in residents:
                resident.session.close()  # leaving the pool waits for its threads, and they for their processes
            raise


def _move_in_one_by_one(sweep: Sweep, specs: Sequence[TrialSpec], residents: list[_Resident], number: int) -> None:
    for index, spec in enumerate(specs):
        sweep.listener.phase(f"round {number}: setting up {spec.precision}", 0.3 * index / len(specs))
        residents.append(_Resident(spec, sweep))  # only now: its clock does not run while others are set up
        residents[-1].move_in()


def _take_turns(sweep: Sweep, residents: list[_Resident], number: int) -> None:
    rng, turn = random.Random(number), 0
    while any(resident.goes_on for resident in residents):
        # All that are well take the turn, settled or not: a ratio is made of turns that both sides had.
        order = [resident for resident in residents if resident.is_well]
        rng.shuffle(order)
        turn += 1
        most = max(resident.spec.protocol.num_blocks for resident in order)
        sweep.listener.phase(f"round {number}: turn {turn}", 0.3 + 0.7 * min(1.0, turn / most))
        for resident in order:
            resident.take_turn()


def _may_fit_alone(resident: _Resident, residents: list[_Resident]) -> bool:
    failure = resident.attempt.failure
    return failure is not None and failure.status == "oom" and len(residents) > 1
