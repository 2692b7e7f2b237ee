"""A whole training run, an epoch at a time: real data, a schedule, validation, divergence, and going on later."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from castwise.measure.data.feeds import Feed, make_feeds
from castwise.measure.memory import memory_of
from castwise.measure.precision import autocast, numeric_state
from castwise.measure.schedules import make_run_scheduler
from castwise.measure.training_step import TrainingStep, describe
from castwise.measure.workloads import build_task
from castwise.measure.workloads.task import Batch
from castwise.plan import TrialSpec
from castwise.precisions import find_precision
from castwise.record import Epoch, Facts, RankSamples
from castwise.workloads import OptimizerSpec, find_workload

# Losses in a row that are no number before a run is given up: a dynamic loss scale may see a few at its start.
_HOPELESS_LOSSES = 20
# A classifier this little better than guessing, after an epoch or more, has not learned or has lost what it had.
_CHANCE_MARGIN = 1.1
_KEPT_LOSSES = 100  # of an epoch, evenly; enough for a curve


class TrainingRun:
    """A training trial in its own process: everything between "set up" and "finish"."""

    def __init__(self, spec: TrialSpec, data_dir: Path | None, checkpoint: Path | None = None) -> None:
        """Build model, data and optimizer, and go on from a checkpoint where there is one.

        Args:
            spec: What to run; it has a recipe.
            data_dir: Where real data lies; None for synthetic data.
            checkpoint: Written after every epoch and read at the start; None keeps none.
        """
        assert spec.recipe is not None, "a training trial has a recipe"
        started = time.perf_counter()
        self._spec, self._recipe, self._checkpoint = spec, spec.recipe, checkpoint
        self._device = torch.device(spec.device)
        self._epochs: list[Epoch] = []
        with ExitStack() as stack:
            facts = self._set_up(stack, data_dir)
            self._stack = stack.pop_all()
        self.facts = facts.model_copy(update={"set_up_seconds": time.perf_counter() - started})

    def _set_up(self, stack: ExitStack, data_dir: Path | None) -> Facts:
        spec, recipe, row = self._spec, self._recipe, find_workload(self._spec.workload)
        precision = find_precision(spec.precision)
        stack.enter_context(numeric_state(precision))
        torch.manual_seed(spec.seed)
        self._task = build_task(row)
        optimizer = row.optimizer
        if recipe.optimizer is not None:
            optimizer = OptimizerSpec(recipe.optimizer.name, tuple(recipe.optimizer.arguments.items()))
        optimizer = replace(optimizer, group_rates=recipe.group_rates)
        self._step = TrainingStep(
            self._task,
            precision,
            optimizer,
            loss_scale=spec.loss_scale,
            clip_grad_norm=row.clip_grad_norm,
            device=self._device,
        )
        self._autocast = autocast(precision, self._device.type)
        self._feeds = make_feeds(row, self._task, spec, self._device, data_dir)
        self._steps_per_epoch = min(
            self._feeds.training.num_batches, recipe.max_steps or self._feeds.training.num_batches
        )
        self._scheduler = make_run_scheduler(recipe, self._step.optimizer, self._steps_per_epoch)
        self._memory = memory_of(self._device)
        self._memory.restart()
        if self._checkpoint is not None and self._checkpoint.is_file():
            self._load(self._checkpoint)
        return describe(self._step.model, optimizer, self._task.units_per_sample)

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """Return the epochs done, those before a checkpoint included."""
        return tuple(self._epochs)

    def run_epoch(self) -> Epoch:
        """Train one epoch, validate, and write the checkpoint."""
        epoch = self._train()
        if self._feeds.validation is not None and epoch.diverged is None:
            epoch = self._validate(self._feeds.validation, epoch)
        self._scheduler.after_epoch(epoch.validation_loss)
        self._epochs.append(epoch)
        if self._checkpoint is not None and epoch.diverged is None:
            self._save(self._checkpoint)
        return epoch

    def finish(self) -> RankSamples:
        """Return everything measured, restore the numeric state and drop the checkpoint."""
        self.close()
        if self._checkpoint is not None:
            self._checkpoint.unlink(missing_ok=True)
        return RankSamples(
            epochs=self.epochs,
            peak_allocated_bytes=self._memory.peak_allocated(),
            peak_reserved_bytes=self._memory.peak_reserved(),
            driver_used_bytes=self._memory.driver_used(),
        )

    def close(self) -> None:
        """Restore the process's numeric state."""
        self._stack.close()

    def _train(self) -> Epoch:
        recipe, batch_size = self._recipe, self._spec.batch_size
        self._step.model.train()
        self._task.begin_epoch()
        skipped_before = self._step.scaling.skipped_steps
        pass_ = _Pass(recipe.read_loss_every_step, max(1, self._steps_per_epoch // _KEPT_LOSSES))
        counted_from = 0.0
        batches = _Waiting(self._feeds.training.start(len(self._epochs)))
        self._synchronize()
        started = time.perf_counter()
        for index, batch in enumerate(batches):
            if index == recipe.skip_batches:
                counted_from = time.perf_counter() - started
            pass_.saw(index, self._step(batch), batch_size_of(batch, batch_size))
            self._scheduler.after_step()
            if index + 1 == self._steps_per_epoch or pass_.hopeless:
                break
        self._synchronize()
        seconds = time.perf_counter() - started
        losses = pass_.losses()
        skipped_samples = min(recipe.skip_batches * batch_size, pass_.num_samples)
        return Epoch(
            seconds=seconds,
            data_seconds=batches.seconds,
            num_steps=pass_.num_steps,
            num_samples=pass_.num_samples,
            counted_seconds=seconds - counted_from,
            counted_samples=pass_.num_samples - skipped_samples,
            losses=losses,
            learning_rate=float(self._step.optimizer.param_groups[0]["lr"]),
            loss_scale=self._step.scaling.read_scale(),
            skipped_steps=self._step.scaling.skipped_steps - skipped_before,
            shortened=self._steps_per_epoch < self._feeds.training.num_batches,
            diverged=_why_diverged(losses, pass_.num_steps),
        )

    @torch.no_grad()
    def _validate(self, feed: Feed, epoch: Epoch) -> Epoch:
        judge = self._task.judge
        assert judge is not None, "a recipe that validates needs a workload that judges"
        self._step.model.eval()
        self._task.begin_epoch()
        started = time.perf_counter()
        loss, correct, count, is_classifier = torch.zeros((), device=self._device), 0, 0, False
        right = torch.zeros((), dtype=torch.int64, device=self._device)
        for batch in feed.start(0):
            with self._autocast:
                batch_loss, batch_right, batch_count = judge(self._step.model, batch)
            loss += batch_loss.float()
            count += batch_count
            if batch_right is not None:
                right += batch_right
                is_classifier = True
        correct = int(right)
        accuracy = correct / count if is_classifier else None
        update: dict[str, Any] = {
            "validation_loss": float(loss) / count,
            "accuracy": accuracy,
            "validation_seconds": time.perf_counter() - started,
        }
        if accuracy is not None and self._is_chance(accuracy):
            update["diverged"] = (
                f"after epoch {len(self._epochs) + 1} the accuracy was {accuracy:.1%}, no better than chance"
            )
        return epoch.model_copy(update=update)

    def _is_chance(self, accuracy: float) -> bool:
        num_classes = self._task.num_classes
        return num_classes is not None and accuracy <= _CHANCE_MARGIN / num_classes and not self._recipe.max_steps

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _save(self, path: Path) -> None:
        state = {
            "step": self._step.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "epochs": [epoch.model_dump_json() for epoch in self._epochs],
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)

    def _load(self, path: Path) -> None:
        state = torch.load(path, map_location=self._device, weights_only=True)
        self._step.load_state_dict(state["step"])
        self._scheduler.load_state_dict(state["scheduler"])
        self._epochs = [Epoch.model_validate_json(text) for text in state["epochs"]]
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self._device)


class _Waiting:
    """An iterator that adds up the host's time in `next`."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> "_Waiting":
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.seconds += time.perf_counter() - started


class _Pass:
    """Counts and losses of one pass over the training data."""

    def __init__(self, read_every_step: bool, keep_every: int) -> None:
        self._read_every_step = read_every_step
        self._keep_every = keep_every
        self._kept: dict[int, Tensor | float] = {}
        self._last: tuple[int, Tensor | float] = (0, math.nan)
        self._broken_in_a_row = 0
        self.num_steps = self.num_samples = 0

    def saw(self, index: int, loss: Tensor, num_samples: int) -> None:
        """Take note of a step."""
        self.num_steps += 1
        self.num_samples += num_samples
        value: Tensor | float = loss.detach()
        if self._read_every_step:
            value = loss.item()  # the synchronisation that the source's loop has
            self._broken_in_a_row = 0 if math.isfinite(value) else self._broken_in_a_row + 1
        self._last = (index, value)
        if index % self._keep_every == 0:
            self._kept[index] = value

    @property
    def hopeless(self) -> bool:
        """Return whether the losses say that going on is useless."""
        return self._broken_in_a_row >= _HOPELESS_LOSSES

    def losses(self) -> tuple[tuple[int, float], ...]:
        """Return the kept losses and the last, read from the device."""
        return tuple((index, float(value)) for index, value in sorted((self._kept | dict([self._last])).items()))


def batch_size_of(batch: Batch, nominal: int) -> int:
    """Return the samples of a batch: a last one may be short; a language model's are columns, not rows."""
    first = batch[0]
    return min(nominal, first.shape[0]) if first.is_floating_point() else first.shape[1]


def _why_diverged(losses: tuple[tuple[int, float], ...], num_steps: int) -> str | None:
    index, last = losses[-1]
    if math.isfinite(last):
        return None
    first_broken = next((step for step, loss in losses if not math.isfinite(loss)), index)
    return f"the loss was {last} at step {num_steps} of the epoch (seen first at step {first_broken + 1})"
