"""Techniques: changes to a training loop that do not change what it computes, one row each.

A row says all about a technique: what it does and costs, which trials can have it, which settings of the step it makes,
and how `castwise tune` searches with it. Nothing else names a technique. To add one, add a row.
"""

import itertools
import math
import os
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal

from castwise.errors import UsageError, unknown_name
from castwise.registry import technique_conditions as conditions
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import CauseName, Numerics, TrialKind, Unit

_JOIN = "+"
NONE = "none"
PRECISION = "precision"  # stands for a change of precision in `tried_with` and `interacts_with`
TUNED, COMPILED = "tuned", "compiled"  # names for several techniques at once
_MOST_WORKERS = 8  # more loader processes were not seen to help one GPU, and each holds batches; chosen here
_BATCHES_AHEAD = 4


class Rank(IntEnum):
    """When a search tries a change: the lowest first.

    A loop that waits for its data gains from nothing else, and compiling costs seconds to minutes in every process.
    """

    DATA = 0
    PRECISION = 1
    CHEAP = 2
    COMPILE = 3
    AUTOTUNE = 4
    BATCH = 5


# PyTorch's kernels of attention, as its switches `torch.backends.cuda.enable_NAME_sdp` call them.
ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")

WhyNot = Callable[[TrialSpec], str | None]  # returns why a trial cannot have a technique, None if it can


@dataclass(frozen=True)
class ModelChange:
    """A function that changes a float32 model in place, before its precision is applied."""

    function: str  # package.module:function; the worker imports it, the emitter copies its source
    arguments: tuple[Hashable, ...] = ()  # after the model


# What can apply a setting besides castwise's own loop: `castwise.apply`, the hooks of a script, and an emitted script.
Applier = Literal["apply", "script", "emit"]


def _setting(default: Any, *appliers: Applier) -> Any:
    return field(default=default, metadata={"appliers": appliers})


@dataclass(frozen=True)
class StepConfig:
    """The settings of a step that techniques change, with what can apply each; the defaults are the plain loop."""

    resident_data: bool = _setting(False, "emit")  # the data set lies on the device and is augmented there
    loader_workers: bool = _setting(False, "script")  # as many loader processes as help, kept from epoch to epoch
    # Batches are copied from page-locked memory while the host goes on.
    pinned_transfer: bool = _setting(False, "script")
    channels_last: bool = _setting(False, "apply", "script", "emit")
    cudnn_search: bool = _setting(False, "apply", "script", "emit")  # torch.backends.cudnn.benchmark
    # torch.backends.cuda.matmul.allow_fp16_accumulation
    fp16_accumulation: bool = _setting(False, "apply", "script", "emit")
    # The only kernels that attention may run in, of ATTENTION_KERNELS; all may without one.
    attention: str = _setting("", "apply", "emit")
    optimizer_arguments: tuple[tuple[str, bool], ...] = _setting((), "apply", "script", "emit")  # `fused` or `foreach`
    # What Adam keeps its state in, as torchao has it: "bf16", "8-bit", "4-bit" or "fp8"; empty for the weights' type.
    optimizer_state: str = _setting("", "apply", "script", "emit")
    # Dynamic loss scaling decides on the device whether a step is skipped.
    scales_on_device: bool = _setting(False, "apply", "script", "emit")
    reads_loss: bool = _setting(True, "apply", "emit")  # the host may read the loss each step, if the source does
    model_changes: tuple[ModelChange, ...] = _setting((), "emit")
    num_channels: int | None = _setting(None, "emit")  # images are padded to so many channels
    # Of `Task.loss_with`, which does not keep all logits.
    loss_options: tuple[tuple[str, int | bool], ...] = _setting((), "emit")
    compile_mode: str | None = _setting(None, "apply", "script", "emit")  # of torch.compile; None compiles nothing
    # It compiles each repeated block of the model, not the whole loss.
    compile_blocks: bool = _setting(False, "apply", "emit")
    compiled_update: bool = _setting(False, "emit")  # what follows backward is one compiled function
    coalesced_reduce: bool = _setting(False)  # ranks average all gradients at once after backward
    ddp_arguments: tuple[tuple[str, bool | int], ...] = _setting((), "script")  # of DistributedDataParallel
    reduces_in_bf16: bool = _setting(False, "script")  # ranks add up gradients that are rounded to bfloat16
    keeps_whole_weights: bool = _setting(False)  # FSDP2 gathers weights once a step: backward has those of forward
    cuda_graph: bool = _setting(False, "emit")
    steps_per_launch: int = _setting(1, "emit")

    @property
    def reads_rates_on_device(self) -> bool:
        """Return whether a learning rate that changes has to be a tensor: a number would be captured or compiled in."""
        return self.cuda_graph or self.compiled_update

    def recipe(self, recipe: Recipe) -> Recipe:
        loader = recipe.loader
        if self.loader_workers:
            workers = max(loader.num_workers, min(_MOST_WORKERS, len(os.sched_getaffinity(0))))
            update = {"num_workers": workers, "persistent": True, "prefetch_batches": _BATCHES_AHEAD}
            loader = loader.model_copy(update=update)
        if self.pinned_transfer:
            loader = loader.model_copy(update={"pin_memory": True, "non_blocking": True})
        reads = recipe.read_loss_every_step and self.reads_loss
        return recipe.model_copy(update={"loader": loader, "read_loss_every_step": reads})


