"""A whole training run, one epoch at a time: real data, a schedule, validation, divergence, checkpoints."""

import itertools
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from castwise.apply.hardware import synchronize
from castwise.apply.pytree import Batch
from castwise.errors import UsageError
from castwise.records.schema import Epoch, RankSamples
from castwise.registry.datasets import imitated_data_set
from castwise.registry.techniques import step_config_of
from castwise.registry.workloads import find_workload
from castwise.spec.quantities import format_share
from castwise.spec.trial import TrialSpec
from castwise.trial import checkpoint as checkpoints
from castwise.trial.build import build_trial
from castwise.trial.data.training_data import BatchSource, make_training_data
from castwise.trial.distributed import Peers, devices_of
from castwise.trial.lr_schedules import make_run_scheduler
from castwise.trial.memory import memory_meter, without_storage

OnProgress = Callable[[float], None]

# A classifier that is at most this many times as good as guessing, after an epoch or more, has not learned.
_CHANCE_MARGIN = 1.1
# Several ranks compare after this many steps whether their losses have diverged: it costs a collective.
_COMPARE_EVERY = 50
# Non-finite losses in a row before a run is given up: a dynamic loss scale may produce a few at its start.
_MAX_NON_FINITE = 20
_NUM_KEPT_LOSSES = 100  # of an epoch, evenly; enough for a curve
_REPORT_SECONDS = 1.0


