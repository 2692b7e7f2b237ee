"""A sitting: the cells of a comparison, each set up in a process of its own, take turns at being timed.

What drifts (clock, temperature, neighbours) then falls on all alike, and set-up is paid once.
"""

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from castwise.orchestrator.block_schedule import BlockSchedule, PriorStats
from castwise.orchestrator.session import Session, TrialFailedError
from castwise.orchestrator.trial import TrialInProgress, TrialRunner, lead
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE
from castwise.spec.plan import TrialSpec
from castwise.spec.recipe import Recipe

# Five ticks of an H200's energy counter, of each cell.
_STRETCH_SECONDS = 0.5


@dataclass(frozen=True)
class InterleavedResult:
    """What came of a sitting.

    Attributes:
        trials: A record for each cell that was measured or failed for good, in the cells' order.
        postponed: The cells that ran out of memory beside others, and so may yet fit alone.
    """

    trials: tuple[Trial, ...]
    postponed: tuple[TrialSpec, ...]


class _Resident:
    """A cell in its process."""

    def __init__(self, spec: TrialSpec, sweep: TrialRunner, earlier: PriorStats | None, *, is_baseline: bool) -> None:
        self.spec = spec
        self.attempt = TrialInProgress(spec, sweep.environment)
        self.session: Session = sweep.engine.start(spec.protocol.timeout_seconds, spec.num_processes)
        self._started = time.perf_counter()
        self._sweep, self._earlier = sweep, earlier
        self.turns = BlockSchedule(spec.protocol, earlier)
        self.is_baseline = is_baseline
        self.is_done = False  # takes no further turns
        self._seconds: float | None = None  # until it failed

    @property
    def is_well(self) -> bool:
        """Return whether nothing has gone wrong with it."""
        return self.attempt.failure is None

    @property
    def goes_on(self) -> bool:
        """Return whether another turn is to be timed."""
        return self.is_well and self.turns.goes_on

    @property
    def was_crowded_out(self) -> bool:
        """Return whether the device's memory did not do for it."""
        return self.attempt.failure is not None and self.attempt.failure.status == "oom"

    def arrive(self) -> None:
        """Open the device: the process is there, and torch is."""
        self._try(self._open)

    def move_in(self) -> None:
        """Set up, which ends with the first step."""
        self._try(self._set_up)

    def warm_up(self) -> None:
        """Run until the step time has settled."""
        self._try(self._warm_up)

    def take_turn(self, *, may_be_long: bool = False) -> None:
        """Time one block, or of a training run an epoch.

        Args:
            may_be_long: Whether the block may be longer than usual, if that spares turns.
        """
        recipe, length = self.spec.recipe, self.turns.length if may_be_long else 1
        self._try((lambda: self._time_block(length)) if recipe is None else lambda: self._train(recipe))

    @property
    def is_new(self) -> bool:
        """Return whether no process of its cell ended well before."""
        return self._earlier is None

    def measure_energy(self) -> None:
        """Let steps run at a stretch, for the energy counter; a training run's epochs have readings of their own."""
        if self.spec.recipe is None:
            self._try(lambda: self._sweep.measure_energy(self.session, self.attempt, _STRETCH_SECONDS))

    def finish(self) -> None:
        """Fetch what the process measured."""
        self._try(self._fetch)

    def record(self, sitting: str | None) -> Trial:
        """Return the trial."""
        trial = self.attempt.record(self._passed if self._seconds is None else self._seconds)
        return trial.model_copy(update={"sitting": sitting})

    @property
    def _passed(self) -> float:
        return time.perf_counter() - self._started

    def _open(self) -> None:
        self.attempt.environment = self.session.open(self.spec.device)

    def _set_up(self) -> None:
        self.session.set_up(self.spec)
        self.attempt.gpu_facts = self._sweep.telemetry.gpu_facts(self.attempt.gpus)

    def _warm_up(self) -> None:
        recipe = self.spec.recipe
        known = None if self._earlier is None else self._earlier.step_seconds
        facts = self.session.warm_up(known) if recipe is None else self.session.resume().facts
        update = {"ready_seconds": self.session.ready_seconds, "data_note": self._sweep.data_note}
        self.attempt.facts = facts.model_copy(update=update)
        for _ in range(0 if recipe is None else recipe.skip_epochs):  # the first step is in the first
            self._train(recipe)

    def _time_block(self, length: int) -> None:
        lead(self.session, self.spec.protocol)  # behind the last look at the one before: what it sees is that one's
        with self._sweep.telemetry.watch(self.attempt.gpus) as watch:
            block = self.session.run_block(length)
        self.attempt.blocks.append(block)
        self.attempt.readings.append(watch.reading)
        self.turns.take(block.seconds, block.num_steps, length)

    def _train(self, recipe: Recipe | None) -> None:
        """Run an epoch, and count it if the run's throughput does."""
        with self._sweep.telemetry.watch(self.attempt.gpus) as watch:
            epoch = self.session.run_epoch()
        self.attempt.epochs.append(epoch)
        self.attempt.readings.append(watch.reading)
        if epoch.diverged:
            raise TrialFailedError("diverged", epoch.diverged)
        if recipe is not None and len(self.attempt.epochs) > recipe.skip_epochs:
            self.turns.take(epoch.seconds, epoch.num_steps)

    def _fetch(self) -> None:
        self.attempt.samples = self.session.finish()

    def _try(self, act: Callable[[], None]) -> None:
        if not self.is_well:
            return
        try:
            act()
        except TrialFailedError as failure:
            self.attempt.failure = failure
            self.session.close()  # its memory is the others'
            self._seconds = self._passed


