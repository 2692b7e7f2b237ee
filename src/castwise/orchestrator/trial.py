"""Run a plan: one process a trial, every end of it a record, each record stored before the next trial starts."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from castwise.errors import UsageError
from castwise.orchestrator.closing import BackgroundCloser
from castwise.orchestrator.session import Engine, Session, TrialFailedError
from castwise.records.schema import (
    Block,
    EnergyMeasurement,
    Environment,
    Epoch,
    Facts,
    GpuFacts,
    RankSamples,
    TelemetrySummary,
    Trial,
)
from castwise.records.store import Store, name_of, stem_of
from castwise.registry.technique_constraints import why_unsupported
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.telemetry.sampler import Telemetry
from castwise.telemetry.summarize import note_of, unwatched

# Ten ticks of an H200's energy counter.
_STRETCH_SECONDS = 1.1

FAILED = ("crashed", "timeout")


class Listener(Protocol):
    """Is told how a sweep goes on."""

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Trial `index` (from 1) of `count` begins; 0 where nobody knows of how many."""

    def phase(self, name: str, done: float) -> None:
        """The running trial is in a phase; `done` is its finished share, 0 to 1."""

    def ended(self, trial: Trial) -> None:
        """A trial has its record."""

    def remark(self, line: str) -> None:
        """Something is worth a line."""


class NullListener:
    """A listener that says nothing."""

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Say nothing."""

    def phase(self, name: str, done: float) -> None:
        """Say nothing."""

    def ended(self, trial: Trial) -> None:
        """Say nothing."""

    def remark(self, line: str) -> None:
        """Say nothing."""


class UnboundedProgress:
    """A listener's ears where nobody knows how many trials there will be.

    Args:
        listener: Who is told.
        remarks: Whether remarks are passed on.
    """

    def __init__(self, listener: Listener, *, remarks: bool = True) -> None:
        self._listener, self._remarks = listener, remarks
        self._num_ended = 0
        self.phase = listener.phase

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Tell of the next trial."""
        del index, count
        self._listener.started(spec, self._num_ended + 1, 0)

    def ended(self, trial: Trial) -> None:
        """Pass it on."""
        self._num_ended += 1
        self._listener.ended(trial)

    def remark(self, line: str) -> None:
        """Pass it on, where remarks are."""
        if self._remarks:
            self._listener.remark(line)


