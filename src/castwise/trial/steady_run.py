"""Steady-state training steps: set up once, warm up, then time blocks of steps as often as the parent asks."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from castwise.apply.float8 import compare_with_bfloat16
from castwise.apply.hardware import make_event, module_of, synchronize
from castwise.apply.pytree import tree_tensors
from castwise.records.schema import Block, Facts, RankSamples, StepProfile
from castwise.registry.techniques import compiles, times_kernels
from castwise.registry.workloads import find_workload
from castwise.spec.trial import TrialSpec
from castwise.trial.build import build_trial
from castwise.trial.data.sharding import rank_batches
from castwise.trial.device_lock import device_lock
from castwise.trial.distributed import Peers, devices_of
from castwise.trial.flops import count_flops
from castwise.trial.kernel_profile import profile_step
from castwise.trial.memory import memory_meter, without_storage
from castwise.trial.memory_breakdown import profile_memory
from castwise.trial.numerics import measure_numerics
from castwise.trial.user_model.side_effects import SideEffectWatch

# Warm-up ends when this many windows in a row agree within this much, and the allocator has not grown in them.
# Source: chosen here.
SETTLED_WINDOWS = 3
_SETTLED_SPREAD = 0.02
# If they vary, the medians of so many windows, and of as many before them, must agree within this. Windows that vary by
# 10 % agree so after 1.1 s; three in a row took 4.4 s, and some 10 s. Source: simulated, chosen here.
_STEADY_WINDOWS = 4
WINDOW_SECONDS = 0.1
# If the step time is known from earlier processes, this many windows of half that length must agree with it.
_KNOWN_WINDOWS = 2
_KNOWN_WINDOW_SECONDS = WINDOW_SECONDS / 2
# After this many steps of the optimizer, memory use is that of any later step.
_NUM_OPTIMIZER_STEPS = 2
# After this many steps those are not waited for: Apex's dynamic scale starts at 2^32 and halves with a skipped step.
_MAX_SKIPPED_STEPS = 40
_ROUNDING = 0.01  # of a launch
# Longer steps do not lead in: the pause before a block was seen to change it by 3 ms at most.
# Source: chosen here.
_MAX_LEAD_IN_SECONDS = 1.0


class SteadyRun:
    """A steady trial in its own process: everything between `set_up` and `finish`."""

    def __init__(self, spec: TrialSpec, data_dir: Path | None, peers: Peers | None = None) -> None:
        """Build the model, its data and its optimizer in the spec's precision, and take the first steps."""
        started = time.perf_counter()
        self._spec, self._peers = spec, peers or Peers()
        self.is_to_be_profiled = spec.protocol.profile_steps > 0
        self._device = torch.device(spec.device)
        self._memory = memory_meter(*devices_of(spec))
        self._memory.reset_peak()  # what the process held before is not the trial's
        if spec.memory_limit_bytes is not None:
            self._memory.set_limit(spec.memory_limit_bytes)
        self._blocks: list[Block] = []
        self._next_batch = 0
        self._steps_per_block = 1
        self._lead_in_steps = 0  # before each block
        self._num_led_in = 0  # since the last block
        self._warm_up_peak: int | None = None
        self._windows: list[float] = []
        self._reserved: list[int] = []
        self._warm_up_steps = 0
        with ExitStack() as stack:
            setup = build_trial(spec, stack, self._peers, data_dir)
            self._step, self._task = setup.step, setup.task
            row = find_workload(spec.workload)
            self._batches = rank_batches(row, setup.task, spec, row.resident_batches, self._peers)
            if setup.prepare is not None:
                self._batches = [setup.prepare(batch) for batch in self._batches]
            self._watch = SideEffectWatch(self._memory) if spec.user_model is not None else None
            set_up_seconds = time.perf_counter() - started
            float8 = setup.facts.float8
            if float8 is not None and spec.repeat == 0:  # all processes of a configuration compute the same
                run = partial(self._step.run_backward, self._batches[0])
                float8 = compare_with_bfloat16(self._step.model, float8, run)
                if self._device.type != "cpu":
                    module_of(self._device).empty_cache()  # what comes next takes less memory
                self._memory.reset_peak()
            # Libraries are loaded, algorithms searched, code compiled. It belongs to set-up, which interleaved trials
            # do in parallel: most of it is the host's work.
            first_started, names = time.perf_counter(), spec.techniques
            alone = times_kernels(names) and spec.may_hold_devices_alone
            trial = spec.model_copy(update={"device": ""}).key if alone else None  # the same for all of its ranks
            with device_lock(trial, compiles=compiles(names)) as lock:
                for _ in range(self._step.steps_to_compile):
                    self._run_window(1)
            first_step_seconds = time.perf_counter() - first_started - lock.waited_seconds
            self._stack = stack.pop_all()
        # Views of one tensor share their storage.
        storages = [part.untyped_storage() for part in tree_tensors(self._batches)]
        loss_note = getattr(setup.task.compute_loss, "note", "")  # of a user's model that leaves the loss to castwise
        update = {
            "notes": (*setup.facts.notes, *filter(None, [loss_note])),
            "data_bytes": sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
            "join_seconds": self._peers.join_seconds,
            "set_up_seconds": set_up_seconds,
            "float8": float8,
            "first_step_seconds": first_step_seconds,
            "compile_seconds": lock.compile_seconds,
            "compiled_graphs": lock.compiled_graphs,
            "loaded_graphs": lock.loaded_graphs,
        }
        self._facts = setup.facts.model_copy(update=update)

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        """Run steps until their time has settled, and return what is now known of the trial.

        Steps that take `step_seconds`, as in earlier processes of the same configuration, have settled, unless there is
        a CUDA graph, which is captured after some of them.
        """
        started, protocol, graph = time.perf_counter(), self._spec.protocol, self._step.graph
        num_windows_before = len(self._windows)
        expected_seconds = None if graph is not None else step_seconds
        while True:
            state = self._warm_up_state(num_windows_before, expected_seconds, time.perf_counter() - started)
            # Rank 0's clock and allocator decide for all.
            is_over, has_settled, next_num_steps = self._peers.broadcast_object(state)
            if is_over:
                break
            self._run_window(next_num_steps)
        at_once, lead_in_steps = self._step.steps_per_launch, 0
        launch_seconds = at_once * self._windows[-1]
        if protocol.lead_in_seconds and launch_seconds <= _MAX_LEAD_IN_SECONDS:
            lead_in_steps = at_once * math.ceil(protocol.lead_in_seconds / launch_seconds - _ROUNDING)
        counts = self._whole_launches(protocol.block_seconds / self._windows[-1]), lead_in_steps
        self._steps_per_block, self._lead_in_steps = self._peers.broadcast_object(counts)
        self._warm_up_peak = self._step.peak_allocated(self._memory.peak_allocated(), ever=True)
        self._memory.reset_peak()
        self._skipped_before = self._step.scaling.skipped_steps
        update = {
            "warm_up_seconds": time.perf_counter() - started,
            "warm_up_steps": self._warm_up_steps,
            "capture_seconds": graph.captures.seconds if graph else None,
            "settled": has_settled,
            "averaged_by": self._step.averaged_by,
            "refused_allocations": self._memory.refused_allocations(),
        }
        if self._watch is not None:
            self._watch.start()
        self._facts = self._facts.model_copy(update=update)
        return self._facts

    def _warm_up_state(
        self, num_windows_before: int, expected_seconds: float | None, passed_seconds: float
    ) -> tuple[bool, bool, int]:
        """Return whether the warm-up is over, whether the step time has settled, and the steps of the next window."""
        protocol, windows, reserved = self._spec.protocol, self._windows, self._reserved
        recent = windows[num_windows_before:]
        num_as_expected = 0
        if expected_seconds is not None:  # from the last window back
            for seconds in reversed(recent):
                if abs(seconds / expected_seconds - 1) > _SETTLED_SPREAD:
                    break
                num_as_expected += 1
        is_as_expected = num_as_expected >= _KNOWN_WINDOWS and len(set(reserved[-_KNOWN_WINDOWS:])) == 1
        has_settled = is_as_expected or (settled(windows) and len(set(reserved[-SETTLED_WINDOWS:])) == 1)
        has_enough_steps = is_as_expected or self._warm_up_steps >= protocol.warm_up_steps
        # If the trial is about memory, later steps must not use more. A step that loss scaling skips leaves the
        # optimizer without its state: there must be one that was not skipped, and another.
        has_all_memory = (
            not protocol.memory_parts
            or self._warm_up_steps >= _MAX_SKIPPED_STEPS
            or self._warm_up_steps - self._step.scaling.skipped_steps >= _NUM_OPTIMIZER_STEPS
        )
        is_out_of_time = passed_seconds >= protocol.warm_up_seconds
        num_steps = WINDOW_SECONDS / windows[-1]
        if expected_seconds is not None and (num_as_expected or not recent):
            num_steps = _KNOWN_WINDOW_SECONDS / expected_seconds
        is_over = has_enough_steps and has_all_memory and (has_settled or is_out_of_time)
        return is_over, has_settled, self._whole_launches(num_steps)

    def _whole_launches(self, steps: float) -> int:
        """Return a number of steps near this one, at least one, none of which waits for steps of the next block."""
        at_once = self._step.steps_per_launch
        return max(1, round(steps / at_once)) * at_once

    def _run_window(self, steps: int) -> None:
        seconds = self._time_steps(steps)[0]
        self._warm_up_steps += steps
        self._windows.append(seconds / steps)
        self._reserved.append(self._memory.reserved())

    def lead_in(self) -> None:
        """Launch the steps before the next block, and do not wait for them.

        They keep the device busy until the block begins: after a pause its clock frequency differs from that in steps.
        """
        if self._lead_in_steps:
            self._steps_into([], self._lead_in_steps)()
            self._num_led_in += self._lead_in_steps

    def run_block(self, length: int = 1) -> Block:
        """Time one block of steps, `length` times as long as usual, right after its lead-in steps if there are any."""
        num_led_in, self._num_led_in = self._num_led_in, 0
        self._peers.barrier()  # waiting for another rank at the start is not part of the steps' time
        (block,) = self._time_blocks(1, length * self._steps_per_block, num_led_in, rested=not num_led_in)
        return block

    def run_stretch(self, lead_in_seconds: float, num_blocks: int, block_seconds: float) -> tuple[Block, ...]:
        """Time blocks of steps right after untimed ones, without a pause before or between them.

        The loss scale is read, and skipped steps are counted, after the last block.
        """
        step_seconds = self._windows[-1]
        counts = (self._whole_launches(each / step_seconds) for each in (lead_in_seconds, block_seconds))
        lead_in_steps, num_steps = self._peers.broadcast_object(tuple(counts))  # rank 0's clock decides for all
        self._peers.barrier()
        self._steps_into([], lead_in_steps)()
        return self._time_blocks(num_blocks, num_steps, lead_in_steps, rested=False, in_stretch=True)

    def _time_blocks(
        self, num_blocks: int, num_steps: int, lead_in_steps: int, *, rested: bool, in_stretch: bool = False
    ) -> tuple[Block, ...]:
        losses: list[Tensor] = []
        works = [self._steps_into(losses, num_steps) for _ in range(num_blocks)]
        seconds = time_works(self._device, works, rested=rested)
        self._memory.check()
        skipped_before, self._skipped_before = self._skipped_before, self._step.scaling.skipped_steps
        blocks = tuple(
            Block(
                seconds=seconds[index],
                num_steps=num_steps,
                lead_in_steps=0 if index else lead_in_steps,
                in_stretch=in_stretch,
                loss=losses[index].item(),
                loss_scale=self._step.scaling.read_scale(),
                skipped_steps=self._skipped_before - skipped_before if index == num_blocks - 1 else 0,
            )
            for index in range(num_blocks)
        )
        self._blocks += blocks
        if self._watch is not None:
            for block in blocks:
                self._watch.record_block(block)
        return blocks

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
        if self._spec.protocol.memory_parts:  # last: an observed step differs from all others
            parts = profile_memory(self._spec, self._step, self._batches, self._memory)
            samples = samples.model_copy(update={"memory_parts": parts})
        elif self._spec.repeat == 0 and self._peers.rank == 0:  # all processes of a configuration compute the same
            flops = count_flops(self._spec, self._step, self._task, self._batches)
            samples = samples.model_copy(update={"flops": flops})
        if not self.is_to_be_profiled:
            self._stack.close()
        return samples

    def profile(self, num_steps: int, trace: Path | None) -> StepProfile:
        """Profile about so many steps after all else, and restore the process's numeric state."""
        at_once = self._step.steps_per_launch

        def run(count: int, recorded: AbstractContextManager[Any]) -> int:  # without a barrier's kernel
            whole = at_once * math.ceil(count / at_once)
            with recorded:
                self._steps_into([], whole)()
                synchronize(self._device)
            return whole

        with self._stack:
            profile = profile_step(
                self._spec, self._step, run, num_steps, trace if self._peers.rank == 0 else None, self._peers
            )
            if not self._spec.protocol.numerics:
                return profile
            numerics = measure_numerics(self._spec, self._step, self._task.recurrent_state, self._batches[0])
            return profile.model_copy(update={"numerics": numerics})

    def _time_steps(self, count: int) -> tuple[float, Tensor]:
        losses: list[Tensor] = []
        self._peers.barrier()
        (seconds,) = time_works(self._device, [self._steps_into(losses, count)], rested=True)
        self._memory.check()
        return seconds, losses[-1]

    def _steps_into(self, losses: list[Tensor], count: int) -> Callable[[], None]:
        step, batches, first = self._step, self._batches, self._next_batch
        self._next_batch = (first + count) % len(batches)

        def work() -> None:
            for index in range(first, first + count):
                loss = step(batches[index % len(batches)])
            step.flush()
            losses.append(without_storage(loss))

        return work


