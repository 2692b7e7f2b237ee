"""The options of `castwise fits`."""

from dataclasses import dataclass
from typing import Annotated

from castwise.spec.options import COUNT, DURATION, PRECISIONS, ModelOrScript, OptimizerStates, Option, Techniques

DEFAULT_GPUS = ("L4", "RTX 4090", "A100-SXM4-80GB", "H100")
DEFAULT_PRECISIONS = ("fp32", "fp16-mixed", "bf16-mixed")
DEFAULT_TECHNIQUES = ("none", "activation-checkpointing")


@dataclass(frozen=True)
class FitsOptions:
    """What `castwise fits` predicts; None is what suits."""

    workload: ModelOrScript
    gpus: Annotated[
        tuple[str, ...] | None,
        Option(
            f"GPUs, comma-separated (`castwise list devices`): 'RTX 4090,L4,H100'. Default: {', '.join(DEFAULT_GPUS)}.",
            keyword="gpu",
        ),
    ] = None
    batch_size: Annotated[int | None, Option("Samples per step. Default: the workload's own.", **COUNT)] = None
    precisions: Annotated[
        tuple[str, ...] | None,
        Option(
            f"Precisions, comma-separated. Default: {', '.join(DEFAULT_PRECISIONS)}; a script's own comes first.",
            **PRECISIONS,
        ),
    ] = None
    techniques: Techniques = None
    optimizer_states: OptimizerStates = None
    timeout_seconds: Annotated[
        float | None,
        Option("How long one loop may be traced before it is given up.", "How long", flags=("--timeout",), **DURATION),
    ] = None
