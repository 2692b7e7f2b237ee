"""A trial in progress: its listeners, what was measured so far, and the record that it becomes."""

import math
from datetime import UTC, datetime
from typing import Protocol

from castwise.errors import UsageError
from castwise.orchestrator.session import TrialFailedError
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
from castwise.registry.techniques import why_unsupported
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.trial import TrialSpec
from castwise.telemetry.summary import telemetry_note

FAILED = ("crashed", "timeout")


class Listener(Protocol):
    """Receives the progress of a run."""

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Trial `index` (from 1) of `count` begins; `count` is 0 if the number is not known."""

    def phase(self, name: str, done: float) -> None:
        """The running trial is in a phase; `done` is its finished share, 0 to 1."""

    def ended(self, trial: Trial) -> None:
        """A trial has its record."""

    def remark(self, line: str) -> None:
        """Something is worth a line."""


class NullListener:
    """A listener that does nothing."""

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Do nothing."""

    def phase(self, name: str, done: float) -> None:
        """Do nothing."""

    def ended(self, trial: Trial) -> None:
        """Do nothing."""

    def remark(self, line: str) -> None:
        """Do nothing."""


class UnboundedProgress:
    """Passes progress on when the number of trials is not known beforehand.

    Args:
        listener: Receives it.
        remarks: Whether remarks are passed on.
    """

    def __init__(self, listener: Listener, *, remarks: bool = True) -> None:
        self._listener = listener
        self._remarks = remarks
        self._num_ended = 0
        self.phase = listener.phase

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Pass it on, with an index of its own."""
        del index, count
        self._listener.started(spec, self._num_ended + 1, 0)

    def ended(self, trial: Trial) -> None:
        """Pass it on."""
        self._num_ended += 1
        self._listener.ended(trial)

    def remark(self, line: str) -> None:
        """Pass it on, if remarks are."""
        if self._remarks:
            self._listener.remark(line)


class TrialInProgress:
    """One trial as far as it got: what was measured before a failure is in the record too."""

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
            UsageError: castwise refused the user's model: a mistake in it is not a trial's result.
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
            telemetry_note=telemetry_note(self.readings, self.gpu_facts, self.energy_measurement),
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
    """Return why a machine cannot run a spec (a technique does not apply, or there are too few GPUs), or None."""
    reason = why_unsupported(spec, environment.capability)
    if reason is not None or spec.device_type == "cpu" or spec.world_size == 1:
        return reason
    first = int(spec.device.partition(":")[2] or 0)
    if first + spec.world_size <= environment.num_gpus:
        return None
    start = f" from {spec.device} on" if first else ""
    return f"{spec.world_size} GPUs are asked for{start}, and this machine has {environment.num_gpus}"


def status_of(trial: Trial) -> Trial:
    """Return the trial, marked `diverged` if its last loss is not finite or its training was given up."""
    epochs = trial.ranks[0].epochs
    message = epochs[-1].diverged if epochs else _why_diverged(trial)
    return trial.model_copy(update={"status": "diverged", "message": message}) if message else trial


def _why_diverged(trial: Trial) -> str | None:
    """Return why a steady trial diverged, or None."""
    blocks = trial.ranks[0].blocks
    last = blocks[-1]
    num_steps = sum(block.all_steps for block in blocks)
    if math.isfinite(last.loss):
        if sum(block.skipped_steps for block in blocks) < num_steps:
            return None
        return f"loss scaling skipped every one of {num_steps} steps after warm-up: the optimizer never ran"
    message = f"the loss was {last.loss} {num_steps} steps after warm-up; times were taken on such numbers"
    if last.loss_scale is not None and is_dynamic(trial.spec.loss_scale):
        message += f" (loss scale {last.loss_scale:g}: not a skipped step here and there, the loss itself broke)"
    return message
