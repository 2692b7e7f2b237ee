"""Changes to a training loop that leave what it computes alone: one row each, data only.

`worker/techniques/` is where a row is applied; this module is what the command line, the plan and the reports know
of it, without torch, and `technique_rules.py` says which trials can have one. What the plain loop does already is no
technique: `ALREADY_DEFAULT` says so to whoever asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from castwise.errors import UsageError, unknown_name
from castwise.spec.types import TrialKind, Unit

# What a technique does to the numbers, from the least to the most:
# `bits`      the same operations on the same numbers
# `rounding`  the same formulas; sums in another order, or intermediate results rounded at other places
# `draws`     other random numbers of the same distribution (dropout masks, augmentation, order)
# `shape`     another model, with weights that the published one does not have
Numerics = Literal["bits", "rounding", "draws", "shape"]

_JOIN = "+"
NONE = "none"


@dataclass(frozen=True)
class Technique:
    """A change to the loop.

    Attributes:
        name: The name users write.
        summary: What it does, in a line.
        needs: What it needs, in words, where it is more than the other fields say; empty where it is not.
        cost: What it costs, in words.
        numerics: What it does to the numbers.
        devices: The device types that have it.
        kinds: The kinds of trial whose loop has what it changes.
        units: The units of the workloads that it fits.
        optimizers: The optimizers of `torch.optim` it fits; empty fits all.
        families: The families of workloads it fits; empty fits all.
        on_several_gpus: The technique that it needs beside it where several GPUs share a step; empty needs none.
        fits_own_models: Whether it may fit a user's own model, of which nothing is known before it is built; what its
            layers or its optimizer do not allow is refused there.
        excludes: Techniques that cannot stand beside it.
    """

    name: str
    summary: str
    cost: str
    numerics: Numerics
    needs: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    kinds: tuple[TrialKind, ...] = ("steady", "training")
    units: tuple[Unit, ...] = ("images", "tokens", "samples")
    optimizers: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    on_several_gpus: str = ""
    fits_own_models: bool = True
    excludes: tuple[str, ...] = ()

    @property
    def changes_model(self) -> bool:
        """Return whether the model is another one; such a technique is taken only where it is named."""
        return self.numerics == "shape"


# In the order in which they are applied, and written.
TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="resident-data",
        summary="the data set lies on the device as bytes; crop, flip and normalisation happen there",
        needs="a data set of images that are augmented by crop and flip at most, or synthetic images",
        cost="the data set's bytes in device memory (MNIST 47 MB, CIFAR 154 MB)",
        numerics="draws",
        kinds=("training",),
        units=("images",),
        excludes=("loader-workers", "pinned-transfer"),
        fits_own_models=False,
    ),
    Technique(
        name="loader-workers",
        summary="a loader process a core (8 at the most), kept from epoch to epoch, each 4 batches ahead",
        needs="a run that reads its data through a loader",
        cost="cores, and a batch of host memory for each of 4 places a process",
        numerics="draws",
        kinds=("training",),
        units=("images",),
        fits_own_models=False,
    ),
    Technique(
        name="pinned-transfer",
        summary="batches lie in page-locked memory and are copied while the host goes on",
        needs="a run that reads its data through a loader",
        cost="page-locked host memory",
        numerics="bits",
        devices=("cuda",),
        kinds=("training",),
        units=("images",),
        fits_own_models=False,
    ),
    Technique(
        name="channels-last",
        summary="weights and activations of convolutions lie with channels innermost, as Tensor Cores read them",
        needs="a model of images",
        cost="none",
        numerics="rounding",
        units=("images",),
    ),
    Technique(
        name="cudnn-search",
        summary="cuDNN tries its algorithms for each shape and keeps the fastest",
        needs="convolutions",
        cost="the first step: seconds, more than a minute in float32",
        numerics="rounding",
        devices=("cuda",),
        units=("images",),
    ),
    Technique(
        name="foreach-optimizer",
        summary="the optimizer updates all weights by a few operations on lists of them",
        needs="a CPU: on a GPU torch's optimizers do so unasked",
        cost="memory for intermediate lists, up to the size of the weights",
        numerics="rounding",
        devices=("cpu",),
        excludes=("fused-optimizer",),
    ),
    Technique(
        name="fused-optimizer",
        summary="the optimizer updates all weights in one kernel, which also skips steps that overflowed",
        cost="none",
        numerics="rounding",
        optimizers=("SGD", "Adam", "AdamW"),
    ),
    Technique(
        name="no-step-sync",
        summary="the host reads nothing from the device within a step: neither the loss nor whether a step overflowed",
        needs="a loop that reads: one with dynamic loss scaling, or whose source reads the loss each step",
        cost="with dynamic loss scaling and no fused optimizer a copy of weights and optimizer state",
        numerics="rounding",
    ),
    Technique(
        name="compiled-update",
        summary="what follows backward (unscaling, clipping, update, rounding of masters) is one compiled function",
        needs="what compile needs",
        cost="the second step: seconds; gradients, weights and states are read and written once",
        numerics="rounding",
        optimizers=("SGD", "Adam", "AdamW", "Adadelta"),
        on_several_gpus="coalesced-reduce",
        excludes=("fused-optimizer", "foreach-optimizer"),
    ),
    Technique(
        name="pad-vocabulary",
        summary="the decoder has 33,280 words for 33,278, a multiple of 64; the others' probability is 0",
        cost="2 rows of the decoder",
        numerics="shape",
        families=("rnn_lm",),
        fits_own_models=False,
    ),
    Technique(
        name="pad-hidden",
        summary="embedding and state are a multiple of 64 wide (1,500 becomes 1,536), the further units 0",
        needs="a width that is no multiple of 8",
        cost="the further units' weights",
        numerics="shape",
        families=("rnn_lm",),
        fits_own_models=False,
    ),
    Technique(
        name="pad-channels-4",
        summary="images have 4 channels, the further ones 0, so that Tensor Cores take the first convolution",
        cost="a third more input bytes",
        numerics="shape",
        units=("images",),
        excludes=("pad-channels-8",),
        fits_own_models=False,
    ),
    Technique(
        name="pad-channels-8",
        summary="the same with 8 channels",
        cost="2.7 times the input bytes",
        numerics="shape",
        units=("images",),
        fits_own_models=False,
    ),
    Technique(
        name="space-to-depth",
        summary="the first convolution, of stride 2, reads 2 by 2 pixels as channels, for Tensor Cores",
        needs="a model that begins with a convolution of stride 2",
        cost="a copy of the images a step",
        numerics="rounding",
        units=("images",),
        excludes=("pad-channels-4", "pad-channels-8"),
    ),
    Technique(
        name="matmul-stem",
        summary="the first convolution, of stride 1, is a matrix product over its windows",
        needs="a model that begins with a convolution of stride 1 and short windows",
        cost="the windows, written out: 9 numbers a pixel and channel",
        numerics="rounding",
        units=("images",),
        excludes=("pad-channels-4", "pad-channels-8", "space-to-depth"),
    ),
    Technique(
        name="max-pool-kernel",
        summary="max poolings of 3 by 3 with stride 2 run by kernels that read each window about once in backward",
        needs="channels-last, Triton, and such a pooling",
        cost="none",
        numerics="rounding",
        devices=("cuda",),
        units=("images",),
    ),
    Technique(
        name="batch-norm-kernel",
        summary="batch norm, and additions, dropout and activation beside it, run by kernels that read images twice",
        needs="channels-last, Triton, and a model with batch norm that torch.fx can trace",
        cost="none",
        numerics="draws",
        devices=("cuda",),
        units=("images",),
    ),
    Technique(
        name="chunked-loss",
        summary="decoder and loss run over an 8th of the words at a time and again in backward: no logits are kept",
        cost="the decoder's product is computed twice",
        numerics="rounding",
        families=("rnn_lm",),
        fits_own_models=False,
    ),
    Technique(
        name="compile",
        summary="torch.compile of forward, loss and backward, for the batch's shape",
        needs="a C++ compiler on a CPU, Triton and a C compiler on a GPU of compute capability 7.0 or newer",
        cost="the first step: seconds to minutes; a last batch of another shape runs uncompiled",
        numerics="draws",
        excludes=("compile-max-autotune",),
    ),
    Technique(
        name="compile-max-autotune",
        summary="the same, and Inductor times several kernels for each product and convolution",
        needs="the same",
        cost="the first step: minutes",
        numerics="draws",
    ),
    Technique(
        name="coalesced-reduce",
        summary="ranks average all gradients at once behind backward, without DistributedDataParallel",
        needs="several GPUs with a process each (ddp), and ranks that train the same weights in every step",
        cost="once or twice the gradients' memory; none are averaged while backward runs",
        numerics="rounding",
    ),
    Technique(
        name="cuda-graph",
        summary="the whole step, optimizer and loss scaling included, is one launch",
        needs="shapes and control flow that do not depend on data, and a schedule that leaves momentum alone",
        cost="a copy of the batch a step; the step's memory is held for good",
        numerics="rounding",
        devices=("cuda",),
        on_several_gpus="coalesced-reduce",
        excludes=("cuda-graph-8",),
    ),
    Technique(
        name="cuda-graph-8",
        summary="8 whole steps are one launch",
        needs="the same, and a rate that stays within an epoch",
        cost="places for 8 batches; losses are there every 8 steps",
        numerics="rounding",
        devices=("cuda",),
        on_several_gpus="coalesced-reduce",
    ),
)

# What a user may look for among the techniques and every trial does.
ALREADY_DEFAULT: dict[str, str] = {
    "set-to-none": "gradients are set to None, as torch does since 2.0",
    "zero-grad-none": "gradients are set to None, as torch does since 2.0",
}

# The techniques that compile something in the first step, and those whose steps are CUDA graphs.
COMPILING = ("compiled-update", "compile", "compile-max-autotune")
GRAPHS = ("cuda-graph", "cuda-graph-8")
# Those whose loops decide on the device whether dynamic loss scaling skips a step.
DECIDING_ON_DEVICE = frozenset({"fused-optimizer", "no-step-sync", "compiled-update", *GRAPHS})
# Those that one GPU has nothing to do for: the same loop on one is the loop without them.
FOR_SEVERAL_GPUS = ("coalesced-reduce",)

# Names for several at once: what applies to a cell is taken when the plan is made, and stands in the spec by name.
TUNED = "tuned"
SETS: dict[str, tuple[str, ...]] = {
    TUNED: ("channels-last", "cudnn-search", "fused-optimizer"),
    "compiled": ("channels-last", "cudnn-search", "fused-optimizer", "compile"),
}


def find_technique(name: str) -> Technique:
    """Return the row with this name, in any case of letters.

    Raises:
        UsageError: No row has the name; the message offers the nearest, or says that the plain loop has it.
    """
    wanted = name.strip().lower()
    if wanted in ALREADY_DEFAULT:
        raise UsageError(f"'{name}' is no technique: {ALREADY_DEFAULT[wanted]}. Leave it out.")
    for row in TECHNIQUES:
        if wanted == row.name:
            return row
    raise unknown_name("technique", name, [*(row.name for row in TECHNIQUES), *SETS, NONE])


def for_one_gpu(names: Sequence[str]) -> tuple[str, ...]:
    """Return the techniques that the same loop has on one GPU."""
    return tuple(name for name in names if name not in FOR_SEVERAL_GPUS)


def normalize_for_world_size(names: Sequence[str], world_size: int, most_gpus: int) -> tuple[str, ...]:
    """Return the techniques of a loop on some GPUs, where it is set beside the same one on others.

    Args:
        names: What was asked for.
        world_size: The GPUs.
        most_gpus: The most that it runs on; where that is one as well, what was asked for stands.
    """
    return for_one_gpu(names) if world_size == 1 < most_gpus else tuple(names)


def parse_techniques(text: str) -> tuple[str, ...]:
    """Return the names in `channels-last+compile` or `none`, each once, in the registry's order; sets stay sets.

    Raises:
        UsageError: A name is unknown, or two of them exclude each other.
    """
    wanted = [part.strip().lower() for part in text.split(_JOIN)]
    if wanted == [NONE]:
        return ()
    if NONE in wanted or "" in wanted:
        raise UsageError(f"'{text}' is no list of techniques. Join them with '+', or write none for the plain loop.")
    sets = [name for name in wanted if name in SETS]
    rows = {find_technique(name).name for name in wanted if name not in SETS}
    _check_exclusions(rows.union(*(SETS[name] for name in sets)))
    return (*sorted(sets), *in_order(rows))


def times_kernels(names: Sequence[str]) -> bool:
    """Return whether one of these techniques times kernels in the first step, to keep the fastest."""
    return not _TIMING_KERNELS.isdisjoint(names)


def compiles(names: Sequence[str]) -> bool:
    """Return whether one of these techniques compiles something in the first step."""
    return not set(COMPILING).isdisjoint(names)


def times_kernels_while_compiling(names: Sequence[str]) -> bool:
    """Return whether one of these techniques times kernels before its code is ready, and not when that first runs."""
    return "compile-max-autotune" in names


def needs_of(row: Technique) -> str:
    """Return in words what a technique needs of device, workload and optimizer; "–" where it needs nothing."""
    needs = [row.needs] if row.needs else []
    if row.devices == ("cuda",):
        needs.append("a CUDA device")
    if row.optimizers:
        needs.append(f"one of the optimizers {', '.join(row.optimizers)}")
    if row.families:
        needs.append("a recurrent language model")
    if row.on_several_gpus:
        needs.append(f"one GPU, or {row.on_several_gpus}")
    if row.excludes:
        needs.append(f"not beside {', '.join(row.excludes)}")
    return "; ".join(needs) or "–"


def join(names: Sequence[str]) -> str:
    """Return techniques as users write them: `channels-last+compile`, or `none`."""
    return _JOIN.join(names) or NONE


# Inductor times Triton's configurations of a kernel without max-autotune, too, though few of them.
_TIMING_KERNELS = frozenset({*COMPILING, "cudnn-search"})


def _check_exclusions(names: set[str]) -> None:
    for row in TECHNIQUES:
        for other in row.excludes:
            if row.name in names and other in names:
                raise UsageError(f"{row.name} and {other} exclude each other. Name one of them.")


def in_order(names: set[str]) -> tuple[str, ...]:
    """Return names in the registry's order."""
    return tuple(row.name for row in TECHNIQUES if row.name in names)
