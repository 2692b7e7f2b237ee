"""Steady-state training steps: set up once, warm up, then time blocks of steps as often as asked."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from castwise.records.schema import Block, Facts, RankSamples
from castwise.registry.techniques import compiles, times_kernels
from castwise.registry.workloads import find_workload
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.worker.build import build_trial
from castwise.worker.data.sharding import rank_batches
from castwise.worker.device_lock import device_lock
from castwise.worker.distributed import Peers, devices_of
from castwise.worker.memory import memory_meter
from castwise.worker.memory_breakdown import profile_memory
from castwise.worker.models.task import Batch
from castwise.worker.pytree import tree_tensors
from castwise.worker.timing import stopwatch_of
from castwise.worker.user_model.side_effects import SideEffectWatch

# Warm-up ends when this many windows in a row agree within this much, and the allocator has not grown in them.
# Source: chosen here.
_SETTLED_WINDOWS = 3
_SETTLED_SPREAD = 0.02
_WINDOW_SECONDS = 0.1
# Where the step time is known from earlier processes, this many windows of half that length must agree with it.
_KNOWN_WINDOWS = 2
_KNOWN_WINDOW_SECONDS = _WINDOW_SECONDS / 2
# Steps of the optimizer after which memory is that of any later step; and steps after which nobody waits for them:
# Apex's dynamic scale starts at 2^32 and halves with every skipped step.
_STEPS_TAKEN, _MOST_SKIPPED = 2, 40
_ROUNDING = 0.01  # of a launch
# Steps that take longer are not worth running for the sake of the pause before a block, which was seen to be worth 3 ms
# of one at the most. Source: benchmarks/records/pauses, of an H200 at its power limit.
_LONGEST_LEAD_SECONDS = 1.0


class SteadyRun:
    """A cell in its own process: everything between "set up" and "finish"."""

    def __init__(self, spec: TrialSpec, data_dir: Path | None, peers: Peers | None = None) -> None:
        """Build the model, its data and its optimizer in the spec's precision.

        Args:
            spec: What to run.
            data_dir: Where real data lies; None for synthetic data.
            peers: The processes that share its steps; None where there are no others.
        """
        started = time.perf_counter()
        self._stack = ExitStack()
        self._spec, self._peers = spec, peers or Peers()
        self._device = torch.device(spec.device)
        self._memory = memory_meter(*devices_of(spec))
        self._stopwatch = stopwatch_of(self._device)
        self._memory.reset_peak()  # what the process held before is not the trial's
        if spec.memory_limit_bytes is not None:
            self._memory.set_limit(spec.memory_limit_bytes)
        try:
            self._facts = self._set_up(data_dir)
        except BaseException:
            self._stack.close()
            raise
        self._facts = self._facts.model_copy(update={"set_up_seconds": time.perf_counter() - started})
        self._blocks: list[Block] = []
        self._next_batch = 0
        self._steps_per_block = 1
        self._steps_to_lead = self._led = 0  # how many steps lead to a block; and how many just did
        self._warm_up_peak: int | None = None
        self._windows: list[float] = []
        self._reserved: list[int] = []
        self._warm_up_steps = 0
        self._take_first_step()

    def _set_up(self, data_dir: Path | None) -> Facts:
        spec, row = self._spec, find_workload(self._spec.workload)
        cell = build_trial(spec, self._stack, self._peers, data_dir)
        self._step = cell.step
        self._batches = rank_batches(row, cell.task, spec, row.resident_batches, self._peers)
        if cell.prepare is not None:
            self._batches = [cell.prepare(batch) for batch in self._batches]
        self._watch = SideEffectWatch(self._memory) if spec.user_model is not None else None
        return cell.facts.model_copy(update={"data_bytes": _num_bytes(self._batches)})

    def _take_first_step(self) -> None:
        """Run the first step: libraries are loaded, algorithms searched, code compiled, which may take a second step.

        It belongs to set-up, which cells that take turns do side by side: most of it is the host's work.
        """
        started, names = time.perf_counter(), self._spec.techniques
        try:
            alone = times_kernels(names) and self._spec.may_hold_device_alone
            with device_lock(alone=alone, compiles=compiles(names)) as turn:
                for _ in range(self._step.steps_to_compile):
                    self._run_window(1)
        except BaseException:
            self._stack.close()
            raise
        seconds = _since(started) - turn.waited_seconds
        self._facts = self._facts.model_copy(update={"first_step_seconds": seconds})

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        """Run steps until their time has settled, and return what is now known of the cell.

        Args:
            step_seconds: What earlier processes of the same cell took for a step. Steps that take as long have settled,
                but where some of them come before a graph is captured.
        """
        if self._step.graph is not None:
            step_seconds = None
        protocol, started, first = self._spec.protocol, time.perf_counter(), len(self._windows)
        while True:
            as_known = 0 if step_seconds is None else _num_alike(self._windows[first:], step_seconds)
            is_known = as_known >= _KNOWN_WINDOWS and len(set(self._reserved[-_KNOWN_WINDOWS:])) == 1
            window_steps = _WINDOW_SECONDS / self._windows[-1]
            if step_seconds is not None and (as_known or len(self._windows) == first):
                window_steps = _KNOWN_WINDOW_SECONDS / step_seconds
            # Rank 0's clock and allocator decide for all.
            num_steps, is_long_enough, settled, time_is_up = self._peers.broadcast_object(
                (
                    self._whole_launches(window_steps),
                    (is_known or self._warm_up_steps >= protocol.warm_up_steps) and self._has_all_memory(),
                    is_known or _has_settled(self._windows, self._reserved),
                    _since(started) >= protocol.warm_up_seconds,
                )
            )
            if is_long_enough and (settled or time_is_up):
                break
            self._run_window(num_steps)
        self._steps_per_block = self._peers.broadcast_object(
            self._whole_launches(protocol.block_seconds / self._windows[-1])
        )
        self._steps_to_lead = self._peers.broadcast_object(self._lead_of(protocol))
        graph = self._step.graph
        self._warm_up_peak = self._step.peak_allocated_ever(self._memory.peak_allocated())
        self._memory.reset_peak()
        self._skipped_before = self._step.scaling.skipped_steps
        update = {
            "warm_up_seconds": _since(started),
            "warm_up_steps": self._warm_up_steps,
            "capture_seconds": graph.captures.seconds if graph else None,
            "settled": settled,
            "averaged_by": self._step.averaged_by,
        }
        if self._watch is not None:
            self._watch.start()
        self._facts = self._facts.model_copy(update=update)
        return self._facts

    def _whole_launches(self, steps: float) -> int:
        """Return a number of steps near this one, at least one, none of which waits for steps of the next block."""
        at_once = self._step.steps_per_launch
        return max(1, round(steps / at_once)) * at_once

    def _lead_of(self, protocol: MeasurementProtocol) -> int:
        """Return how many steps lead to each block."""
        at_once = self._step.steps_per_launch
        launch_seconds = at_once * self._windows[-1]
        if not protocol.lead_in_seconds or launch_seconds > _LONGEST_LEAD_SECONDS:
            return 0
        return at_once * math.ceil(protocol.lead_in_seconds / launch_seconds - _ROUNDING)

    def _has_all_memory(self) -> bool:
        """Return whether the steps so far held all that later ones do, where the trial is about memory.

        A step that loss scaling skips leaves the optimizer without its state: there must be one that it took, and one
        after that.
        """
        if not self._spec.protocol.memory_parts or self._warm_up_steps >= _MOST_SKIPPED:
            return True
        return self._warm_up_steps - self._step.scaling.skipped_steps >= _STEPS_TAKEN

    def _run_window(self, steps: int) -> None:
        seconds = self._time_steps(steps)[0]
        self._warm_up_steps += steps
        self._windows.append(seconds / steps)
        self._reserved.append(self._memory.reserved())

    def lead_in(self) -> None:
        """Launch the steps that lead to the next block, and do not wait for them.

        What is done meanwhile is no rest of the device's, behind which its clock is another than in the midst of steps.
        """
        if self._steps_to_lead:
            self._steps_into([], self._steps_to_lead)()
            self._led += self._steps_to_lead

    def run_block(self, length: int = 1) -> Block:
        """Time one block of steps, so many times as long as usual; right behind those that lead to it, if any do."""
        num_steps, led = length * self._steps_per_block, self._led
        self._led = 0
        seconds, loss = self._time_steps(num_steps, rested=not led)
        skipped = self._step.scaling.skipped_steps
        block = Block(
            seconds=seconds,
            num_steps=num_steps,
            lead_in_steps=led,
            loss=loss.item(),
            loss_scale=self._step.scaling.read_scale(),
            skipped_steps=skipped - self._skipped_before,
        )
        self._skipped_before = skipped
        self._blocks.append(block)
        if self._watch is not None:
            self._watch.record_block(block)
        return block

    def run_sustained(self, seconds: float) -> Block:
        """Run steps for so many seconds at a stretch; return them as a block, which is not among the samples."""
        last = self._blocks[-1]
        steps = seconds * last.num_steps / last.seconds
        at_once = self._step.steps_per_launch
        # At the least: a step or two of half a second are no more ticks of the energy counter than asked for.
        count = self._peers.broadcast_object(at_once * math.ceil(steps / at_once - _ROUNDING))
        taken, loss = self._time_steps(count)
        return Block(seconds=taken, num_steps=count, loss=loss.item())

    def finish(self) -> RankSamples:
        """Return everything measured and restore the process's numeric state."""
        samples = RankSamples(
            blocks=tuple(self._blocks),
            peak_allocated_bytes=self._step.peak_allocated(self._memory.peak_allocated()),
            peak_reserved_bytes=self._step.peak_reserved(self._memory.peak_reserved()),
            warm_up_peak_allocated_bytes=self._warm_up_peak,
            notes=() if self._watch is None else self._watch.notes(),
        )
        if self._spec.protocol.memory_parts:  # last: it is a step as no other
            parts = profile_memory(self._spec, self._step, self._batches, self._memory)
            samples = samples.model_copy(update={"memory_parts": parts})
        self._stack.close()
        return samples

    def _time_steps(self, count: int, *, rested: bool = True) -> tuple[float, Tensor]:
        losses: list[Tensor] = []
        self._peers.barrier()  # what one rank waits for another at the start is not the steps' time
        seconds = self._stopwatch.time(self._steps_into(losses, count), rested=rested)
        self._memory.check()
        return seconds, losses[-1]

    def _steps_into(self, losses: list[Tensor], count: int) -> Callable[[], None]:
        step, batches, first = self._step, self._batches, self._next_batch
        self._next_batch = (first + count) % len(batches)

        def work() -> None:
            for index in range(first, first + count):
                loss = step(batches[index % len(batches)])
            step.flush()
            losses.append(loss)

        return work


def _num_bytes(batches: Sequence[Batch]) -> int:
    """Return the memory of all batches; views of one tensor share theirs."""
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in tree_tensors(batches)}
    return sum(storages.values())


def _has_settled(windows: list[float], reserved: list[int]) -> bool:
    if len(windows) <= _SETTLED_WINDOWS:  # the first window holds library loading and cuDNN's choices
        return False
    last = windows[-_SETTLED_WINDOWS:]
    return max(last) / min(last) - 1 <= _SETTLED_SPREAD and len(set(reserved[-_SETTLED_WINDOWS:])) == 1


def _num_alike(windows: Sequence[float], step_seconds: float) -> int:
    """Return how many windows, from the last one back, had steps that took as long as those of earlier processes."""
    alike = itertools.takewhile(lambda each: abs(each / step_seconds - 1) <= _SETTLED_SPREAD, reversed(windows))
    return sum(1 for _ in alike)


def _since(start: float) -> float:
    return time.perf_counter() - start
