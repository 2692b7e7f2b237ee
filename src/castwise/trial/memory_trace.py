"""Trace the memory that a step takes on a GPU, on any machine: with fake tensors, or else in small steps on the CPU."""

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from castwise.errors import CastwiseError, shortened
from castwise.records.schema import MemoryParts, TracedMemory
from castwise.registry.techniques import hiding_operators
from castwise.registry.workloads import find_workload
from castwise.spec.memory_line import largest_batch
from castwise.spec.trial import TrialSpec
from castwise.trial.build import build_trial
from castwise.trial.data.sharding import rank_batches
from castwise.trial.distributed import Peers
from castwise.trial.fake_gpu import fake_gpu
from castwise.trial.memory_breakdown import trace_step

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
    row, on_cpu = find_workload(spec.workload), spec.device == "cpu"
    found: dict[int, MemoryParts] = {}
    guesses: dict[str, None] = {}
    with ExitStack() as stack:
        if not on_cpu:
            stack.enter_context(fake_gpu(guesses))
        setup = build_trial(spec, stack, Peers())
        step = setup.step

        def trace(size: int) -> None:
            size = max(1, size // step.accumulate) * step.accumulate
            if size in found:
                return
            setup.task.begin_epoch()
            at_size = spec.model_copy(update={"batch_size": size})
            batches = rank_batches(row, setup.task, at_size, row.resident_batches, Peers())
            if setup.prepare is not None:
                batches = [setup.prepare(batch) for batch in batches]
            device = torch.device("cpu") if on_cpu else None
            if not found:
                step(batches[0])  # makes the optimizer's state, but not for weights that get no gradient
            parts = trace_step(step, batches, device)
            found[size] = parts.model_copy(update={"workspace_bytes": WORKSPACE_BYTES})

        for size in batch_sizes:
            began = time.perf_counter()
            trace(size)
            if on_cpu and time.perf_counter() - began > _LONG_SECONDS and len(found) > 1:
                break
        if on_cpu:
            found = dict(list(found.items())[-2:])
        for room in rooms:
            if largest := largest_batch({size: parts.peak_bytes for size, parts in found.items()}, room):
                trace(largest)
        return TracedMemory(batches=found, layers=setup.facts.layers or (), guesses=tuple(guesses))
