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
from castwise.orchestrator.trial import TrialInProgress, TrialRunner, lead_in
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec

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


class _Worker:
    """A cell in its process."""

    def __init__(self, spec: TrialSpec, runner: TrialRunner, earlier: PriorStats | None, *, is_baseline: bool) -> None:
        self.spec = spec
        self.trial_in_progress = TrialInProgress(spec, runner.environment)
        self.session: Session = runner.engine.start(spec.protocol.timeout_seconds, spec.num_processes)
        self._started = time.perf_counter()
        self._runner, self._earlier = runner, earlier
        self.turns = BlockSchedule(spec.protocol, earlier)
        self.is_baseline = is_baseline
        self.is_done = False  # takes no further turns
        self._seconds: float | None = None  # until it failed

    @property
    def ok(self) -> bool:
        """Return whether nothing has gone wrong with it."""
        return self.trial_in_progress.failure is None

    @property
    def goes_on(self) -> bool:
        """Return whether another turn is to be timed."""
        return self.ok and self.turns.goes_on

    @property
    def hit_oom(self) -> bool:
        """Return whether the device's memory did not do for it."""
        return self.trial_in_progress.failure is not None and self.trial_in_progress.failure.status == "oom"

    def open_device(self) -> None:
        """Open the device: the process is there, and torch is."""
        self._try(self._open)

    def set_up(self) -> None:
        """Set up, which ends with the first step."""
        self._try(self._set_up)

    def warm_up(self) -> None:
        """Run until the step time has settled."""
        self._try(self._warm_up)

    def time_block(self, *, may_be_long: bool = False) -> None:
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
            self._try(lambda: self._runner.measure_energy(self.session, self.trial_in_progress, _STRETCH_SECONDS))

    def finish(self) -> None:
        """Fetch what the process measured."""
        self._try(self._fetch)

    def record(self, sitting: str | None) -> Trial:
        """Return the trial."""
        trial = self.trial_in_progress.record(self._passed if self._seconds is None else self._seconds)
        return trial.model_copy(update={"session_id": sitting})

    @property
    def _passed(self) -> float:
        return time.perf_counter() - self._started

    def _open(self) -> None:
        self.trial_in_progress.environment = self.session.open(self.spec.device)

    def _set_up(self) -> None:
        self.session.set_up(self.spec)
        self.trial_in_progress.gpu_facts = self._runner.telemetry.gpu_facts(self.trial_in_progress.gpus)

    def _warm_up(self) -> None:
        recipe = self.spec.recipe
        known = None if self._earlier is None else self._earlier.step_seconds
        facts = self.session.warm_up(known) if recipe is None else self.session.resume().facts
        update = {"ready_seconds": self.session.ready_seconds, "data_note": self._runner.data_note}
        self.trial_in_progress.facts = facts.model_copy(update=update)
        for _ in range(0 if recipe is None else recipe.skip_epochs):  # the first step is in the first
            self._train(recipe)

    def _time_block(self, length: int) -> None:
        lead_in(self.session, self.spec.protocol)  # behind the last look at the one before: what it sees is that one's
        with self._runner.telemetry.watch(self.trial_in_progress.gpus) as watch:
            block = self.session.run_block(length)
        self.trial_in_progress.blocks.append(block)
        self.trial_in_progress.readings.append(watch.reading)
        self.turns.take(block.seconds, block.num_steps, length)

    def _train(self, recipe: Recipe | None) -> None:
        """Run an epoch, and count it if the run's throughput does."""
        with self._runner.telemetry.watch(self.trial_in_progress.gpus) as watch:
            epoch = self.session.run_epoch()
        self.trial_in_progress.epochs.append(epoch)
        self.trial_in_progress.readings.append(watch.reading)
        if epoch.diverged:
            raise TrialFailedError("diverged", epoch.diverged)
        if recipe is not None and len(self.trial_in_progress.epochs) > recipe.skip_epochs:
            self.turns.take(epoch.seconds, epoch.num_steps)

    def _fetch(self) -> None:
        self.trial_in_progress.samples = self.session.finish()

    def _try(self, act: Callable[[], None]) -> None:
        if not self.ok:
            return
        try:
            act()
        except TrialFailedError as failure:
            self.trial_in_progress.failure = failure
            self.session.close()  # its memory is the others'
            self._seconds = self._passed


SetupOrder = Literal["together", "first alone", "one by one"]