def settled(windows: Sequence[float]) -> bool:
    """Return whether the last windows' step times agree, or vary around the same median as those before them.

    The first window has library loading and cuDNN's choices.
    """
    last = windows[-SETTLED_WINDOWS:]
    if len(windows) > SETTLED_WINDOWS and max(last) / min(last) - 1 <= _SETTLED_SPREAD:
        return True
    if len(windows) <= 2 * _STEADY_WINDOWS:
        return False
    before, now = windows[-2 * _STEADY_WINDOWS : -_STEADY_WINDOWS], windows[-_STEADY_WINDOWS:]
    return abs(statistics.median(now) / statistics.median(before) - 1) <= _SETTLED_SPREAD


def time_works(device: torch.device, works: Sequence[Callable[[], None]], *, rested: bool) -> list[float]:
    """Run works one after another, and return the seconds of each.

    On a GPU they are times between its events, from the first launch of a work to the end of its last kernel; nothing
    waits for the GPU between two works. With `rested` the first waits for all that was launched before; otherwise its
    time begins when that is done.
    """
    if device.type == "cpu":
        moments = [time.perf_counter()]
        for work in works:
            work()
            moments.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(moments)]
    if rested:
        synchronize(device)
    events = [make_event(device) for _ in range(len(works) + 1)]
    events[0].record()
    for work, end in zip(works, events[1:], strict=True):
        work()
        end.record()
    synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]