PLAIN = StepConfig()
_ADDED_UP = ("model_changes", "ddp_arguments")  # of several techniques


@dataclass(frozen=True)
class Code:
    """What to write for a technique in a loop of plain PyTorch with `model`, `optimizer`, `x`, and in frameworks."""

    model: str = ""  # a line before the loop
    loader: str = ""  # arguments of the DataLoader
    optimizer: str = ""  # an argument of the optimizer
    step: str = ""  # a line at the beginning of the step
    # Arguments that make the framework do so; in its loop, the lines of model, loader and optimizer are the user's.
    lightning: str = ""  # of its Trainer
    accelerate: str = ""  # of its Accelerator
    transformers: str = ""  # of its TrainingArguments


@dataclass(frozen=True)
class Technique:
    """A change to the loop. An empty tuple of names fits all."""

    name: str
    summary: str
    cost: str
    # What it does to the numbers. `bits`: nothing. `rounding`: the same formulas, rounded at other places or summed in
    # another order. `draws`: other random numbers of the same distribution. `sums`: products added up in fewer bits.
    # `state`: an optimizer's state in fewer bits. `shape`: further weights.
    numerics: Numerics
    # Fields of `StepConfig`; those in `_ADDED_UP` add up.
    settings: Mapping[str, Any] = field(hash=False)
    needs: str = ""  # in words, if that is more than the other fields say
    code: Code | None = None  # None if it takes more lines than one copies from a terminal
    # How much it complicates a loop, beside `Precision.loop_changes`: 1 is an argument or a line.
    loop_changes: int = 1

    # Which trials can have it.
    devices: tuple[str, ...] = ("cpu", "cuda", "xpu", "mps")
    kinds: tuple[TrialKind, ...] = ("steady", "training")
    units: tuple[Unit, ...] = ("images", "tokens", "samples")
    optimizers: tuple[str, ...] = ()  # of torch.optim
    families: tuple[str, ...] = ()
    layer: str = ""  # the kind of layer, of those in `Trial.layers`, without which it finds nothing to do
    acts_on: str = ""  # the part of a model that it changes
    absent_in: tuple[str, ...] = ()  # families, and beginnings of model names, without that part
    requires: str = ""  # another technique
    required_on_several_gpus: str = ""  # the technique that it requires there
    fits_user_models: bool = True  # nothing is known of one before it is built; unfit layers are refused then
    excludes: tuple[str, ...] = ()
    needs_triton: bool = False
    only_on_several_gpus: bool = False
    why_not: WhyNot | None = None  # the reason, for conditions beyond membership
    sets: tuple[str, ...] = ()
    cures: tuple[CauseName, ...] = ()  # why a step is slow that it is against; of several the first row is named

    # How a search uses it.
    searched: bool = True  # whether it tries it at all
    rank: Rank = Rank.CHEAP
    tried_after: str = ""  # a technique that the loop must have first
    tried_with: tuple[str, ...] = ()  # tried together with it, too: one alone may not pay
    interacts_with: tuple[str, ...] = ()  # change what this one gains; it is tried again after them
    removes_waiting: bool = False  # the device's, at any precision
    only_saves_memory: bool = False  # it takes time, and is tried if memory is the limit
    # What it can take off a step at most: a time, and traffic of the GPU's memory for each parameter.
    saves_seconds: float = math.inf
    saves_bytes: float = math.inf
    compile_cost: float = 0.0  # in times what `compile` takes
    times_kernels: bool = False  # in the first step, to keep the fastest; all that compiles does, in Inductor
    times_while_compiling: bool = False  # before its code is ready, not when that first runs

    def finds_layer(self, layers: Container[str] | None) -> bool:
        """Return whether a model with these kinds of layers has the one that it acts on; also if they are not known."""
        return layers is None or not self.layer or self.layer in layers

    def unfit_settings(self, applier: Applier) -> list[str]:
        """Return those of its settings that cannot be applied so."""
        fields = StepConfig.__dataclass_fields__
        return [name for name in self.settings if applier not in fields[name].metadata["appliers"]]

    @property
    def fits_scripts(self) -> bool:
        """Return whether a script's own loop can be given it from outside."""
        return not self.unfit_settings("script")

    @property
    def is_for_fp8(self) -> bool:
        """Return whether it chooses the layers that run in FP8."""
        return self.why_not is conditions.needs_fp8


_MULTIPLE = 64
_PADDING = "castwise.apply.techniques.padding"
_FIRST_CONV = "castwise.apply.techniques.first_conv"
_CHECKPOINT = "castwise.apply.techniques.activation_checkpointing:checkpoint_blocks"
# The kernel replaces the blocks, and a capture cannot read the state of the random numbers that backward draws again.
_NOT_CHECKPOINTED = ("batch-norm-kernel", "cuda-graph", "cuda-graph-8")
_GRAPH = {"cuda_graph": True, "reads_loss": False, "scales_on_device": True}


# By technique: the kernels, in PyTorch's words and for readers, and why a trial cannot have them.
_ATTENTION: dict[str, tuple[str, str, WhyNot | None]] = {
    "cudnn-attention": ("cudnn", "cuDNN's", conditions.needs_16_bits),
    "flash-attention": ("flash", "FlashAttention's", conditions.needs_16_bits),
    "efficient-attention": ("mem_efficient", "xFormers' memory-efficient", None),
}


