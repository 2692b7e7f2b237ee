"""Trace the memory that a step takes on a GPU, on any machine: with fake tensors, or else in small steps on the CPU."""

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from castwise.apply.pytree import Batch
from castwise.errors import CastwiseError, shortened
from castwise.records.schema import MemoryParts, TracedMemory
from castwise.registry.techniques import hiding_operators
from castwise.registry.workloads import find_workload
from castwise.spec.memory_line import largest_batch
from castwise.spec.trial import TrialSpec
from castwise.trial.allocator import Event, StepEvents
from castwise.trial.build import TrialSetup, build_trial
from castwise.trial.data.sharding import rank_batches
from castwise.trial.distributed import Peers
from castwise.trial.fake_gpu import fake_gpu
from castwise.trial.memory_breakdown import trace_step, trace_steps

# What cuBLAS and cuBLASLt hold, 32 MiB each, and what the allocator's blocks are larger than their tensors. Chosen
# here: most records of benchmarks/records/fit have 66 to 90 MiB, on an H100 as on an H200.
WORKSPACE_BYTES = 75 * 2**20
# On the CPU batches of so many samples are computed, the larger ones as long as that is quick: in small ones
# the peak is the optimizer's, and says nothing of activations. Chosen here.
_CPU_BATCHES = (2, 8, 32, 128, 512)
_LONG_SECONDS = 3.0
# What code raises that needs values: torch's errors of fake tensors are RuntimeErrors.
ERRORS = (RuntimeError, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def trace_batches(
    spec: TrialSpec, batch_sizes: Sequence[int], rooms: Sequence[int], *, may_compute: bool = True
) -> TracedMemory:
    """Return what holds memory at the peak of the second step, by batch size: these, and the largest for each room.

    Techniques that compile or capture a step are left out. A step that needs values is computed on the CPU, if it may.
    """
    hidden = hiding_operators(spec.techniques)
    spec = spec.model_copy(update={"techniques": tuple(name for name in spec.techniques if name not in hidden)})
    try:
        with warnings.catch_warnings(action="ignore"):
            return _trace(spec.model_copy(update={"device": "cuda:0"}), batch_sizes, rooms)
    except CastwiseError:
        raise
    except ERRORS as error:
        if not may_compute:
            raise
        why = why_untraced(error)
    sizes = [size for size in _CPU_BATCHES if size < spec.batch_size]
    found = _trace(spec.model_copy(update={"device": "cpu"}), [*sizes, spec.batch_size], ())
    return found.model_copy(update={"needs_values": shortened(why)})


def why_untraced(error: Exception) -> str:
    """Return in a line what failed on a GPU that is not there."""
    operator, said = getattr(error, "func", None), str(error).strip().partition("\n")[0]
    return f"the operator {operator} needs values" if operator is not None else f"{type(error).__name__}: {said}"


def _trace(spec: TrialSpec, batch_sizes: Sequence[int], rooms: Sequence[int]) -> TracedMemory:
    if spec.device == "cpu":
        return _trace_on_cpu(spec, batch_sizes)
    found: dict[int, MemoryParts] = {}
    guesses: dict[str, None] = {}
    steps: dict[int, list[Event]] = {}

    def trace(asked: int) -> tuple[str, ...]:
        with ExitStack() as stack:
            setup = build_trial(spec, stack, Peers())  # anew: the first step leaves gaps
            size, batches = _batches(spec, setup, asked)
            if size not in found:
                parts, steps[size] = trace_steps(setup.step, batches)
                found[size] = parts.model_copy(update={"workspace_bytes": WORKSPACE_BYTES})
            return setup.facts.layers or ()

    largest: dict[int, int] = {}
    with fake_gpu(guesses):
        layers, *_ = [trace(size) for size in batch_sizes]
        try:
            events = StepEvents({size: steps[size] for size in (min(steps), max(steps))}, WORKSPACE_BYTES)
        except ValueError:  # of one size, or other operations at the other one
            known = {size: parts.peak_bytes for size, parts in found.items()}
            for room in rooms if len(known) > 1 else ():
                if size := largest_batch(known, room):
                    trace(size)
        else:
            largest = {room: size for room in rooms if (size := events.largest(room))}
    for size in {*largest.values()} - found.keys():
        held = events.peak_bytes(size) - WORKSPACE_BYTES
        found[size] = MemoryParts(saved_bytes=held, workspace_bytes=WORKSPACE_BYTES)
    return TracedMemory(batches=found, largest=largest, layers=layers, guesses=tuple(guesses))


def _trace_on_cpu(spec: TrialSpec, batch_sizes: Sequence[int]) -> TracedMemory:
    """Return the same of the two largest sizes, or of those before one that takes long."""
    found: dict[int, MemoryParts] = {}
    with ExitStack() as stack:
        setup = build_trial(spec, stack, Peers())
        for asked in batch_sizes:
            began = time.perf_counter()
            size, batches = _batches(spec, setup, asked)
            if not found:
                setup.step(batches[0])  # makes the optimizer's state, but not for weights that get no gradient
            parts = trace_step(setup.step, batches, torch.device("cpu"))
            found[size] = parts.model_copy(update={"workspace_bytes": WORKSPACE_BYTES})
            if time.perf_counter() - began > _LONG_SECONDS and len(found) > 1:
                break
    return TracedMemory(batches=dict(list(found.items())[-2:]), layers=setup.facts.layers or ())


def _batches(spec: TrialSpec, setup: TrialSetup, asked: int) -> tuple[int, Sequence[Batch]]:
    """Return the size that is asked for, as the step can accumulate it, and batches of it."""
    size = max(1, asked // setup.step.accumulate) * setup.step.accumulate
    setup.task.begin_epoch()
    row = find_workload(spec.workload)
    batches = rank_batches(row, setup.task, spec.model_copy(update={"batch_size": size}), row.resident_batches, Peers())
    return size, batches if setup.prepare is None else [setup.prepare(batch) for batch in batches]
