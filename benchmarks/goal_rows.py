"""The rows of the speed goals: what is trained, the goal, the loops by hand and castwise's loops. Data only."""

from dataclasses import dataclass, replace
from typing import Literal

# `rate`        units (images, tokens, samples) per second, at least
# `steps`       seconds of a number of steps, at most
# `run`         seconds of all epochs of a published run, each as long as the median one after the first, at most
# `efficiency`  throughput on several GPUs over that of as many single ones, at least
Measure = Literal["rate", "steps", "run", "efficiency"]


@dataclass(frozen=True)
class HandLoop:
    """A loop by hand."""

    precision: str  # "tf32", "fp16-mixed" or "bf16-mixed"
    tuned: bool = True  # it has channels_last, cuDNN's search and a fused optimizer, if they apply
    compiled: bool = False  # the model is under torch.compile
    graph: bool = False  # the whole step is a CUDA graph

    @property
    def label(self) -> str:
        """Return it in words: "bf16-mixed, tuned, compiled"."""
        names = [name for name in ("tuned", "compiled", "graph") if getattr(self, name)]
        return ", ".join([self.precision, *names]) if names else f"{self.precision}, default"


@dataclass(frozen=True)
class OurLoop:
    """A loop of castwise's."""

    precision: str
    techniques: str  # joined by "+"

    @property
    def label(self) -> str:
        """Return it in words."""
        return f"{self.precision}, {self.techniques}"


@dataclass(frozen=True)
class GoalRow:
    """One goal."""

    name: str  # what the command line calls it
    workload: str
    batch_size: int  # samples per GPU and step
    measure: Measure
    goal: float  # in SI units
    hand: tuple[HandLoop, ...]  # the most promising first
    ours: tuple[OurLoop, ...]  # the most promising first
    num_steps: int = 1  # that `steps` times
    suite: str | None = None  # whose run it is, for `run`
    data_set: str | None = None  # of the run
    world_size: int = 1
    block_seconds: float = 0.2


_BF16_COMPILED = HandLoop("bf16-mixed", compiled=True)
_FP16_COMPILED = HandLoop("fp16-mixed", compiled=True)
# compiled-update took a minute to compile for ResNet-50's 161 tensors, and was no faster than the fused optimizer.
_COMPILED = "channels-last+cudnn-search+fused-optimizer+compile"
_IMAGES = f"{_COMPILED}+cuda-graph"
_NORMED = f"{_IMAGES}+batch-norm-kernel"
_ONE_UPDATE = "channels-last+cudnn-search+compiled-update+matmul-stem+batch-norm-kernel+compile+cuda-graph"
_STRIDED = f"{_NORMED}+space-to-depth"
_POOLED = f"{_STRIDED}+max-pool-kernel"
_FUSED = OurLoop("bf16-mixed", _IMAGES)


def _imagenet(name: str, workload: str, batch_size: int, goal: float, techniques: str, *more: HandLoop) -> GoalRow:
    ours = (OurLoop("bf16-master", techniques), _FUSED)
    return GoalRow(name, workload, batch_size, "rate", goal, (_BF16_COMPILED, *more), ours)