class TrainingRun:
    """A training trial in its own process: everything between `set_up` and `finish`."""

    def __init__(
        self, spec: TrialSpec, data_dir: Path | None, checkpoint: Path | None = None, peers: Peers | None = None
    ) -> None:
        """Build model, data and optimizer, and resume from a checkpoint if there is one.

        A spec on synthetic data needs no `data_dir`. Rank 0 writes the checkpoint after every epoch.
        """
        assert spec.recipe is not None, "a training trial has a recipe"
        started = time.perf_counter()
        self._spec, self._checkpoint = spec, checkpoint
        self._recipe = step_config_of(spec.techniques).recipe(spec.recipe)
        self._peers = peers or Peers()
        self._device = torch.device(spec.device)
        self.epochs: tuple[Epoch, ...] = ()  # that are done, those before a checkpoint included
        self._memory_samples: RankSamples | None = None  # before a validation that is not part of the run
        with ExitStack() as stack:
            self._memory = memory_meter(*devices_of(spec))
            setup = build_trial(spec, stack, self._peers)
            self._task, self._step = setup.task, setup.step
            self._training, self._validation = make_training_data(
                find_workload(spec.workload),
                self._task,
                spec.model_copy(update={"recipe": self._recipe}),
                data_dir,
                self._peers,
                setup.prepare,
            )
            self._step.make_batches_by(self._training.make)
            whole = self._training.num_batches
            self._steps_per_epoch = min(whole, self._recipe.max_steps or whole)
            self._scheduler = make_run_scheduler(self._recipe, self._step.optimizer, whole)
            self._memory.reset_peak()
            if checkpoint is not None and self._peers.broadcast_object(checkpoint.is_file()):
                self._load(checkpoint)
            self._stack = stack.pop_all()
        self.facts = setup.facts.model_copy(update={"set_up_seconds": time.perf_counter() - started})

    @property
    def model(self) -> nn.Module:
        return self._step.model

    def run_epoch(self, on_progress: OnProgress | None = None) -> Epoch:
        """Train one epoch, validate, and write the checkpoint that the next starts from.

        `on_progress` receives the share of the epoch that is done, about once a second.
        """
        epoch = self._train(on_progress)
        self._step.share_statistics()  # in all ranks, even if only some validate
        is_last = len(self.epochs) + 1 >= self._recipe.num_epochs
        if self._validation is not None and epoch.diverged is None:
            if self._recipe.validate_each_epoch:
                epoch = self._validate(self._validation, epoch, on_progress)
            elif is_last:  # not part of the run: neither of its time, nor of its memory, nor of its outcome
                self._memory_samples = self._read_memory()
                validated = self._validate(self._validation, epoch, on_progress)
                epoch = validated.model_copy(update={"validation_seconds": 0.0, "diverged": None})
        if self._task.validate is not None and epoch.diverged is None:
            epoch = self._validate_own(self._task.validate, epoch)
        # Each rank has losses of its own; decisions by them must be the same in all ranks.
        validation_loss, diverged = self._peers.broadcast_object((epoch.validation_loss, epoch.diverged))
        epoch = epoch.model_copy(update={"diverged": diverged})
        self._scheduler.after_epoch(validation_loss)
        self.epochs += (epoch,)
        if self._checkpoint is not None and epoch.diverged is None and not is_last:
            self._save(self._checkpoint)
        return epoch

    def keep_weights(self, path: Path) -> None:
        """Write the model's state dict, on the CPU; if that fails there is no file, and the log says why."""
        if self._peers.rank == 0:
            with suppress(OSError):  # an older run's must not pass for these
                path.unlink(missing_ok=True)
            checkpoints.save(path, {name: tensor.cpu() for name, tensor in self.model.state_dict().items()})

    def finish(self) -> RankSamples:
        """Return everything measured, restore the numeric state and drop the checkpoint."""
        samples = (self._memory_samples or self._read_memory()).model_copy(update={"epochs": self.epochs})
        self.close()  # after reading the memory: it frees a CUDA graph, whose memory counts too
        if self._checkpoint is not None and self._peers.rank == 0:
            self._checkpoint.unlink(missing_ok=True)
        return samples

    def _read_memory(self) -> RankSamples:
        return RankSamples(
            peak_allocated_bytes=self._step.peak_allocated(self._memory.peak_allocated(), ever=True),
            peak_reserved_bytes=self._step.peak_reserved(self._memory.peak_reserved(), ever=True),
            driver_used_bytes=self._memory.driver_used(),
        )

    def close(self) -> None:
        self._stack.close()

    def _train(self, on_progress: OnProgress | None) -> Epoch:
        recipe, batch_size = self._recipe, self._spec.process_batch_size
        self._step.model.train()
        self._task.begin_epoch()
        skipped_before = self._step.scaling.skipped_steps
        steps = EpochSteps(recipe.read_loss_every_step, self._steps_per_epoch)
        heartbeat = _Heartbeat(on_progress, self._steps_per_epoch)
        counted_from, first_step = 0.0, None
        self._synchronize()
        started = time.perf_counter()
        data_seconds, placing_seconds = 0.0, 0.0
        batches = self._training.read(len(self.epochs))
        for index in itertools.count():
            reading = time.perf_counter()
            read = next(batches, None)
            data_seconds += time.perf_counter() - reading
            if read is None and index == 0:
                raise UsageError(
                    f"The training set gave no batches in epoch {len(self.epochs) + 1}. It must give them in every "
                    "epoch, as a DataLoader or a list does and an iterator does not."
                )
            if read is None:
                break
            placing = time.perf_counter()
            batch = self._training.place(read)
            placing_seconds += time.perf_counter() - placing
            if index == recipe.skip_batches > 0:
                self._synchronize()  # what is queued belongs to the batches that are not counted
                counted_from = time.perf_counter() - started
            step_started = time.perf_counter()
            count = batch_size if self._task.training_set is not None else batch_size_of(batch, batch_size)
            steps.add(index, self._step(batch), count)
            self._scheduler.after_step()
            if index == 0 and not self.epochs:
                self._synchronize()  # once a run
                first_step = time.perf_counter() - step_started
            heartbeat.done(index + 1)
            if index + 1 == self._steps_per_epoch or self._has_diverged(steps):
                break
        self._synchronize()
        seconds = time.perf_counter() - started
        losses = steps.read_losses()
        return Epoch(
            seconds=seconds,
            data_seconds=data_seconds,
            placing_seconds=placing_seconds,
            first_step_seconds=first_step,
            num_steps=steps.num_steps,
            num_samples=steps.num_samples,
            counted_seconds=seconds - counted_from,
            counted_samples=max(0, steps.num_samples - recipe.skip_batches * batch_size),
            losses=losses,
            learning_rate=float(self._step.optimizer.param_groups[0]["lr"]),
            loss_scale=self._step.scaling.read_scale(),
            skipped_steps=self._step.scaling.skipped_steps - skipped_before,
            shortened=self._steps_per_epoch < self._training.num_batches,
            diverged=why_diverged(losses, steps.num_steps),
        )

    def _has_diverged(self, steps: "EpochSteps") -> bool:
        """Return whether the losses of rank 0 have diverged, which ends the epoch in all ranks."""
        if self._peers.world_size == 1:
            return steps.have_diverged
        is_compared = self._recipe.read_loss_every_step and steps.num_steps % _COMPARE_EVERY == 0
        return is_compared and self._peers.broadcast_object(steps.have_diverged)

    @torch.no_grad()
    def _validate(self, source: BatchSource, epoch: Epoch, on_progress: OnProgress | None) -> Epoch:
        judge = self._task.evaluate_batch
        assert judge is not None, "a recipe that validates needs a workload that judges"
        self._step.model.eval()
        self._task.begin_epoch()
        started = time.perf_counter()
        loss, count, is_classifier = torch.zeros((), device=self._device), 0, False
        right = torch.zeros((), dtype=torch.int64, device=self._device)
        heartbeat = _Heartbeat(on_progress, source.num_batches)
        for index, batch in enumerate(source.start(0)):
            heartbeat.done(index)
            with self._step.uncompiled(), self._step.autocast():
                batch_loss, batch_right, batch_count = judge(self._step.model, batch)
            loss += batch_loss.float()
            count += batch_count
            if batch_right is not None:
                right += batch_right
                is_classifier = True
        accuracy = int(right) / count if is_classifier else None
        update: dict[str, Any] = {
            "validation_loss": float(loss) / count,
            "accuracy": accuracy,
            "validation_seconds": time.perf_counter() - started,
        }
        # A few steps teach little, and random samples nothing.
        must_learn = not self._recipe.max_steps and imitated_data_set(self._spec.data_set) is None
        num_classes = self._task.num_classes if must_learn else None
        if accuracy is not None and num_classes is not None and accuracy <= _CHANCE_MARGIN / num_classes:
            update["diverged"] = (
                f"after epoch {len(self.epochs) + 1} the accuracy was {format_share(accuracy)}, no better than chance"
            )
        return epoch.model_copy(update=update)

    @torch.no_grad()
    def _validate_own(self, validate: Callable[[nn.Module], float], epoch: Epoch) -> Epoch:
        self._step.model.eval()
        self._task.begin_epoch()
        started = time.perf_counter()
        with self._step.uncompiled(), self._step.autocast():
            returned = validate(self._step.model)
        try:
            score = float(returned)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"validate of {self._spec.workload} returned {type(returned).__name__}, not a number: return the score."
            ) from None
        update: dict[str, Any] = {"score": score, "validation_seconds": time.perf_counter() - started}
        if not math.isfinite(score):
            update["diverged"] = f"after epoch {len(self.epochs) + 1} the score was {score}"
        return epoch.model_copy(update=update)

    def _synchronize(self) -> None:
        self._step.flush()
        synchronize(self._device)

    @property
    def _question(self) -> str:
        """Return the spec that a checkpoint must be of, without what does not matter or differs between ranks."""
        return self._spec.model_dump_json(exclude={"device", "protocol"})

    def _save(self, path: Path) -> None:
        own = {
            "epochs": [epoch.model_dump_json() for epoch in self.epochs],
            "random": checkpoints.random_state(self._device),
        }
        ranks = self._peers.gather_objects(own)
        if self._peers.rank == 0:
            state = {
                "question": self._question,
                "step": self._step.state_dict(),
                "scheduler": self._scheduler.state_dict(),
                "ranks": ranks,
            }
            checkpoints.save(path, state)  # if that fails, the last one stays, and the next epoch tries again
        self._peers.barrier()

    def _load(self, path: Path) -> None:
        state = checkpoints.load(path, self._device, self._question)
        if not self._peers.broadcast_object(state is not None) or state is None:
            return
        own = state["ranks"][self._peers.rank]
        self._step.load_state_dict(state["step"])
        self._scheduler.load_state_dict(state["scheduler"])
        self.epochs = tuple(Epoch.model_validate_json(text) for text in own["epochs"])
        checkpoints.restore_random_state(own["random"], self._device)
        self._peers.barrier()  # the next one is not written before all ranks have read this one