@dataclass(frozen=True)
class TrialRunner:
    """Where trials are measured, kept and told of.

    Attributes:
        engine: Starts the processes.
        store: Keeps the records; None keeps none.
        environment: The machine, as found before the sweep; stands in a record whose process did not get to say.
        listener: Is told of progress.
        data_note: Stands in every record's facts.
        telemetry: Watches device and host while blocks and epochs are timed.
        closer: Processes that have been measured, and are ending.
        weights: The folder in which trained models' weights are kept; None keeps none.
    """

    engine: Engine
    store: Store | None
    environment: Environment
    listener: Listener
    data_note: str | None = None
    telemetry: Telemetry = field(default_factory=Telemetry, compare=False)
    closer: BackgroundCloser = field(default_factory=BackgroundCloser, compare=False)
    weights: Path | None = None

    def run(self, specs: Sequence[TrialSpec]) -> list[Trial]:
        """Measure each spec and return its trial, in order."""
        trials: list[Trial] = []
        self.look(specs)
        try:
            for index, spec in enumerate(specs, start=1):
                self.listener.started(spec, index, len(specs))
                lack = unsupported_reason(spec, self.environment)
                trial = self._run_one(spec) if lack is None else TrialInProgress(spec, self.environment).refuse(lack)
                if self.store is not None and lack is None:  # with more GPUs to be seen, it is to be measured
                    self.store.save(trial)
                trials.append(trial)
                self.listener.ended(trial)
        finally:
            self.telemetry.close()
        return trials

    def look(self, specs: Sequence[TrialSpec]) -> None:
        """See who computes on the GPUs of specs, before a process of this job does."""
        gpus = {device: uuid for spec in specs for device, uuid in self.environment.gpus_of(spec).items()}
        self.telemetry.look({device: uuid for device, uuid in gpus.items() if uuid})

    def _run_one(self, spec: TrialSpec) -> Trial:
        started = time.perf_counter()
        trial_in_progress = TrialInProgress(spec, self.environment)
        session = self.engine.start(spec.protocol.timeout_seconds, spec.num_processes)
        try:
            self._measure(session, trial_in_progress)
        except TrialFailedError as failure:
            trial_in_progress.failure = failure
        finally:
            session.close()
        return trial_in_progress.record(time.perf_counter() - started)

    def _measure(self, session: Session, trial_in_progress: "TrialInProgress") -> None:
        listener = self.listener
        listener.phase("starting", 0.0)
        trial_in_progress.environment = session.open(trial_in_progress.spec.device)
        listener.phase("setting up", 0.02)
        session.set_up(trial_in_progress.spec, self._checkpoint(trial_in_progress))
        trial_in_progress.gpu_facts = self.telemetry.gpu_facts(trial_in_progress.gpus)
        if trial_in_progress.spec.recipe is not None:
            self._run_epochs(session, trial_in_progress, trial_in_progress.spec.recipe.num_epochs)
        else:
            self._run_blocks(session, trial_in_progress)
        kept = self._kept(trial_in_progress)
        trial_in_progress.samples = session.finish(kept)
        if kept is not None and not kept.is_file():
            listener.remark(f"{trial_in_progress.spec.label}: its weights could not be written to '{kept}'")

    def _checkpoint(self, trial_in_progress: "TrialInProgress") -> Path | None:
        return (
            None if self.store is None else self.store.checkpoint(trial_in_progress.spec, trial_in_progress.environment)
        )

    def _kept(self, trial_in_progress: "TrialInProgress") -> Path | None:
        if self.weights is None or trial_in_progress.spec.kind != "training":
            return None
        return self.weights / name_of(trial_in_progress.environment) / f"{stem_of(trial_in_progress.spec)}.pt"

    def _run_epochs(self, session: Session, trial_in_progress: "TrialInProgress", count: int) -> None:
        resumed = session.resume()
        trial_in_progress.facts = self._known(session, resumed.facts)
        trial_in_progress.epochs += resumed.epochs
        trial_in_progress.readings += unwatched(len(resumed.epochs))
        while len(trial_in_progress.epochs) < count and not (
            trial_in_progress.epochs and trial_in_progress.epochs[-1].diverged
        ):
            number = len(trial_in_progress.epochs) + 1

            def on_progress(done: float, number: int = number) -> None:
                self.listener.phase(f"epoch {number} of {count}", 0.05 + 0.95 * (number - 1 + done) / count)

            on_progress(0.0)
            with self.telemetry.watch(trial_in_progress.gpus) as watch:
                trial_in_progress.epochs.append(session.run_epoch(on_progress))
            trial_in_progress.readings.append(watch.reading)

    def _known(self, session: Session, facts: Facts) -> Facts:
        return facts.model_copy(update={"ready_seconds": session.ready_seconds, "data_note": self.data_note})

    def _run_blocks(self, session: Session, trial_in_progress: "TrialInProgress") -> None:
        self.listener.phase("warming up", 0.1)
        trial_in_progress.facts = self._known(session, session.warm_up())
        self._time_blocks(session, trial_in_progress)
        self.measure_energy(session, trial_in_progress, _STRETCH_SECONDS)

    def _time_blocks(self, session: Session, trial_in_progress: "TrialInProgress") -> None:
        protocol, blocks, timed = trial_in_progress.spec.protocol, trial_in_progress.blocks, 0.0

        def goes_on() -> bool:
            is_late = timed > protocol.max_seconds and len(blocks) >= protocol.min_blocks
            return len(blocks) < protocol.num_blocks and not is_late

        lead_in(session, protocol)
        while goes_on():
            share = max(len(blocks) / protocol.num_blocks, min(1.0, timed / protocol.max_seconds))
            self.listener.phase("timing", 0.3 + 0.7 * share)
            try:
                with self.telemetry.watch(trial_in_progress.gpus) as watch:
                    blocks.append(session.run_block())
                    timed += blocks[-1].seconds
                    if goes_on():
                        lead_in(session, protocol)  # before the last look at the GPU, which takes milliseconds
            finally:
                if len(blocks) > len(trial_in_progress.readings):
                    trial_in_progress.readings.append(watch.reading)

    def measure_energy(self, session: Session, trial_in_progress: "TrialInProgress", seconds: float) -> None:
        """Let a trial's steps run at a stretch, after its last block, and note what they took; nothing on a CPU."""
        if not self.telemetry.has_counter(trial_in_progress.gpus):
            return
        self.listener.phase("metering", 1.0)
        with self.telemetry.meter(trial_in_progress.gpus) as meter:
            stretch = session.run_sustained(seconds)
        step_seconds = stretch.seconds / stretch.num_steps
        trial_in_progress.energy_measurement = meter.metered.model_copy(update={"step_seconds": step_seconds})