def run_interleaved(
    runner: TrialRunner,
    specs: Sequence[TrialSpec],
    *,
    setup_order: SetupOrder = "together",
    number: int = 1,
    earlier: Mapping[str, PriorStats] | None = None,
    baseline: str | None = None,
) -> InterleavedResult:
    """Let cells take turns until each is settled or its time is up, and return their records.

    The processes of the sitting before may still be ending while this one's start, and this one's end when all is
    measured, while the caller goes on (`runner.closer`).

    Args:
        runner: Starts the processes and is told of progress.
        specs: The cells, the baseline first: it is the last to be short of memory.
        setup_order: How the cells are set up: all at once; the first alone and then the others at once; or one by one,
            where they would take too much from each other. Where the first does not fit beside the others, all begin
            anew with the first alone. They are warmed up one by one in any case.
        number: The round's number, for progress and for the order of its turns. Energy is measured in the first, and
            of a cell that no earlier process is known of.
        earlier: What earlier processes of a cell showed, by cell.
        baseline: The cell that the others are compared with; None takes float32's.
    """
    workers: list[_Worker] = []

    def sit_down(way: SetupOrder) -> None:
        runner.listener.phase(f"round {number}: starting", 0.0)
        for spec in specs:
            is_baseline = spec.precision == BASELINE if baseline is None else spec.configuration == baseline
            workers.append(_Worker(spec, runner, (earlier or {}).get(spec.configuration), is_baseline=is_baseline))
        _all_at_once(_Worker.open_device, workers)
        runner.closer.wait()  # what they hold is this sitting's
        runner.listener.phase(f"round {number}: setting up", 0.05)
        _set_up_all(workers, way)

    try:
        sit_down(setup_order)
        if setup_order == "together" and _baseline_hit_oom(workers):
            _close(workers)
            workers.clear()
            sit_down("first alone")
        _warm_up(runner, workers, number)
        _time_blocks(runner, workers, number)
        for worker in workers:
            if number == 1 or worker.is_new:
                worker.measure_energy()
        _all_at_once(_Worker.finish, workers)
    except BaseException:
        _close(workers)
        raise
    runner.closer.close([worker.session for worker in workers])
    name = secrets.token_hex(6) if sum(worker.ok for worker in workers) > 1 else None
    postponed = [worker for worker in workers if _may_fit_alone(worker, workers)]
    trials = tuple(worker.record(name) for worker in workers if worker not in postponed)
    return InterleavedResult(trials, tuple(worker.spec for worker in postponed))


def _set_up_all(workers: list[_Worker], way: SetupOrder) -> None:
    alone = {"together": 0, "first alone": 1, "one by one": len(workers)}[way]
    for worker in workers[:alone]:
        worker.set_up()
    _all_at_once(_Worker.set_up, workers[alone:])


def _all_at_once(act: Callable[[_Worker], None], workers: list[_Worker]) -> None:
    if not workers:
        return
    with ThreadPoolExecutor(max_workers=len(workers)) as pool:
        try:
            list(pool.map(act, workers))
        except BaseException:
            _close(workers)  # leaving the pool waits for its threads, and they for their processes
            raise


def _close(workers: list[_Worker]) -> None:
    """End all processes; each takes a while to let go of its device."""
    if workers:
        with ThreadPoolExecutor(max_workers=len(workers)) as pool:
            list(pool.map(lambda worker: worker.session.close(), workers))


def _warm_up(runner: TrialRunner, workers: list[_Worker], number: int) -> None:
    """Warm up one after another: while others compute, no step time settles."""
    for index, worker in enumerate(workers):
        runner.listener.phase(f"round {number}: warming up {worker.spec.precision}", 0.1 + 0.3 * index / len(workers))
        worker.warm_up()


def _time_blocks(runner: TrialRunner, workers: list[_Worker], number: int) -> None:
    rng, turn = random.Random(number), 0
    while order := _due(workers):
        rng.shuffle(order)
        turn += 1
        most = max(worker.spec.protocol.num_blocks for worker in order)
        runner.listener.phase(f"round {number}: turn {turn}", 0.4 + 0.6 * min(1.0, turn / most))
        # Longer turns of the others spare those of a baseline that needs few itself.
        may_be_long = all(worker.turns.is_quiet for worker in order if worker.is_baseline)
        for worker in order:
            worker.time_block(may_be_long=may_be_long)


def _due(workers: list[_Worker]) -> list[_Worker]:
    """Return who takes the next turn: who is not settled yet, and the baseline, of whose turns each ratio is made.

    While the baseline is not settled no ratio is, and all take it. Who has once been left out stays out: the
    ratio's turns are those that both sides had, one by one from the first.
    """
    for worker in workers:
        worker.is_done |= not worker.ok
    baseline = [worker for worker in workers if worker.is_baseline and not worker.is_done]
    if not any(worker.goes_on for worker in baseline):
        for worker in workers:
            worker.is_done |= worker not in baseline and not worker.goes_on
    order = [worker for worker in workers if not worker.is_done]
    return order if any(worker.goes_on for worker in order) else []


def _baseline_hit_oom(workers: list[_Worker]) -> bool:
    """Return whether the first has failed, and memory was short: a library may call that by another name."""
    return len(workers) > 1 and not workers[0].ok and any(each.hit_oom for each in workers)


def _may_fit_alone(worker: _Worker, workers: list[_Worker]) -> bool:
    return worker.hit_oom and len(workers) > 1