def _attention(name: str, kernels: str, whose: str, why_not: WhyNot | None) -> Technique:
    """Return the technique that leaves attention one kind of kernels."""
    return Technique(
        name=name,
        summary=f"attention runs in {whose} kernels, and not in those that PyTorch would choose",
        needs="scaled_dot_product_attention, as most transformers have it, of shapes that these kernels take",
        cost="none",
        numerics="rounding",
        devices=("cuda",),
        layer="attention",
        excludes=tuple(other for other in _ATTENTION if other != name),
        settings={"attention": kernels},
        acts_on="attention",
        absent_in=("mlp", "mnist_cnn", "wide_resnet", "resnet9", "dpn", "rnn_lm", "fastai_resnet"),
        why_not=why_not,
        searched=why_not is not None,  # in float32 PyTorch takes these by itself, and in 16 bits the others are faster
    )


# By what Adam's state is kept in: bytes of a parameter's two numbers, and transformers' name of such an optimizer.
STATES: dict[str, tuple[str, str]] = {
    "bf16": ("4", ""),
    "8-bit": ("2", 'optim="adamw_torch_8bit"'),
    "fp8": ("2", ""),
    "4-bit": ("1", 'optim="adamw_torch_4bit"'),
}
NARROW: tuple[Numerics, ...] = ("sums", "state")  # that need an accuracy verdict, as a precision does
STATE = "adam-state-"  # begins the names of techniques that differ in what Adam's state is kept in


def loops_with_states(loops: Sequence[str], states: Sequence[str]) -> tuple[str, ...]:
    """Return each loop with Adam's state kept in each of these: "compile+adam-state-8-bit"; in "fp32" as it is.

    Raises:
        UsageError: There is no such state.
    """
    written = {"fp32": "", **{kind.replace("-", ""): f"{STATE}{kind}" for kind in STATES}}
    found = []
    for loop, state in itertools.product(loops, states):
        added = written.get(state.strip().lower().replace("-", "").replace("float32", "fp32"))
        if added is None:
            raise unknown_name("optimizer state", state, ("fp32", *STATES))
        found.append(_JOIN.join(name for name in (loop if loop != NONE or not added else "", added) if name))
    return tuple(found)


def _adam_state(kind: str, num_bytes: str, of_transformers: str) -> Technique:
    others = [f"{STATE}{other}" for other in STATES if other != kind]
    name = {"bf16": "", "fp8": "Fp8"}.get(kind, kind.replace("-", ""))
    return Technique(
        name=f"{STATE}{kind}",
        summary=f"Adam keeps its state in {kind}: {num_bytes} bytes a parameter in place of 8",
        needs="Adam or AdamW, and torchao",
        cost="accuracy, which is to be checked; the first step compiles an update for each shape",
        code=Code(
            model=f"optimizer = torchao.optim.AdamW{name}(model.parameters(), lr=lr)", transformers=of_transformers
        )
        if name
        else None,
        loop_changes=2,
        numerics="state",
        optimizers=("Adam", "AdamW"),
        excludes=(*others, "fused-optimizer", "foreach-optimizer", "compiled-update", "cuda-graph", "cuda-graph-8"),
        settings={"optimizer_state": kind},
        needs_triton=True,
        only_saves_memory=True,
    )


def _model_change(function: str, *arguments: int) -> dict[str, Any]:
    return {"model_changes": (ModelChange(function, arguments),)}


def _ddp(name: str, argument: str, value: bool | int, **fields: Any) -> Technique:
    """Return the technique that is an argument of DistributedDataParallel."""
    line = f"# add {argument}={value} to your call of DistributedDataParallel"
    shared: dict[str, Any] = {
        "name": name,
        "cures": ("communication",),
        "code": Code(model=line, transformers=fields.pop("transformers", "")),
        "numerics": "rounding",
        "excludes": ("coalesced-reduce",),
        "settings": {"ddp_arguments": ((argument, value),)},
        "only_on_several_gpus": True,
        "why_not": conditions.has_no_wrapper,
    }
    return Technique(**shared | fields)


