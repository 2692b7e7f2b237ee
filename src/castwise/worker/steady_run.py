"""Steady-state training steps: set up once, warm up, then time blocks of steps as often as the parent asks."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
# If the step time is known from earlier processes, this many windows of half that length must agree with it.
_KNOWN_WINDOWS = 2
_KNOWN_WINDOW_SECONDS = _WINDOW_SECONDS / 2
# After this many steps of the optimizer, memory use is that of any later step.
_NUM_OPTIMIZER_STEPS = 2
# After this many steps those are not waited for: Apex's dynamic scale starts at 2^32 and halves with a skipped step.
_MAX_SKIPPED_STEPS = 40
_ROUNDING = 0.01  # of a launch
# Longer steps do not lead in: the pause before a block was seen to change it by 3 ms at most.
# Source: docs/method.md, "At the power limit".
_MAX_LEAD_IN_SECONDS = 1.0


@dataclass(frozen=True)
class _WarmUpState:
    """Whether the warm-up is over, whether the step time has settled, and the steps of the next window."""

    is_over: bool
    has_settled: bool
    next_num_steps: int


class SteadyRun:
    """A steady trial in its own process: everything between `set_up` and `finish`."""

    def __init__(self, spec: TrialSpec, data_dir: Path | None, peers: Peers | None = None) -> None:
        """Build the model, its data and its optimizer in the spec's precision.

        Args:
            spec: What to run.
            data_dir: Where real data lies; None for synthetic data.
            peers: The processes that share its steps; None if there are no others.
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
        self._lead_in_steps = 0  # before each block
        self._num_led_in = 0  # since the last block
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
        """Run the first step, or two: libraries are loaded, algorithms searched, code compiled.

        It belongs to set-up, which interleaved trials do in parallel: most of it is the host's work.
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
        """Run steps until their time has settled, and return what is now known of the trial.

        Args:
            step_seconds: Seconds a step in earlier processes of the same configuration. Steps that take as long have
                settled, unless some of them come before a graph is captured.
        """
        started = time.perf_counter()
        num_windows_before = len(self._windows)
        expected_seconds = None if self._step.graph is not None else step_seconds
        while True:
            state = self._warm_up_state(num_windows_before, expected_seconds, _since(started))
            state = self._peers.broadcast_object(state)  # rank 0's clock and allocator decide for all
            if state.is_over:
                break
            self._run_window(state.next_num_steps)
        protocol = self._spec.protocol
        steps_per_block = self._whole_launches(protocol.block_seconds / self._windows[-1])
        self._steps_per_block = self._peers.broadcast_object(steps_per_block)
        self._lead_in_steps = self._peers.broadcast_object(self._lead_in_of(protocol))
        graph = self._step.graph
        self._warm_up_peak = self._step.peak_allocated_ever(self._memory.peak_allocated())
        self._memory.reset_peak()
        self._skipped_before = self._step.scaling.skipped_steps
        update = {
            "warm_up_seconds": _since(started),
            "warm_up_steps": self._warm_up_steps,
            "capture_seconds": graph.captures.seconds if graph else None,
            "settled": state.has_settled,
            "averaged_by": self._step.averaged_by,
        }
        if self._watch is not None:
            self._watch.start()
        self._facts = self._facts.model_copy(update=update)
        return self._facts

    def _warm_up_state(
        self, num_windows_before: int, expected_seconds: float | None, passed_seconds: float
    ) -> _WarmUpState:
        """Return where the warm-up is.

        Args:
            num_windows_before: Windows that were run before it.
            expected_seconds: Seconds a step in earlier processes; None if not known.
            passed_seconds: Seconds since it began.
        """
        protocol, windows = self._spec.protocol, self._windows[num_windows_before:]
        num_as_expected = 0 if expected_seconds is None else _num_alike(windows, expected_seconds)
        reserved_is_stable = len(set(self._reserved[-_KNOWN_WINDOWS:])) == 1
        is_as_expected = num_as_expected >= _KNOWN_WINDOWS and reserved_is_stable
        has_settled = is_as_expected or _has_settled(self._windows, self._reserved)
        has_enough_steps = is_as_expected or self._warm_up_steps >= protocol.warm_up_steps
        is_out_of_time = passed_seconds >= protocol.warm_up_seconds
        num_steps = _WINDOW_SECONDS / self._windows[-1]
        if expected_seconds is not None and (num_as_expected or not windows):
            num_steps = _KNOWN_WINDOW_SECONDS / expected_seconds
        return _WarmUpState(
            is_over=has_enough_steps and self._has_all_memory() and (has_settled or is_out_of_time),
            has_settled=has_settled,
            next_num_steps=self._whole_launches(num_steps),
        )

    def _whole_launches(self, steps: float) -> int:
        """Return a number of steps near this one, at least one, none of which waits for steps of the next block."""
        at_once = self._step.steps_per_launch
        return max(1, round(steps / at_once)) * at_once

    def _lead_in_of(self, protocol: MeasurementProtocol) -> int:
        """Return how many lead-in steps run before each block."""
        at_once = self._step.steps_per_launch
        launch_seconds = at_once * self._windows[-1]
        if not protocol.lead_in_seconds or launch_seconds > _MAX_LEAD_IN_SECONDS:
            return 0
        return at_once * math.ceil(protocol.lead_in_seconds / launch_seconds - _ROUNDING)

    def _has_all_memory(self) -> bool:
        """Return whether the steps so far used as much memory as later ones, if the trial is about memory.

        A step that loss scaling skips leaves the optimizer without its state: there must be one that was not skipped,
        and another.
        """
        if not self._spec.protocol.memory_parts or self._warm_up_steps >= _MAX_SKIPPED_STEPS:
            return True
        return self._warm_up_steps - self._step.scaling.skipped_steps >= _NUM_OPTIMIZER_STEPS

    def _run_window(self, steps: int) -> None:
        seconds = self._time_steps(steps)[0]
        self._warm_up_steps += steps
        self._windows.append(seconds / steps)
        self._reserved.append(self._memory.reserved())

    def lead_in(self) -> None:
        """Launch the steps that lead to the next block, and do not wait for them.

        They keep the device busy until the block begins: after a pause its clock differs from that within steps.
        """
        if self._lead_in_steps:
            self._steps_into([], self._lead_in_steps)()
            self._num_led_in += self._lead_in_steps

    def run_block(self, length: int = 1) -> Block:
        """Time one block of steps, `length` times as long as usual, right behind its lead-in steps if there are any."""
        num_steps, num_led_in = length * self._steps_per_block, self._num_led_in
        self._num_led_in = 0
        seconds, loss = self._time_steps(num_steps, rested=not num_led_in)
        skipped = self._step.scaling.skipped_steps
        block = Block(
            seconds=seconds,
            num_steps=num_steps,
            lead_in_steps=num_led_in,
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
        """Run steps for at least so many seconds without a pause; return them as a block that is not a sample."""
        last = self._blocks[-1]
        num_steps = seconds * last.num_steps / last.seconds
        at_once = self._step.steps_per_launch
        # Rounded up: a step or two of half a second give no more ticks of the energy counter than needed.
        num_steps = self._peers.broadcast_object(at_once * math.ceil(num_steps / at_once - _ROUNDING))
        taken, loss = self._time_steps(num_steps)
        return Block(seconds=taken, num_steps=num_steps, loss=loss.item())

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
