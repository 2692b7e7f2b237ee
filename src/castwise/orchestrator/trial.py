"""What is told of a trial while it runs, whether a machine can run it, and whether it diverged."""

import math
from typing import Protocol

from castwise.records.schema import Environment, Trial
from castwise.registry.techniques import why_unsupported
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.trial import TrialSpec


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
    """Passes progress on when the number of trials is not known beforehand; remarks only if they are wanted."""

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