# In the order in which they are applied, and written. A fused optimizer and a graph decide on the device whether a step
# is skipped, too: the one takes the overflow flag into its kernel, as GradScaler hands it; the other cannot ask the
# host.
TECHNIQUES: list[Technique] = [
    Technique(
        name="resident-data",
        summary="the data set lies on the device as bytes; crop, flip and normalisation happen there",
        cures=("input",),
        needs="a data set of images that are augmented by crop and flip at most, or synthetic images",
        cost="the data set's bytes in device memory (MNIST 47 MB, CIFAR 154 MB)",
        loop_changes=6,
        numerics="draws",
        kinds=("training",),
        units=("images",),
        excludes=("loader-workers", "pinned-transfer"),
        fits_user_models=False,
        settings={"resident_data": True},
        why_not=conditions.cannot_be_resident,
        sets=(TUNED,),
        rank=Rank.DATA,
        interacts_with=(PRECISION,),  # a step that waits for its data does not gain from faster kernels
        removes_waiting=True,
    ),
    Technique(
        name="loader-workers",
        summary="one loader process per core (at most 8), kept between epochs, each 4 batches ahead",
        cures=("input",),
        needs="a run that reads its data through a loader",
        cost="cores, and host memory for 4 batches per process",
        code=Code(
            loader="num_workers=min(8, os.cpu_count()), prefetch_factor=4",
            transformers="dataloader_num_workers=8, dataloader_prefetch_factor=4",
        ),
        numerics="draws",
        kinds=("training",),
        units=("images",),
        fits_user_models=False,
        settings={"loader_workers": True},
        why_not=conditions.has_no_loader,
        rank=Rank.DATA,
        tried_with=("pinned-transfer",),
        interacts_with=(PRECISION,),
        removes_waiting=True,
    ),
    Technique(
        name="pinned-transfer",
        summary="batches are copied from page-locked memory while the host continues",
        needs="a run that reads its data through a loader",
        cost="page-locked host memory",
        code=Code(loader="pin_memory=True", step="x = x.to(device, non_blocking=True)"),
        numerics="bits",
        devices=("cuda",),
        kinds=("training",),
        units=("images",),
        fits_user_models=False,
        settings={"pinned_transfer": True},
        why_not=conditions.has_no_loader,
        rank=Rank.DATA,
    ),
    Technique(
        name="channels-last",
        summary="weights and activations of convolutions lie with channels innermost, as Tensor Cores read them",
        cures=("layout",),
        needs="an image model",
        cost="none",
        code=Code(
            model="model.to(memory_format=torch.channels_last)",
            step="x = x.contiguous(memory_format=torch.channels_last)",
        ),
        numerics="rounding",
        units=("images",),
        layer="convolution",
        settings={"channels_last": True},
        why_not=conditions.reorders_shards,
        sets=(TUNED, COMPILED),
        # Tensor Cores read channels innermost; float32 on CUDA cores does not.
        tried_with=(PRECISION, "cudnn-search"),
    ),
    Technique(
        name="cudnn-search",
        summary="cuDNN tries its algorithms for each shape and keeps the fastest",
        needs="convolutions",
        cost="the first step: seconds, more than a minute in float32",
        code=Code(model="torch.backends.cudnn.benchmark = True", lightning="benchmark=True"),
        numerics="rounding",
        devices=("cuda",),
        units=("images",),
        layer="convolution",
        settings={"cudnn_search": True},
        sets=(TUNED, COMPILED),
        times_kernels=True,
    ),
    Technique(
        name="fp16-accumulation",
        summary="cuBLAS may add up products of float16 matrices in float16 in place of float32",
        needs="matrix products in float16",
        cost="accuracy, which is to be checked: a sum keeps 11 bits, and overflows above 65,504",
        code=Code(model="torch.backends.cuda.matmul.allow_fp16_accumulation = True"),
        numerics="sums",
        devices=("cuda",),
        settings={"fp16_accumulation": True},
        why_not=conditions.needs_float16,
    ),
    *(_attention(name, *fields) for name, fields in _ATTENTION.items()),
    Technique(
        name="foreach-optimizer",
        summary="the optimizer updates all weights by a few operations on lists of them",
        needs="a CPU: on a GPU torch's optimizers do so by default",
        cost="memory for intermediate lists, up to the size of the weights",
        code=Code(optimizer="foreach=True"),
        numerics="rounding",
        devices=("cpu",),
        excludes=("fused-optimizer",),
        settings={"optimizer_arguments": (("foreach", True),)},
    ),
    Technique(
        name="fused-optimizer",
        summary="the optimizer updates all weights in one kernel, which also skips steps that overflowed",
        cures=("optimizer",),
        cost="none",
        code=Code(optimizer="fused=True", transformers='optim="adamw_torch_fused"'),
        numerics="rounding",
        optimizers=("SGD", "Adam", "AdamW"),
        settings={"optimizer_arguments": (("fused", True),), "scales_on_device": True},
        why_not=conditions.steps_shards,
        sets=(TUNED, COMPILED),
    ),
    *(_adam_state(kind, *fields) for kind, fields in STATES.items()),
    Technique(
        name="no-step-sync",
        summary="the host reads nothing from the device within a step: neither the loss nor whether a step overflowed",
        cures=("synchronisation",),
        needs="dynamic loss scaling, or a source that reads the loss in each step",
        cost="a copy of weights and optimizer state, with dynamic loss scaling and no fused optimizer",
        code=Code(step="# no loss.item() or print(loss) in each step"),
        numerics="rounding",
        settings={"reads_loss": False, "scales_on_device": True},
        why_not=conditions.reads_nothing,
        tried_with=("fused-optimizer",),  # without it, skipping on the device costs copies
    ),
    Technique(
        name="compiled-update",
        summary="what follows backward (unscaling, clipping, update, rounding of masters) is one compiled function",
        needs="what compile needs",
        cost="the second step: seconds; gradients, weights and states are read and written once",
        loop_changes=6,
        numerics="rounding",
        optimizers=("SGD", "Adam", "AdamW", "Adadelta"),
        required_on_several_gpus="coalesced-reduce",
        excludes=("fused-optimizer", "foreach-optimizer"),
        settings={"optimizer_arguments": (("foreach", True),), "scales_on_device": True, "compiled_update": True},
        needs_triton=True,
        why_not=conditions.compiles_momentum,
        rank=Rank.COMPILE,
        interacts_with=(PRECISION,),  # masters cost next to nothing in it
        saves_bytes=28.0,  # AdamW reads four float32 of a parameter and writes three
        compile_cost=0.5,
    ),
    Technique(
        name="pad-vocabulary",
        summary="the vocabulary is padded to a multiple of 64 (BERT's 30,522 to 30,528); the output has no more words",
        cures=("alignment",),
        needs="a linear decoder with as many words as an embedding",
        cost="up to 63 rows of the decoder",
        loop_changes=5,
        numerics="rounding",
        families=("rnn_lm", "transformer"),
        layer="embedding",
        settings=_model_change(f"{_PADDING}:pad_decoder", _MULTIPLE),
    ),
    Technique(
        name="pad-hidden",
        summary="embedding and state are padded to a multiple of 64 (1,500 to 1,536); the added units are 0",
        cures=("alignment",),
        needs="a width that is no multiple of 8",
        cost="the added units' weights",
        loop_changes=5,
        numerics="shape",
        families=("rnn_lm",),
        fits_user_models=False,
        settings=_model_change(f"{_PADDING}:pad_hidden", _MULTIPLE),
        why_not=conditions.is_aligned,
    ),
    Technique(
        name="pad-channels-4",
        summary="images are padded to 4 channels, so that the first convolution runs on Tensor Cores",
        cost="a third more input bytes",
        loop_changes=5,
        numerics="shape",
        units=("images",),
        layer="convolution",
        excludes=("pad-channels-8",),
        fits_user_models=False,
        settings={"num_channels": 4, **_model_change(f"{_PADDING}:pad_first_conv", 4)},
    ),
    Technique(
        name="pad-channels-8",
        summary="the same with 8 channels",
        cost="2.7 times the input bytes",
        loop_changes=5,
        numerics="shape",
        units=("images",),
        layer="convolution",
        fits_user_models=False,
        settings={"num_channels": 8, **_model_change(f"{_PADDING}:pad_first_conv", 8)},
    ),
    Technique(
        name="space-to-depth",
        summary="the first convolution, of stride 2, reads 2 by 2 pixels as channels, to run on Tensor Cores",
        cures=("alignment",),
        needs="a model that begins with a convolution of stride 2",
        cost="a copy of the images per step",
        loop_changes=5,
        numerics="rounding",
        units=("images",),
        layer="convolution",
        excludes=("pad-channels-4", "pad-channels-8"),
        settings=_model_change(f"{_FIRST_CONV}:use_space_to_depth"),
        acts_on="first convolution of stride 2",
        absent_in=("mnist_cnn", "wide_resnet", "resnet9", "dpn", "mlp"),
    ),
    Technique(
        name="matmul-stem",
        summary="the first convolution, of stride 1 or of patches, is a matrix product over its windows",
        cures=("alignment",),
        needs="a model that begins with a convolution of stride 1 and short windows, or of patches side by side",
        cost="memory for the windows: 9 numbers per pixel and channel, of patches 1",
        loop_changes=5,
        numerics="rounding",
        units=("images",),
        layer="convolution",
        excludes=("pad-channels-4", "pad-channels-8", "space-to-depth"),
        settings=_model_change(f"{_FIRST_CONV}:use_matmul_stem"),
        acts_on="first convolution of stride 1 or of patches",
        absent_in=("torchvision", "fastai_resnet", "mlp"),
    ),
    Technique(
        name="max-pool-kernel",
        summary="max poolings of 3 by 3 with stride 2 run by kernels that read each window about once in backward",
        needs="channels-last, Triton, and such a pooling",
        cost="none",
        loop_changes=8,
        numerics="rounding",
        devices=("cuda",),
        units=("images",),
        layer="max pooling",
        settings=_model_change("castwise.trial.kernels.max_pool.module:use_max_pool_kernel"),
        acts_on="max pooling of 3 by 3 with stride 2",
        absent_in=("mnist_cnn", "wide_resnet", "resnet9", "dpn", "mlp", "efficientnet"),
        requires="channels-last",
        needs_triton=True,
    ),
    Technique(
        name="batch-norm-kernel",
        summary="batch norm, with additions, dropout and activation next to it, runs by kernels that read images twice",
        cures=("memory",),
        needs="channels-last, Triton, and a model with batch norm that torch.fx can trace",
        cost="none",
        loop_changes=9,
        numerics="draws",
        devices=("cuda",),
        units=("images",),
        layer="batch norm",
        settings=_model_change("castwise.trial.kernels.batch_norm.fusion:use_batch_norm_kernel"),
        acts_on="batch norm",
        absent_in=("mnist_cnn", "mlp"),
        requires="channels-last",
        needs_triton=True,
        why_not=conditions.is_replicated,
        rank=Rank.COMPILE,
        tried_after="compile",  # alone its launches cost more than it saves
    ),
    Technique(
        name="causal-attention",
        summary="transformers leaves the causal mask to attention's kernel, under torch.compile, too",
        needs="a causal model of transformers with sdpa attention, and batches without attention_mask and position_ids",
        cost="none",
        loop_changes=3,
        numerics="rounding",
        devices=("cuda",),
        layer="attention",
        settings=_model_change("castwise.apply.techniques.causal_attention:use_causal_attention"),
        kinds=("steady",),
        why_not=conditions.needs_transformers,
        rank=Rank.COMPILE,
        tried_after="compile",  # uncompiled, transformers does so itself
    ),
    Technique(
        name="short-gelu",
        summary="GELU and its gradient are computed by formulas of fewer instructions, no less exact",
        cures=("memory",),
        needs="modules of GELU, of torch, transformers or timm",
        cost="without compile more passes over memory",
        loop_changes=3,
        numerics="rounding",
        layer="GELU",
        settings=_model_change("castwise.apply.techniques.gelu:use_short_gelu"),
        acts_on="GELU",
        absent_in=("mlp", "mnist_cnn", "rnn_lm", "wide_resnet", "resnet9", "dpn", "fastai_resnet", "resnet", "llama"),
        rank=Rank.COMPILE,
        tried_after="compile",  # alone each operation is a kernel
    ),
    Technique(
        name="fp8-large-layers",
        summary="linear layers that torchao takes for too small for FP8 stay in bfloat16",
        needs="a precision of FP8",
        cost="none",
        numerics="rounding",
        devices=("cuda",),
        settings=_model_change("castwise.apply.float8:keep_small_layers"),
        why_not=conditions.needs_fp8,
        rank=Rank.COMPILE,
    ),
    Technique(
        name="fp8-without-decoder",
        summary="a language model's decoder stays in bfloat16, which is more exact",
        needs="a precision of FP8, and a decoder that has an output for each word of an embedding",
        cost="less of the step is in FP8",
        numerics="rounding",
        devices=("cuda",),
        units=("tokens",),
        settings=_model_change("castwise.apply.float8:keep_decoder"),
        why_not=conditions.needs_fp8,
        rank=Rank.COMPILE,
    ),
    Technique(
        name="chunked-loss",
        summary="decoder, loss and gradients are computed for an eighth of the words at a time: logits are not kept",
        needs="Triton on a GPU",
        cost="a float32 gradient of the decoder",
        loop_changes=5,
        numerics="rounding",
        units=("tokens",),
        families=("rnn_lm", "transformer"),
        fits_user_models=False,
        settings={"loss_options": (("num_chunks", 8),)},
        needs_triton=True,
        why_not=conditions.is_replicated,
    ),
    Technique(
        name="sparse-prediction",
        summary="decoder and loss are computed for the tokens that have a target alone, about one in seven",
        needs="a masked language model",
        cost="none; a batch with more targets than there is room for has a loss that is not a number",
        loop_changes=4,
        numerics="rounding",
        units=("tokens",),
        families=("transformer",),
        excludes=("chunked-loss",),
        fits_user_models=False,
        settings={"loss_options": (("is_sparse", True),)},
        why_not=conditions.predicts_all,
    ),
    Technique(
        name="activation-checkpointing",
        summary="repeated blocks keep only their inputs for backward, which computes the rest again",
        needs="a model that repeats blocks",
        cost="a second forward pass of the blocks",
        numerics="bits",
        excludes=("selective-checkpointing", *_NOT_CHECKPOINTED),
        settings=_model_change(_CHECKPOINT),
        acts_on="repeated blocks",
        absent_in=("mlp", "mnist_cnn", "rnn_lm"),
        why_not=conditions.is_replicated,
        only_saves_memory=True,
    ),
    Technique(
        name="selective-checkpointing",
        summary="the same, but the blocks also keep the outputs of matrix products and attention",
        needs="such blocks with linear layers",
        cost="what is between the products is computed again, and without compile the host's time for each operation",
        numerics="bits",
        excludes=_NOT_CHECKPOINTED,
        settings=_model_change(_CHECKPOINT, True),
        acts_on="repeated blocks with linear layers",
        absent_in=("mlp", "mnist_cnn", "rnn_lm", "wide_resnet", "resnet9", "dpn", "fastai_resnet"),
        why_not=conditions.is_replicated,
        only_saves_memory=True,
    ),
    Technique(
        name="compile",
        summary="torch.compile of forward, loss and backward, for the batch's shape",
        cures=("casts", "memory"),
        needs="a C++ compiler on a CPU, Triton and a C compiler on a GPU of compute capability 7.0 or newer",
        cost="the first step: seconds to minutes; a last batch of another shape runs uncompiled",
        code=Code(
            model="model = torch.compile(model)",
            accelerate='dynamo_backend="inductor"',
            transformers="torch_compile=True",
        ),
        loop_changes=3,
        numerics="draws",
        excludes=("compile-max-autotune",),
        settings={"compile_mode": "default"},
        needs_triton=True,
        sets=(COMPILED,),
        rank=Rank.COMPILE,
        tried_with=("cuda-graph", "batch-norm-kernel"),
        # The copies that matmul-stem makes are part of other kernels then. Those of space-to-depth are, too, but it was
        # 0.98 times as fast both times that it was compiled on an H200, for up to a minute. The convolutions stay
        # cuDNN's: in 18 searches cudnn-search was never faster on a compiled loop only.
        interacts_with=(PRECISION, "channels-last", "matmul-stem"),
        compile_cost=1.0,
    ),
    Technique(
        name="compile-max-autotune",
        summary="the same, and Inductor times several kernels for each product and convolution",
        needs="the same",
        cost="the first step: minutes",
        code=Code(
            model='model = torch.compile(model, mode="max-autotune-no-cudagraphs")',
            accelerate=(
                "dynamo_plugin=accelerate.utils.TorchDynamoPlugin("
                'backend="inductor", mode="max-autotune-no-cudagraphs")'
            ),
            transformers='torch_compile=True, torch_compile_mode="max-autotune-no-cudagraphs"',
        ),
        loop_changes=4,
        numerics="draws",
        # Inductor's own graphs are left out: they would be graphs within the technique cuda-graph's.
        settings={"compile_mode": "max-autotune-no-cudagraphs"},
        needs_triton=True,
        rank=Rank.AUTOTUNE,
        tried_after="compile",
        compile_cost=4.0,
        times_while_compiling=True,
    ),
    Technique(
        name="compile-blocks",
        summary="torch.compile of a model's repeated blocks, as a transformer's layers are, once for all alike",
        needs="what compile needs, and a model that repeats blocks",
        cost="the first step: seconds, however many blocks there are; the other parts and the loss run uncompiled",
        loop_changes=2,
        numerics="draws",
        excludes=("compile", "compile-max-autotune"),
        settings={"compile_mode": "default", "compile_blocks": True},
        acts_on="repeated blocks",
        absent_in=("mlp", "mnist_cnn", "resnet9", "dpn", "rnn_lm", "inception"),
        needs_triton=True,
        why_not=conditions.is_replicated,
        searched=False,  # its loop is slower than that of compile: it saves the user's time, not a step's
        rank=Rank.COMPILE,
        compile_cost=0.5,
    ),
    Technique(
        name="coalesced-reduce",
        summary="ranks average all gradients at once after backward, without DistributedDataParallel",
        needs="several GPUs with one process each (ddp), and the same weights trained in every step",
        cost="memory of once or twice the gradients; averaging does not overlap with backward",
        loop_changes=5,
        numerics="rounding",
        settings={"coalesced_reduce": True},
        only_on_several_gpus=True,
        why_not=conditions.has_no_ranks,
        tried_with=("cuda-graph",),  # which has to have it
        interacts_with=("compile", "compile-max-autotune"),  # whose graphs DistributedDataParallel splits
    ),
    _ddp(
        "ddp-bucket-view",
        "gradient_as_bucket_view",
        True,
        summary="gradients are views of what ranks average: DistributedDataParallel copies none back",
        needs="several GPUs with one process each (ddp)",
        cost="none; it saves memory of once the gradients. Views may be unaligned, which slows some optimizers",
    ),
    _ddp(
        "ddp-buckets-100",
        "bucket_cap_mb",
        100,
        summary="ranks average gradients of 100 MiB at once, not 25: fewer collectives, and fewer graphs under compile",
        needs="several GPUs with one process each (ddp), and weights of more than 25 MiB",
        cost="averaging begins later, so a short backward pass hides less of it",
        # Source: pytorch/pytorch#118421, where PyTorch's developers propose it, and torchtitan's `apply_ddp`.
        transformers="ddp_bucket_cap_mb=100",
        # The graphs of torch.compile end where buckets do. Source: torch/_dynamo/backends/distributed.py.
        interacts_with=("compile", "compile-max-autotune"),
    ),
    _ddp(
        "ddp-static-graph",
        "static_graph",
        True,
        summary="DistributedDataParallel learns once which weights have gradients, and does not look again",
        cures=("settings",),
        needs="several GPUs with one process each (ddp), and the same weights trained in every step",
        cost="none; a step that trains other weights computes wrong gradients",
    ),
    Technique(
        name="bf16-all-reduce",
        summary="ranks average gradients that are rounded to bfloat16: half of the bytes",
        cures=("communication",),
        needs="several GPUs with one process each (ddp), float32 weights, and products in bfloat16",
        cost="gradients keep 8 bits, as each product's factors have, and are added up in them",
        code=Code(
            model="from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook\n"
            "model.register_comm_hook(None, bf16_compress_hook)  # of DistributedDataParallel"
        ),
        loop_changes=2,
        numerics="rounding",
        excludes=("coalesced-reduce",),
        settings={"reduces_in_bf16": True},
        only_on_several_gpus=True,
        why_not=conditions.reduces_no_float32,
    ),
    Technique(
        name="fsdp-keep-weights",
        summary="FSDP2 gathers a block's weights once a step: backward has those of forward",
        cures=("communication",),
        needs="several GPUs with sharded weights (fsdp)",
        cost="memory of the whole weights from forward to backward",
        code=Code(model="# add reshard_after_forward=False to your calls of fully_shard"),
        numerics="bits",
        settings={"keeps_whole_weights": True},
        only_on_several_gpus=True,
        why_not=conditions.has_no_shards,
    ),
    Technique(
        name="cuda-graph",
        summary="the whole step, optimizer and loss scaling included, is one launch",
        cures=("launches",),
        needs="shapes and control flow that do not depend on data, and a schedule that does not change momentum",
        cost="a copy of the batch per step; the step's memory stays reserved",
        loop_changes=6,
        numerics="rounding",
        devices=("cuda",),
        required_on_several_gpus="coalesced-reduce",
        excludes=("cuda-graph-8",),
        settings=_GRAPH,
        why_not=conditions.captures_schedule,
        interacts_with=(PRECISION,),  # a step that launches bound does not gain from faster kernels
        removes_waiting=True,
    ),
    Technique(
        name="cuda-graph-8",
        summary="8 whole steps are one launch",
        needs="the same, and a learning rate that stays the same within an epoch",
        cost="memory for 8 batches; losses are known every 8 steps",
        loop_changes=7,
        numerics="rounding",
        devices=("cuda",),
        required_on_several_gpus="coalesced-reduce",
        settings={**_GRAPH, "steps_per_launch": 8},
        why_not=conditions.captures_rate,
        tried_after="cuda-graph",
        saves_seconds=50e-6,  # of a graph's launch. Source: an H200, mnist-cnn 26 µs a step, mlp-4096 35 µs
    ),
]

