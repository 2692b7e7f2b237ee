"""The options of `castwise tune`."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from castwise.spec.options import (
    COUNT,
    DURATION,
    MEMORY,
    PRECISIONS,
    ModelOrScript,
    Option,
    ScriptOptions,
    StepOptions,
)
from castwise.spec.types import Numerics


@dataclass(frozen=True)
class TuneOptions(StepOptions, ScriptOptions):
    """What `castwise tune` searches; None is what suits the machine."""

    workload: ModelOrScript = "mnist-cnn"
    _: KW_ONLY
    precisions: Annotated[
        tuple[str, ...] | None,
        Option(
            "Precisions to try, comma-separated; the first is the plain loop's. Default: PyTorch's default and all "
            "that keep float32 weights.",
            **PRECISIONS,
        ),
    ] = None
    numerics: Annotated[
        Numerics,
        Option(
            "What a technique may change at most: bits (nothing), rounding, draws (other random numbers of the "
            "same distribution), sums (of products, in float16), state (Adam's, in fewer bits), shape (the model).",
            keyword="allow",
        ),
    ] = "draws"
    batch_size: Annotated[int | None, Option("Samples per step.", **COUNT)] = None
    num_gpus: Annotated[
        int | None, Option("GPUs that share each loop, each with a whole batch. Default: 1.", keyword="gpus", **COUNT)
    ] = None
    parallelism: Annotated[
        str | None, Option("How they share it: ddp (a process each), fsdp (with sharded weights) or dp. Default: ddp.")
    ] = None
    memory_bytes: Annotated[
        float | None,
        Option(
            "Also find the fastest loop within this memory, on a smaller batch if necessary: 8GiB.",
            keyword="memory",
            **MEMORY,
        ),
    ] = None
    budget_seconds: Annotated[
        float | None,
        Option(
            "Wall time, imports included, after which nothing further is tried: 5min. Default: 9min, or 160s if a "
            "GPU's step takes less than 10 ms.",
            "How long",
            keyword="budget",
            **DURATION,
        ),
    ] = None
    data_set: Annotated[
        str | None,
        Option(
            "synthetic; or a real data set, or random samples in its shape (synthetic:NAME), whose epochs are then "
            "timed as the source's suite reads them."
        ),
    ] = None
    training: Annotated[bool, Option("Time epochs as the source's suite runs them, on the suite's data.")] = False
    larger_batches: Annotated[bool, Option("Also try 2, 4 and 8 times the batch: that changes the training.")] = False
    timeout_seconds: Annotated[
        float | None,
        Option(
            "How long one phase of a trial, such as compilation, may take. Default: half of --budget, at least 3min, "
            "at most --budget.",
            "How long",
            flags=("--timeout",),
            **DURATION,
        ),
    ] = None