ROWS: tuple[GoalRow, ...] = (
    GoalRow(
        name="mlp",
        workload="mlp-4096",
        batch_size=512,
        measure="steps",
        goal=0.090,
        num_steps=150,
        # Compiling made all three precisions slower; float32 with TF32 products was the fastest.
        hand=(HandLoop("tf32"), HandLoop("tf32", tuned=False)),
        ours=(
            OurLoop("bf16-master", "compiled-update+compile+cuda-graph-8"),
            OurLoop("bf16-mixed", "fused-optimizer+compile+cuda-graph"),
        ),
        block_seconds=0.09,
    ),
    _imagenet("resnet50", "resnet50", 256, 8000.0, _POOLED, _FP16_COMPILED),
    _imagenet("resnet101", "resnet101", 128, 4400.0, _POOLED),
    _imagenet("inception", "inception_v3", 128, 4500.0, _POOLED),
    _imagenet("efficientnet", "efficientnet_b0", 128, 8000.0, _STRIDED),
    GoalRow(
        name="wrn",
        workload="wrn-28-10",
        batch_size=128,
        measure="rate",
        goal=11_000.0,
        hand=(_BF16_COMPILED,),
        ours=(
            OurLoop("bf16-master", _ONE_UPDATE),
            OurLoop("bf16-master", f"{_NORMED}+matmul-stem"),
            _FUSED,
        ),
    ),
    GoalRow(
        name="wrn-run",
        workload="wrn-28-10",
        batch_size=128,
        measure="run",
        goal=46.0,
        hand=(_BF16_COMPILED,),
        # A graph follows the schedule, which moves the rate each step, with either of these two updates.
        ours=(
            OurLoop("bf16-master", f"resident-data+no-step-sync+{_ONE_UPDATE}"),
            OurLoop("bf16-mixed", f"resident-data+no-step-sync+{_NORMED}+matmul-stem"),
            OurLoop("bf16-mixed", f"resident-data+no-step-sync+{_IMAGES}"),
        ),
        suite="wrn-cifar10",
        data_set="cifar10",
    ),
    GoalRow(
        name="mnist",
        workload="mnist-cnn",
        batch_size=512,
        measure="run",
        goal=1.5,
        hand=(HandLoop("bf16-mixed", graph=True),),
        ours=(
            OurLoop("bf16-mixed", "resident-data+compiled-update+matmul-stem+compile+cuda-graph"),
            OurLoop(
                "bf16-mixed",
                "resident-data+channels-last+cudnn-search+compiled-update+matmul-stem+compile+cuda-graph-8",
            ),
            OurLoop("bf16-mixed", "resident-data+channels-last+cudnn-search+compile+cuda-graph"),
        ),
        suite="tensorcore",
        data_set="mnist",
    ),
    GoalRow(
        name="lstm-200",
        workload="lstm-lm",
        batch_size=20,
        measure="rate",
        goal=500_000.0,
        hand=(HandLoop("tf32"),),
        ours=(
            OurLoop("bf16-mixed", "compiled-update+compile+cuda-graph-8"),
            OurLoop("bf16-mixed", "compiled-update+pad-vocabulary+compile+cuda-graph-8"),
            OurLoop("bf16-mixed", "fused-optimizer+compile+cuda-graph"),
        ),
    ),
    GoalRow(
        name="lstm-1500",
        workload="lstm-lm-1500",
        batch_size=80,
        measure="rate",
        goal=260_000.0,
        hand=(HandLoop("bf16-mixed"),),
        # The first is another model, 1,536 wide and with 2 words more.
        ours=(
            OurLoop("bf16-mixed", "compiled-update+pad-vocabulary+pad-hidden+compile+cuda-graph"),
            OurLoop("bf16-mixed", "compiled-update+compile+cuda-graph"),
            OurLoop("bf16-mixed", "fused-optimizer+compile+cuda-graph"),
        ),
    ),
    GoalRow(
        name="resnet50-x4",
        workload="resnet50",
        batch_size=256,
        measure="efficiency",
        goal=0.98,
        hand=(HandLoop("bf16-mixed"), _BF16_COMPILED),
        ours=(
            # Its gradients are of 16 bits, but for batch norm's: the collective moves half the bytes.
            OurLoop("bf16-master", f"{_POOLED}+coalesced-reduce"),
            OurLoop("bf16-mixed", f"{_POOLED}+coalesced-reduce"),
            OurLoop("bf16-mixed", f"{_COMPILED}+batch-norm-kernel+space-to-depth+max-pool-kernel"),
            OurLoop("bf16-mixed", _COMPILED),
        ),
        world_size=4,
    ),
)


def tiny(row: GoalRow, device: str) -> GoalRow:
    """Return a row with the smallest sizes; its figures mean nothing."""
    hand = tuple(replace(loop, compiled=loop.compiled and device != "cpu") for loop in row.hand)
    world_size = 2 if row.world_size > 1 and device == "cpu" else row.world_size
    return replace(row, batch_size=min(row.batch_size, 8), hand=hand, world_size=world_size, block_seconds=0.02)


def find_rows(text: str | None) -> list[GoalRow]:
    """Return the rows with these names, joined by commas; all of them for None.

    Raises:
        ValueError: No row has one of the names.
    """
    if text is None:
        return list(ROWS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {row.name: row for row in ROWS}
    for name in names:
        if name not in known:
            raise ValueError(f"No row named '{name}'. Rows: {', '.join(known)}.")
    return [known[name] for name in names]
