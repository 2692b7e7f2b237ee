"""Predict the memory of a training step on GPUs that are not there, from steps that are traced without one."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from castwise.errors import UsageError
from castwise.fits.options import DEFAULT_GPUS, DEFAULT_PRECISIONS, DEFAULT_TECHNIQUES, FitsOptions
from castwise.max_batch.result import USABLE
from castwise.orchestrator.job import check_request, planned_specs
from castwise.orchestrator.machine import FindMachine, detect_machine
from castwise.orchestrator.session import OnNote, TrialFailedError
from castwise.records.schema import MemoryParts, TracedMemory
from castwise.registry.gpus import CONTEXT_BYTES, GpuModel, gpus_named, short_device_name, total_bytes
from castwise.registry.precisions import Hardware, find_precision, why_unsupported
from castwise.registry.techniques import hiding_operators
from castwise.show.units import format_duration
from castwise.spec.memory_line import largest_batch, needed_bytes
from castwise.spec.options import RunOptions
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import is_script

# The 95 % quantile of the absolute log errors, and their number. Source: docs/fits.md, which benchmarks/fits_tables.py
# makes; a test compares them. Convolutions in float32 without TF32 stand apart: cuDNN takes workspace for them as long
# as memory is free, and does without it near the limit.
ERROR, NUM_ERRORS = 0.0329, 546
ERROR_BATCHES = 0.0516  # of 100 largest batches
ERROR_OWN, NUM_ERRORS_OWN = 0.1399, 25  # of these, models of a user's file
ERROR_SCRIPTS, NUM_ERRORS_SCRIPTS = 0.1744, 86  # that compile nothing
ERROR_FP32_CONVOLUTIONS, NUM_ERRORS_FP32_CONVOLUTIONS = 0.4050, 56
# The second batch that is traced is so many times the first: small batches peak elsewhere in a step.
_APART = 8
_TIMEOUT_SECONDS = 600.0
_MOST_PROCESSES = 4
_NOTE_SECONDS = 5.0  # between notes; chosen here

Verdict = Literal["yes", "close", "no"]


@dataclass(frozen=True)
class Loop:
    """A loop and what its step takes, by batch size; or why that is not known."""

    spec: TrialSpec
    memory: TracedMemory | None
    problem: str = ""

    @cached_property
    def known(self) -> Mapping[int, int]:
        """Return the peak in bytes, by batch size."""
        return {} if self.memory is None else {size: parts.peak_bytes for size, parts in self.memory.batches.items()}

    @property
    def parts(self) -> MemoryParts | None:
        """Return what holds memory at the batch that was asked for; None if that was not traced."""
        return None if self.memory is None else self.memory.batches.get(self.spec.batch_size)

    @property
    def needed_bytes(self) -> float | None:
        return needed_bytes(self.known, self.spec.batch_size) if self.known else None

    @property
    def error(self) -> float:
        """Return how far off the prediction may be, as the 95 % quantile of known log errors."""
        return self.known_errors[0]

    @property
    def known_errors(self) -> tuple[float, int]:
        """Return that quantile, and the number of the errors."""
        if self.spec.is_script:
            return ERROR_SCRIPTS, NUM_ERRORS_SCRIPTS
        return (ERROR, NUM_ERRORS) if self.spec.user_model is None else (ERROR_OWN, NUM_ERRORS_OWN)

    @property
    def is_rough(self) -> bool:
        """Return whether it stands for steps of other batches on the CPU, whose error is not known."""
        return self.memory is not None and bool(self.memory.needs_values) and self.spec.batch_size not in self.known

    @property
    def takes_workspace(self) -> bool:
        """Return whether cuDNN takes workspace for it that depends on how much memory is free."""
        layers = () if self.memory is None else self.memory.layers
        row = find_precision(self.spec.precision)
        is_plain = row.float32_matmul == "ieee" and row.param_dtype == "float32" and row.autocast_dtype is None
        return "convolution" in layers and is_plain and not row.float8_recipe

    @property
    def left_out(self) -> list[str]:
        """Return the techniques of the loop without which it was traced."""
        return hiding_operators(self.spec.techniques)


@dataclass(frozen=True)
class Fit:
    """Whether a loop fits into a GPU."""

    loop: Loop
    gpu: GpuModel

    @property
    def gpu_name(self) -> str:
        return short_device_name(self.gpu.names[0])

    @property
    def room_bytes(self) -> int:
        """Return what tensors can fill: of the driver's total less the context, fragmentation takes a part."""
        return room_of(self.gpu)

    @property
    def unsupported(self) -> str:
        """Return why the GPU cannot run the loop; empty if it can."""
        row, hardware = find_precision(self.loop.spec.precision), Hardware(self.gpu_name, self.gpu.capability)
        return (self.gpu.capability is not None and why_unsupported(row, hardware)) or ""

    @property
    def problem(self) -> str:
        """Return why the GPU cannot run the loop, or why nothing is known of it; empty if neither."""
        return self.unsupported or self.loop.problem

    @property
    def verdict(self) -> Verdict | None:
        needed = self.loop.needed_bytes
        if self.problem or needed is None:
            return None
        if self.loop.is_rough:
            return "close"
        if (low := self.largest(-self.loop.error)) is not None and (high := self.largest(self.loop.error)) is not None:
            size = self.loop.spec.batch_size
            return "yes" if size <= low else "no" if size > high else "close"
        if needed * math.exp(self.loop.error) <= self.room_bytes:
            return "yes"
        return "no" if needed * math.exp(-self.loop.error) > self.room_bytes else "close"

    def largest(self, log_error: float = 0.0) -> int | None:
        """Return the largest batch that fits if the prediction is off by so much; None if it is not known."""
        if self.problem or len(self.loop.known) < 2 or (self.loop.memory is not None and self.loop.memory.needs_values):
            return None
        by_bytes = largest_batch(self.loop.known, self.room_bytes * math.exp(log_error))
        between_gaps = {} if self.loop.memory is None else self.loop.memory.largest
        if by_bytes is None or (largest := between_gaps.get(space_of(self.gpu))) is None:
            return by_bytes
        ratio = by_bytes / (largest_batch(self.loop.known, self.room_bytes) or math.inf)
        if log_error:  # gaps are not as well known as bytes
            ratio = min(ratio, math.exp(-ERROR_BATCHES)) if log_error < 0 else max(ratio, math.exp(ERROR_BATCHES))
        return int(largest * ratio)


