"""The least time of a goal's step on a device, by its datasheet and by what it was measured to do."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from goal_rows import GoalRow
from least_time import Ceilings, Work, least_time

from castwise.registry.gpus import find_gpu_model, peak
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import Workload, find_workload
from castwise.spec.recipe import Recipe

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4}


def work_of(row: GoalRow, recipe: Recipe | None) -> Work:
    """Return what a step of a row does."""
    from work_counter import count_work

    return count_work(find_workload(row.workload), row.batch_size, recipe)


def units_of(workload: Workload) -> int:
    """Return the units of throughput in a sample."""
    from work_counter import units_per_sample

    return units_per_sample(workload)


def bounds_of(
    work: Work, precision: str, device_name: str | None, measured: Mapping[str, float] | None
) -> dict[str, Any]:
    """Return operations, bytes and least seconds of a step, as a record keeps them.

    Args:
        work: What the step does.
        precision: The loop's precision.
        device_name: Whose datasheet; None, or a device without a row, gives no figure by it.
        measured: What the device was measured to do: FLOP/s by format, and "bytes_per_second".
    """
    dtype = find_precision(precision).peak_dtype
    size = ELEMENT_BYTES[dtype]
    found: dict[str, Any] = {"format": dtype, "flops": work.flops, "bytes": work.bytes(size)}
    device = find_gpu_model(device_name) if device_name is not None else None
    rate = peak(device, dtype)
    if device is not None and rate is not None:
        ceilings = Ceilings(rate, device.bandwidth_bytes_per_second)
        found["datasheet"] = asdict(ceilings) | asdict(least_time(work, size, ceilings))
    if measured is not None and dtype in measured:
        ceilings = Ceilings(measured[dtype], measured["bytes_per_second"])
        found["measured"] = asdict(ceilings) | asdict(least_time(work, size, ceilings))
    return found
