"""Run a plan: one process a trial, every end of it a record, each record stored before the next trial starts."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from castwise.plan import TrialSpec
from castwise.record import Block, Environment, RankSamples, Trial
from castwise.sweep.engine import Engine, Session, TrialFailedError
from castwise.sweep.store import Store

FAILED = ("crashed", "timeout")


class Listener(Protocol):
    """Is told how a sweep goes on."""

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Trial `index` (from 1) of `count` begins."""

    def phase(self, name: str, done: float) -> None:
        """The running trial is in a phase; `done` is its finished share, 0 to 1."""

    def ended(self, trial: Trial) -> None:
        """A trial has its record."""


class Silent:
    """A listener that says nothing."""

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Say nothing."""

    def phase(self, name: str, done: float) -> None:
        """Say nothing."""

    def ended(self, trial: Trial) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Sweep:
    """Where trials are measured, kept and told of.

    Attributes:
        engine: Starts the processes.
        store: Keeps the records; None keeps none.
        environment: The machine, as found before the sweep; stands in a record whose process did not get to say.
        listener: Is told of progress.
    """

    engine: Engine
    store: Store | None
    environment: Environment
    listener: Listener

    def run(self, specs: Sequence[TrialSpec]) -> list[Trial]:
        """Measure each spec and return its trial, in order."""
        trials: list[Trial] = []
        for index, spec in enumerate(specs, start=1):
            self.listener.started(spec, index, len(specs))
            trial = self._run_one(spec)
            if self.store is not None:
                self.store.save(trial)
            trials.append(trial)
            self.listener.ended(trial)
        return trials

    def _run_one(self, spec: TrialSpec) -> Trial:
        started, started_at = time.perf_counter(), datetime.now(UTC).isoformat(timespec="milliseconds")
        record = Trial(
            spec=spec, status="ok", environment=self.environment, started_at=started_at, duration_seconds=0.0
        )
        session = self.engine.start(spec.protocol.timeout_seconds)
        try:
            record = self._measure(session, record)
        except TrialFailedError as failure:
            update = {"status": failure.status, "message": failure.message, "log": failure.log}
            record = record.model_copy(update=update)
        finally:
            session.close()
        return record.model_copy(update={"duration_seconds": time.perf_counter() - started})

    def _measure(self, session: Session, record: Trial) -> Trial:
        spec, listener = record.spec, self.listener
        listener.phase("starting", 0.0)
        environment = session.open(spec.device)
        listener.phase("setting up", 0.02)
        session.set_up(spec)
        listener.phase("warming up", 0.1)
        facts = session.warm_up().model_copy(update={"ready_seconds": session.ready_seconds})
        blocks = self._time_blocks(session, spec)
        samples = session.finish()
        update = {"environment": environment, "facts": facts, "ranks": (samples,)}
        return judge(record.model_copy(update=update), blocks, samples)

    def _time_blocks(self, session: Session, spec: TrialSpec) -> list[Block]:
        protocol, blocks, timed = spec.protocol, list[Block](), 0.0
        while len(blocks) < protocol.num_blocks:
            if timed > protocol.max_seconds and len(blocks) >= protocol.min_blocks:
                break
            share = max(len(blocks) / protocol.num_blocks, min(1.0, timed / protocol.max_seconds))
            self.listener.phase("timing", 0.3 + 0.7 * share)
            blocks.append(session.run_block())
            timed += blocks[-1].seconds
        return blocks


def judge(trial: Trial, blocks: Sequence[Block], samples: RankSamples) -> Trial:
    """Return the trial, marked `diverged` where its last loss is not a finite number."""
    last = blocks[-1]
    if math.isfinite(last.loss):
        return trial
    steps = sum(block.num_steps for block in samples.blocks)
    message = f"the loss was {last.loss} after {steps} timed steps; times were taken on such numbers"
    if last.loss_scale is not None and trial.spec.loss_scale.startswith("dynamic"):
        message += f" (loss scale {last.loss_scale:g}: not a skipped step here and there, the loss itself broke)"
    return trial.model_copy(update={"status": "diverged", "message": message})