class _Heartbeat:
    """Reports the share of steps that is done about once a second, so that the parent knows that this process lives."""

    def __init__(self, on_progress: OnProgress | None, total: int) -> None:
        self._on_progress = on_progress
        self._total = max(1, total)
        self._reported = time.perf_counter()

    def done(self, steps: int) -> None:
        now = time.perf_counter()
        if self._on_progress is not None and now - self._reported > _REPORT_SECONDS:
            self._reported = now
            self._on_progress(min(1.0, steps / self._total))


class EpochSteps:
    """The steps of an epoch: their number and samples, some of their losses and the last."""

    def __init__(self, read_every_loss: bool, expected_steps: int) -> None:
        self._read_every_loss = read_every_loss
        self._keep_every = max(1, expected_steps // _NUM_KEPT_LOSSES)
        self._kept: dict[int, Tensor | float] = {}
        self._last: tuple[int, Tensor | float] = (0, math.nan)
        self._num_non_finite = 0
        self.num_steps = self.num_samples = 0

    def add(self, index: int, loss: Tensor, num_samples: int) -> None:
        self.num_steps += 1
        self.num_samples += num_samples
        value: Tensor | float = without_storage(loss)
        if self._read_every_loss:
            value = loss.item()  # a synchronisation, as in the published loop
            self._num_non_finite = 0 if math.isfinite(value) else self._num_non_finite + 1
        self._last = (index, value)
        if index % self._keep_every == 0:
            self._kept[index] = value

    @property
    def have_diverged(self) -> bool:
        """Return whether too many losses in a row were not finite, as far as they were read."""
        return self._num_non_finite >= _MAX_NON_FINITE

    def read_losses(self) -> tuple[tuple[int, float], ...]:
        """Return the kept losses and the last, each with its step's index, read from the device."""
        return tuple((index, float(value)) for index, value in sorted((self._kept | dict([self._last])).items()))


def why_diverged(losses: tuple[tuple[int, float], ...], num_steps: int) -> str | None:
    """Return why an epoch with these losses diverged, or None if its last loss is finite."""
    index, last = losses[-1]
    if math.isfinite(last):
        return None
    first = next((step for step, loss in losses if not math.isfinite(loss)), index)
    return f"the loss was {last} at step {num_steps} of the epoch (seen first at step {first + 1})"


def batch_size_of(batch: Batch, nominal: int) -> int:
    """Return the samples of a batch, of which the last may be short; a language model's are columns, not rows."""
    first = batch[0]
    is_text = first.dim() == 2 and not first.is_floating_point()
    return first.shape[1] if is_text else min(nominal, first.shape[0])
