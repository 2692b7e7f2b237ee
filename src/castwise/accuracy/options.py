"""The options of `castwise accuracy`."""

from dataclasses import dataclass
from typing import Annotated

from castwise.spec.options import (
    COUNT,
    DURATION,
    PRECISIONS,
    SHARE,
    WORKLOADS,
    OptimizerStates,
    Option,
    SharedOptions,
    Techniques,
    parse_model,
)

SEEDS = 12


@dataclass(frozen=True)
class AccuracyOptions(SharedOptions):
    """What `castwise accuracy` trains; None is what suits the workload and the machine."""

    workload: Annotated[
        str,
        Option(
            "A workload that a suite trains on real data (`castwise list suites`), or FILE.py:FUNCTION.",
            parse=parse_model,
            **WORKLOADS,
        ),
    ]
    precisions: Annotated[
        tuple[str, ...] | None,
        Option(
            "Precisions, comma-separated; the first is the baseline, unless fp32 is among them. Default: those of "
            "fp32, tf32, fp16-mixed and bf16-mixed that the device has.",
            **PRECISIONS,
        ),
    ] = None
    margin: Annotated[
        float | None,
        Option(
            "The largest difference that does not matter. Default: 0.3% (0.3 points) of an accuracy, 1% of a "
            "perplexity or another score.",
            **SHARE,
        ),
    ] = None
    seeds: Annotated[int, Option("Runs of each precision at the most, with seeds 0, 1, …", "How long", **COUNT)] = SEEDS
    budget_seconds: Annotated[
        float | None,
        Option("Wall time: 10min. No seed begins that would end after it.", "How long", keyword="budget", **DURATION),
    ] = None
    epochs: Annotated[
        int | None, Option("Epochs a run at the most; its schedule stays the recipe's.", "How long", **COUNT)
    ] = None
    max_steps: Annotated[int | None, Option("Steps an epoch at the most.", "How long", **COUNT)] = None
    techniques: Techniques = None
    optimizer_states: OptimizerStates = None
    loss_scale: Annotated[
        str | None, Option("none, dynamic, dynamic-apex or a number, for precisions with float16.")
    ] = None
    suite: Annotated[
        str | None, Option("The suite whose recipe is taken, if several train the workload. Default: the first.")
    ] = None
    data_set: Annotated[str | None, Option("The data set, if suites train the workload on several.")] = None