@dataclass(frozen=True)
class Prediction:
    """What came of `castwise fits`."""

    loops: tuple[Loop, ...]
    gpus: tuple[GpuModel, ...]
    seconds: float  # wall time
    workload: str  # as it was asked for

    @property
    def fits(self) -> tuple[Fit, ...]:
        return tuple(Fit(loop, gpu) for gpu in self.gpus for loop in self.loops)


def space_of(gpu: GpuModel) -> int:
    """Return what torch's allocator can hold of a GPU's memory, in bytes."""
    return total_bytes(gpu)[0] - CONTEXT_BYTES


def room_of(gpu: GpuModel) -> int:
    return int(space_of(gpu) * USABLE)


def predict(
    request: FitsOptions,
    find_machine: FindMachine = detect_machine,
    on_note: OnNote | None = None,
    on_log: OnNote | None = None,
) -> Prediction:
    """Trace each loop of a request, in processes of their own, and predict what it takes.

    `on_note` receives a line now and then on what is traced, or what a script is waited for; `on_log` what a process
    that failed printed.

    Raises:
        UsageError: A name is unknown, or none of the loops can be traced.
        EngineError: No process could be started.
    """
    began = time.perf_counter()
    gpus = tuple(dict.fromkeys(gpu for name in request.gpus or DEFAULT_GPUS for gpu in _apart(gpus_named(name))))
    of_script = is_script(request.workload)
    options = RunOptions(
        workloads=(request.workload,),
        precisions=request.precisions or DEFAULT_PRECISIONS,
        batch_sizes=None if request.batch_size is None else (request.batch_size,),
        techniques=request.techniques or (None if of_script else DEFAULT_TECHNIQUES),
        optimizer_states=request.optimizer_states,
        timeout_seconds=request.timeout_seconds,
    )
    check_request(options)
    machine = find_machine("cpu", None, ())
    specs = planned_specs(options, machine, runs_scripts=False)[1]
    rooms = sorted({space_of(gpu) for gpu in gpus})

    def trace(spec: TrialSpec) -> Loop:
        sizes, told = (spec.batch_size, _APART * spec.batch_size), on_note if spec is specs[0] else None
        with closing(machine.engine.start(request.timeout_seconds or _TIMEOUT_SECONDS)) as session:
            try:
                session.open("cpu")
                return Loop(spec, session.trace_memory(spec, sizes, tuple(rooms), on_note=told))
            except TrialFailedError as failure:
                if on_log is not None:
                    on_log(f"{spec.label} printed:\n{failure.log.rstrip()}")
                return Loop(spec, None, failure.message)

    loops = tuple(_side_by_side(trace, specs, on_note))
    if all(loop.memory is None for loop in loops):
        raise UsageError(loops[0].problem)
    if of_script:
        loops = _at_batch_of_script(loops)
    if request.techniques is None:  # a model may have no blocks to checkpoint: nobody asked for it
        loops = tuple(loop for loop in loops if loop.memory is not None or not loop.spec.techniques)
    return Prediction(loops, gpus, time.perf_counter() - began, request.workload)


def _side_by_side(
    trace: Callable[[TrialSpec], Loop], specs: Sequence[TrialSpec], on_note: OnNote | None
) -> Iterator[Loop]:
    """Trace loops in several processes at a time, and say now and then how many are traced."""
    began = told_at = time.perf_counter()
    with ThreadPoolExecutor(min(_MOST_PROCESSES, os.cpu_count() or 1)) as pool:
        for number, loop in enumerate(pool.map(trace, specs), start=1):
            now = time.perf_counter()
            if on_note is not None and number < len(specs) and now - told_at > _NOTE_SECONDS:
                told_at = now
                on_note(f"{number} of {len(specs)} loops traced, {format_duration(now - began)} so far")
            yield loop


def _at_batch_of_script(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Return a script's loops at the batch that the first of them has shown to be a step's."""
    size = next(iter(next(loop.memory.batches for loop in loops if loop.memory is not None)))

    def at_size(loop: Loop) -> Loop:
        parts = None if loop.memory is None else next(iter(loop.memory.batches.values()))
        memory = loop.memory and loop.memory.model_copy(update={"batches": {size: parts}})
        return replace(loop, spec=loop.spec.model_copy(update={"batch_size": size}), memory=memory)

    return tuple(map(at_size, loops))


def _apart(gpus: Sequence[GpuModel]) -> list[GpuModel]:
    """Return the first of those GPUs that have the same memory: they are the same here."""
    return list({gpu.memory_gigabytes: gpu for gpu in reversed(gpus)}.values())[::-1]