def lead_in(session: Session, protocol: MeasurementProtocol) -> None:
    """Launch the steps that lead to a trial's next block, if any do."""
    if protocol.lead_in_seconds:
        session.lead_in()


class TrialInProgress:
    """One trial as far as it got: what was learned before a failure stands in the record too."""

    def __init__(self, spec: TrialSpec, environment: Environment) -> None:
        self.spec = spec
        self.environment = environment
        self.facts: Facts | None = None
        self.blocks: list[Block] = []
        self.epochs: list[Epoch] = []
        self.samples: tuple[RankSamples, ...] = ()
        self.failure: TrialFailedError | None = None
        self.readings: list[TelemetrySummary] = []
        self.gpu_facts: GpuFacts | None = None
        self.energy_measurement: EnergyMeasurement | None = None
        self._started_at = datetime.now(UTC).isoformat(timespec="milliseconds")

    @property
    def gpus(self) -> dict[str, str]:
        """Return the UUIDs of the GPUs that it runs on, by torch's names for them; none on a CPU."""
        return self.environment.gpus_of(self.spec)

    def record(self, duration_seconds: float) -> Trial:
        """Return the trial's record.

        Raises:
            UsageError: castwise refused the user's own model: a mistake in it, and no trial's result.
        """
        if self.spec.user_model is not None and self.failure is not None and self.failure.refused:
            raise UsageError(self.failure.message, self.failure.log)
        samples = self.samples
        if not samples and (self.blocks or self.epochs):
            samples = (RankSamples(blocks=tuple(self.blocks), epochs=tuple(self.epochs)),)
        trial = Trial(
            spec=self.spec,
            status="ok",
            facts=self.facts,
            ranks=samples,
            environment=self.environment,
            started_at=self._started_at,
            duration_seconds=duration_seconds,
            readings=tuple(self.readings),
            gpu_facts=self.gpu_facts,
            energy_measurement=self.energy_measurement,
            telemetry_note=note_of(self.readings, self.gpu_facts, self.energy_measurement),
        )
        if self.failure is None:
            return status_of(trial)
        update = {
            "status": self.failure.status,
            "message": self.failure.message,
            "log": self.failure.log,
            "shortfall": self.failure.shortfall,
        }
        return trial.model_copy(update=update)

    def refuse(self, reason: str) -> Trial:
        """Return the record of a trial that was not even started."""
        self.failure = TrialFailedError("unsupported", reason)
        return self.record(0.0)


def unsupported_reason(spec: TrialSpec, environment: Environment) -> str | None:
    """Return why a machine cannot run a spec: a technique does not apply, or GPUs are too few; else None."""
    return why_unsupported(spec, environment.capability) or _why_too_few(spec, environment)


def _why_too_few(spec: TrialSpec, environment: Environment) -> str | None:
    first = spec.device.partition(":")[2]
    if spec.device_type == "cpu" or spec.world_size == 1:
        return None
    if int(first or 0) + spec.world_size <= environment.num_gpus:
        return None
    start = f" from {spec.device} on" if int(first or 0) else ""
    return f"{spec.world_size} GPUs are asked for{start}, and this machine has {environment.num_gpus}"


def status_of(trial: Trial) -> Trial:
    """Return the trial, marked `diverged` where its last loss is not a finite number, or its run was given up."""
    blocks, epochs = trial.ranks[0].blocks, trial.ranks[0].epochs
    if epochs:
        message = epochs[-1].diverged
        return trial.model_copy(update={"status": "diverged", "message": message}) if message else trial
    last = blocks[-1]
    steps = sum(block.all_steps for block in blocks)
    if math.isfinite(last.loss):
        if sum(block.skipped_steps for block in blocks) < steps:
            return trial
        message = f"loss scaling skipped every one of {steps} steps after warm-up: the optimizer never ran"
        return trial.model_copy(update={"status": "diverged", "message": message})
    message = f"the loss was {last.loss} {steps} steps after warm-up; times were taken on such numbers"
    if last.loss_scale is not None and is_dynamic(trial.spec.loss_scale):
        message += f" (loss scale {last.loss_scale:g}: not a skipped step here and there, the loss itself broke)"
    return trial.model_copy(update={"status": "diverged", "message": message})
