"""The options of `castwise max-batch`."""

from dataclasses import dataclass
from typing import Annotated

from castwise.spec.options import (
    COUNT,
    DURATION,
    MEMORY,
    PRECISIONS,
    SHARE,
    Model,
    OptimizerStates,
    Option,
    Parallelisms,
    StepOptions,
    Techniques,
    WorldSizes,
)


@dataclass(frozen=True)
class MaxBatchOptions(StepOptions):
    """What `castwise max-batch` searches; None is what suits the machine."""

    workload: Model
    precisions: Annotated[
        tuple[str, ...] | None, Option("Precisions, comma-separated. Default: all that the device has.", **PRECISIONS)
    ] = None
    techniques: Techniques = None
    optimizer_states: OptimizerStates = None
    world_sizes: WorldSizes = None
    parallelisms: Parallelisms = None
    exact: Annotated[bool, Option("Find the largest batch to the sample. Default: to a multiple of 8.")] = False
    margin: Annotated[float | None, Option("The share of the memory that must stay free: 5%.", **SHARE)] = None
    memory_bytes: Annotated[
        float | None,
        Option(
            "The most that a trial may take: 8GiB. Default: all that the GPU has; a CPU needs it.",
            keyword="memory",
            **MEMORY,
        ),
    ] = None
    steps: Annotated[
        int | None,
        Option("The least number of steps that a batch must train to fit. Default: 5.", "How long", **COUNT),
    ] = None
    budget_seconds: Annotated[
        float | None,
        Option(
            "Wall time, imports included: 5min. No trial begins that would end after it.",
            "How long",
            keyword="budget",
            **DURATION,
        ),
    ] = None
    curve: Annotated[bool, Option("Measure batches below the largest, for the curve and its knee.", "How long")] = True