_ALREADY_DEFAULT = ("set-to-none", "zero-grad-none")  # users may look for these; every trial has them

# Names for several techniques: a plan takes those that a trial can have, and its spec names them.
SETS: dict[str, tuple[str, ...]] = {
    name: tuple(row.name for row in TECHNIQUES if name in row.sets) for name in (TUNED, COMPILED)
}


def find_technique(name: str) -> Technique:
    """Return the row with this name, in any case of letters, or raise UsageError, which names the nearest."""
    wanted = name.strip().lower()
    if wanted in _ALREADY_DEFAULT:
        raise UsageError(f"'{name}' is no technique: gradients are set to None, as torch does since 2.0. Leave it out.")
    for row in TECHNIQUES:
        if wanted == row.name:
            return row
    known = [*(row.name for row in TECHNIQUES), *SETS, NONE]
    raise unknown_name("technique", name, known, "`castwise list techniques` shows them.")


def rows_of(names: Iterable[str]) -> list[Technique]:
    """Return the rows with these names, in the registry's order."""
    wanted = set(names)
    return [row for row in TECHNIQUES if row.name in wanted]


def narrowing(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of these techniques that keep, or compute, numbers in fewer bits: like a precision."""
    return tuple(row.name for row in rows_of(names) if row.numerics in NARROW)


def precision_name(spec: TrialSpec) -> str:
    """Return the precision, and what is in fewer bits besides: "fp32 with adam-state-8-bit"."""
    return " with ".join(filter(None, (spec.precision, _JOIN.join(narrowing(spec.techniques)))))


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(row.name for row in rows_of(names))


def exclude_each_other(one: str, other: str) -> bool:
    return other in find_technique(one).excludes or one in find_technique(other).excludes


def step_config_of(names: Iterable[str]) -> StepConfig:
    config = PLAIN
    for name in names:
        settings = dict(find_technique(name).settings)
        for added in _ADDED_UP:
            settings[added] = (*getattr(config, added), *settings.get(added, ()))
        config = replace(config, **settings)
    return config


def for_one_gpu(names: Sequence[str]) -> tuple[str, ...]:
    """Return the techniques that the same loop has on one GPU."""
    dropped = {row.name for row in rows_of(names) if row.only_on_several_gpus}
    return tuple(name for name in names if name not in dropped)


def normalize_for_world_size(names: Sequence[str], world_size: int, most_gpus: int) -> tuple[str, ...]:
    """Return the techniques of a loop on some GPUs that is compared with the same one on others."""
    return for_one_gpu(names) if world_size == 1 < most_gpus else tuple(names)


def parse_techniques(text: str) -> tuple[str, ...]:
    """Return the names in `channels-last+compile` or `none`, each once, in the registry's order; sets stay sets."""
    wanted = [part.strip().lower() for part in text.split(_JOIN)]
    if wanted == [NONE]:
        return ()
    if NONE in wanted or "" in wanted:
        raise UsageError(f"'{text}' is no list of techniques. Join them with '+', or write none for the plain loop.")
    sets = sorted({name for name in wanted if name in SETS})
    names = {find_technique(name).name for name in wanted if name not in SETS}
    members = names.union(*(SETS[name] for name in sets))
    for row in rows_of(members):
        for other in row.excludes:
            if other in members:
                raise UsageError(f"{row.name} and {other} exclude each other. Name one of them.")
    return (*sets, *in_order(names))


def join(names: Sequence[str]) -> str:
    """Return techniques as users write them: `channels-last+compile`, or `none`."""
    return _JOIN.join(names) or NONE


def compiles(names: Iterable[str]) -> bool:
    """Return whether one of these techniques compiles something in the first step."""
    return any(row.compile_cost for row in rows_of(names))


def captures_graph(names: Iterable[str]) -> bool:
    """Return whether one of these techniques captures the step as a CUDA graph."""
    return any("cuda_graph" in row.settings for row in rows_of(names))


def searches_kernels(names: Iterable[str]) -> bool:
    """Return whether one of these techniques times the kernels of libraries in the first step."""
    return any(row.times_kernels for row in rows_of(names))


def times_kernels(names: Iterable[str]) -> bool:
    """Return whether one of these techniques times kernels in the first step, to keep the fastest."""
    return any(row.times_kernels or row.compile_cost for row in rows_of(names))


def times_kernels_while_compiling(names: Iterable[str]) -> bool:
    """Return whether one of these techniques times kernels before its code is ready, and not when that first runs."""
    return any(row.times_while_compiling for row in rows_of(names))


def hiding_operators(names: Iterable[str]) -> list[str]:
    """Return those of these techniques whose step is compiled or captured: its operators are not called one by one."""
    return [row.name for row in rows_of(names) if row.compile_cost or "cuda_graph" in row.settings]


def needs_of(row: Technique) -> str:
    """Return in words what a technique needs of device, workload and optimizer; "–" if it needs nothing."""
    needs = [row.needs] if row.needs else []
    if row.devices == ("cuda",):
        needs.append("a CUDA device")
    if row.optimizers:
        needs.append(f"one of the optimizers {', '.join(row.optimizers)}")
    if row.families:
        needs.append("a language model" if "transformer" in row.families else "a recurrent language model")
    if row.required_on_several_gpus:
        needs.append(f"one GPU, or {row.required_on_several_gpus}")
    if row.excludes:
        needs.append(f"not together with {', '.join(row.excludes)}")
    return "; ".join(needs) or "–"