SetupOrder = Literal["together", "first alone", "one by one"]


def run_interleaved(
    sweep: TrialRunner,
    specs: Sequence[TrialSpec],
    *,
    moving_in: SetupOrder = "together",
    number: int = 1,
    earlier: Mapping[str, PriorStats] | None = None,
    baseline: str | None = None,
) -> InterleavedResult:
    """Let cells take turns until each is settled or its time is up, and return their records.

    The processes of the sitting before may still be ending while this one's start, and this one's end when all is
    measured, while the caller goes on (`sweep.leaving`).

    Args:
        sweep: Starts the processes and is told of progress.
        specs: The cells, the baseline first: it is the last to be short of memory.
        moving_in: How the cells are set up: all at once; the first alone and then the others at once; or one by one,
            where they would take too much from each other. Where the first does not fit beside the others, all begin
            anew with the first alone. They are warmed up one by one in any case.
        number: The round's number, for progress and for the order of its turns. Energy is measured in the first, and
            of a cell that no earlier process is known of.
        earlier: What earlier processes of a cell showed, by cell.
        baseline: The cell that the others are compared with; None takes float32's.
    """
    residents: list[_Resident] = []

    def sit_down(way: SetupOrder) -> None:
        sweep.listener.phase(f"round {number}: starting", 0.0)
        for spec in specs:
            is_baseline = spec.precision == BASELINE if baseline is None else spec.cell == baseline
            residents.append(_Resident(spec, sweep, (earlier or {}).get(spec.cell), is_baseline=is_baseline))
        _all_at_once(_Resident.arrive, residents)
        sweep.leaving.wait()  # what they hold is this sitting's
        sweep.listener.phase(f"round {number}: setting up", 0.05)
        _move_in(residents, way)

    try:
        sit_down(moving_in)
        if moving_in == "together" and _is_first_crowded_out(residents):
            _close(residents)
            residents.clear()
            sit_down("first alone")
        _warm_up(sweep, residents, number)
        _take_turns(sweep, residents, number)
        for resident in residents:
            if number == 1 or resident.is_new:
                resident.measure_energy()
        _all_at_once(_Resident.finish, residents)
    except BaseException:
        _close(residents)
        raise
    sweep.leaving.see_off([resident.session for resident in residents])
    name = secrets.token_hex(6) if sum(resident.is_well for resident in residents) > 1 else None
    postponed = [resident for resident in residents if _may_fit_alone(resident, residents)]
    trials = tuple(resident.record(name) for resident in residents if resident not in postponed)
    return InterleavedResult(trials, tuple(resident.spec for resident in postponed))


def _move_in(residents: list[_Resident], way: SetupOrder) -> None:
    alone = {"together": 0, "first alone": 1, "one by one": len(residents)}[way]
    for resident in residents[:alone]:
        resident.move_in()
    _all_at_once(_Resident.move_in, residents[alone:])


def _all_at_once(act: Callable[[_Resident], None], residents: list[_Resident]) -> None:
    if not residents:
        return
    with ThreadPoolExecutor(max_workers=len(residents)) as pool:
        try:
            list(pool.map(act, residents))
        except BaseException:
            _close(residents)  # leaving the pool waits for its threads, and they for their processes
            raise


def _close(residents: list[_Resident]) -> None:
    """End all processes; each takes a while to let go of its device."""
    if residents:
        with ThreadPoolExecutor(max_workers=len(residents)) as pool:
            list(pool.map(lambda resident: resident.session.close(), residents))


def _warm_up(sweep: TrialRunner, residents: list[_Resident], number: int) -> None:
    """Warm up one after another: while others compute, no step time settles."""
    for index, resident in enumerate(residents):
        sweep.listener.phase(
            f"round {number}: warming up {resident.spec.precision}", 0.1 + 0.3 * index / len(residents)
        )
        resident.warm_up()


def _take_turns(sweep: TrialRunner, residents: list[_Resident], number: int) -> None:
    rng, turn = random.Random(number), 0
    while order := _next_turn(residents):
        rng.shuffle(order)
        turn += 1
        most = max(resident.spec.protocol.num_blocks for resident in order)
        sweep.listener.phase(f"round {number}: turn {turn}", 0.4 + 0.6 * min(1.0, turn / most))
        # Longer turns of the others spare those of a baseline that needs few itself.
        may_be_long = all(resident.turns.is_quiet for resident in order if resident.is_baseline)
        for resident in order:
            resident.take_turn(may_be_long=may_be_long)


def _next_turn(residents: list[_Resident]) -> list[_Resident]:
    """Return who takes the next turn: who is not settled yet, and the baseline, of whose turns each ratio is made.

    While the baseline is not settled no ratio is, and all take it. Who has once been left out stays out: the
    ratio's turns are those that both sides had, one by one from the first.
    """
    for resident in residents:
        resident.is_done |= not resident.is_well
    baseline = [resident for resident in residents if resident.is_baseline and not resident.is_done]
    if not any(resident.goes_on for resident in baseline):
        for resident in residents:
            resident.is_done |= resident not in baseline and not resident.goes_on
    order = [resident for resident in residents if not resident.is_done]
    return order if any(resident.goes_on for resident in order) else []


def _is_first_crowded_out(residents: list[_Resident]) -> bool:
    """Return whether the first has failed, and memory was short: a library may call that by another name."""
    return len(residents) > 1 and not residents[0].is_well and any(each.was_crowded_out for each in residents)


def _may_fit_alone(resident: _Resident, residents: list[_Resident]) -> bool:
    return resident.was_crowded_out and len(residents) > 1
