"""The numeric precisions a model can be trained in: one row each, and all that castwise knows of a precision is in it.

A record may name a precision that has no row here: `precision_row` gives it neutral defaults.
"""

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from castwise.errors import UsageError, unknown_name
from castwise.registry.architectures import Architecture, Format, dotted, find_architecture, needed_capabilities

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


@dataclass(frozen=True)
class Look:
    """How a precision looks in every chart."""

    colour: str  # as #rrggbb
    marker: str  # a shape that `report/charts/svg.py` draws, as the dash
    dash: str


UNKNOWN_LOOK = Look("#b9b9b9", "circle-open", "solid")


@dataclass(frozen=True)
class Frameworks:
    """What a precision is called in the frameworks of `FRAMEWORKS`; None if a framework does not have it."""

    lightning: str | None = None  # `precision` of its Trainer, and of Fabric
    lightning_on_cpu: bool = True  # its Trainer replaces float16 autocast by bfloat16 there
    accelerate: str | None = None  # `mixed_precision` of its Accelerator
    transformers: str | None = None  # the arguments of its TrainingArguments
    fastai: str | None = None  # a method of its Learner
    keras: str | None = None  # a policy of its layers
    ignite: str | None = None  # the arguments of its create_supervised_trainer
    monai: str | None = None  # the arguments of its SupervisedTrainer
    open_clip: str | None = None  # its --precision
    deepspeed: str | None = None  # a section of its configuration
    setting: str = ""  # a line that sets a global switch, for Lightning and Accelerate
    cast: str = ""  # a line that casts the model, for Accelerate and transformers; Lightning does it itself


@dataclass(frozen=True)
class Precision:
    """How weights, activations and updates are represented during training."""

    name: str
    summary: str = ""
    aliases: tuple[str, ...] = ()  # in lower case
    param_dtype: Dtype = "float32"
    autocast_dtype: Dtype | None = None
    # How float32 products are computed, in matmul, convolution and RNN alike; None leaves PyTorch's defaults.
    float32_matmul: Literal["ieee", "tf32"] | None = "ieee"
    master_weights: bool = False  # the optimizer steps float32 copies of the weights
    # It steps float32 copies that last for an update, and the weights are these, rounded up or down at random.
    stochastic_rounding: bool = False
    batch_norm_dtype: Dtype = "float32"  # of its weights and running statistics
    loss_scale: str = "none"  # unless the user names another
    keeps_float32_weights: bool = False  # updates are made to float32 weights, so that small ones are not rounded away
    loop_changes: int = 99  # how much it changes a loop, from 0; of nearly equal speeds advice takes the least
    peak_dtype: str = ""  # the datasheet's column that bounds its matrix work
    format: Format | None = None  # of registry/architectures.py, which a GPU must have; any has float32
    on_cpu: bool = True  # PyTorch trains in it on a CPU
    float8_recipe: str = ""  # of torchao, which trains linear layers in FP8; it pays in compiled loops only
    is_trained: bool = True  # castwise can train in it
    code: str = ""  # its lines of plain PyTorch, if they are few, with `model`, `loss_fn` and `optimizer`
    frameworks: Frameworks = Frameworks()
    look: Look = UNKNOWN_LOOK

    @property
    def steps_copies(self) -> bool:
        """Return whether the optimizer steps float32 copies of lower weights."""
        return self.master_weights or self.stochastic_rounding

    @property
    def has_float16(self) -> bool:
        """Return whether gradients are float16, whose range is too small for some of them without a loss scale."""
        return "float16" in (self.param_dtype, self.autocast_dtype)

    @property
    def is_16_bit(self) -> bool:
        """Return whether activations are stored in 16 bits."""
        return (self.autocast_dtype or self.param_dtype) in ("float16", "bfloat16")


# torch has had these flags in every version. Its newer switches (fp32_precision) came with 2.9.
_IEEE_CODE = """\
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False"""

_MIXED_BF16_CODE = """\
with torch.autocast(device_type="{device}", dtype=torch.bfloat16):
    loss = loss_fn(model(x), y)
loss.backward()
optimizer.step()"""

_FLOAT32 = Frameworks(
    lightning="32-true",
    accelerate="no",
    fastai="to_fp32",
    keras="float32",
    ignite="",
    monai="amp=False",
    open_clip="fp32",
)


def _fp8(name: str, recipe: str, summary: str, wanted: Format, loop_changes: int, look: Look) -> Precision:
    return Precision(
        name=name,
        summary=f"bf16-mixed with linear layers in FP8 by torchao, {summary}; needs compile",
        autocast_dtype="bfloat16",
        keeps_float32_weights=True,
        loop_changes=loop_changes,
        format=wanted,
        on_cpu=False,
        float8_recipe=recipe,
        look=look,
    )


# In the order of tables and charts. Source of the frameworks' names: the documentation of Lightning 2.6 (Trainer:
# precision), Accelerate 1.15 (Accelerator: mixed_precision), transformers 5.23 (TrainingArguments: bf16, fp16, tf32);
# tf32 sets matrix products there, and convolutions and RNNs use it anyway. Source of the colours, which colour-blind
# people can distinguish: M. Okabe, K. Ito, "Color Universal Design" (2008); grey in place of black, which no dark page
# shows.
PRECISIONS: tuple[Precision, ...] = (
    Precision(
        name="default",
        summary="PyTorch as it comes: float32, with TF32 in convolutions and RNNs on a GPU that has it",
        aliases=("pytorch",),
        float32_matmul=None,
        keeps_float32_weights=True,
        loop_changes=0,
        frameworks=replace(_FLOAT32, transformers=""),
        look=Look("#999933", "star", "solid"),
    ),
    Precision(
        name="fp32",
        summary="IEEE float32 in matmul, convolution and RNN alike",
        aliases=("o0", "float32", "single"),
        keeps_float32_weights=True,
        loop_changes=1,
        peak_dtype="fp32",
        code=_IEEE_CODE,
        frameworks=replace(_FLOAT32, transformers="tf32=False"),
        look=Look("#7f7f7f", "circle", "solid"),
    ),
    Precision(
        name="tf32",
        summary="float32 storage; matrix products round their inputs to 10 bits of mantissa",
        aliases=("tensorfloat-32", "tensorfloat32"),
        float32_matmul="tf32",
        keeps_float32_weights=True,
        loop_changes=2,
        peak_dtype="tf32",
        format="tf32",
        on_cpu=False,
        code=_IEEE_CODE.replace("False", "True"),
        frameworks=replace(_FLOAT32, transformers="tf32=True", setting='torch.set_float32_matmul_precision("high")'),
        look=Look("#56b4e9", "square", "dash"),
    ),
    Precision(
        name="fp16-mixed",
        summary="float32 weights, autocast to float16, dynamic loss scaling (Apex O1, torch.amp)",
        aliases=("o1", "16-mixed", "amp", "fp16", "float16"),
        autocast_dtype="float16",
        loss_scale="dynamic",
        keeps_float32_weights=True,
        loop_changes=4,
        peak_dtype="fp16",
        format="fp16",
        frameworks=Frameworks(
            lightning="16-mixed",
            lightning_on_cpu=False,
            accelerate="fp16",
            transformers="fp16=True",
            fastai="to_fp16",
            keras="mixed_float16",
            ignite='amp_mode="amp", scaler=True',
            monai="amp=True",
            open_clip="amp",
            deepspeed='"torch_autocast": {"enabled": true, "dtype": "float16"}',
        ),
        look=Look("#0072b2", "diamond", "solid"),
    ),
    Precision(
        name="bf16-mixed",
        aliases=("bf16", "bfloat16"),
        summary="float32 weights, autocast to bfloat16, no loss scaling needed",
        autocast_dtype="bfloat16",
        keeps_float32_weights=True,
        loop_changes=3,
        peak_dtype="bf16",
        format="bf16",
        code=_MIXED_BF16_CODE,
        frameworks=Frameworks(
            lightning="bf16-mixed",
            accelerate="bf16",
            transformers="bf16=True",
            fastai="to_bf16",
            keras="mixed_bfloat16",
            monai='amp=True, amp_kwargs={"dtype": torch.bfloat16}',
            open_clip="amp_bf16",
            deepspeed='"torch_autocast": {"enabled": true, "dtype": "bfloat16"}',
        ),
        look=Look("#e69f00", "triangle-up", "dash"),
    ),
    Precision(
        name="fp16-master",
        summary="float16 weights, float32 batch norm, float32 masters that the optimizer steps (Apex O2)",
        aliases=("o2",),
        param_dtype="float16",
        master_weights=True,
        loss_scale="dynamic",
        keeps_float32_weights=True,
        loop_changes=6,
        peak_dtype="fp16",
        format="fp16",
        frameworks=Frameworks(deepspeed='"fp16": {"enabled": true}'),
        look=Look("#009e73", "triangle-down", "dot"),
    ),
    Precision(
        name="bf16-master",
        summary="bfloat16 weights, float32 batch norm, float32 masters that the optimizer steps, no loss scaling",
        param_dtype="bfloat16",
        master_weights=True,
        keeps_float32_weights=True,
        loop_changes=5,
        peak_dtype="bf16",
        format="bf16",
        frameworks=Frameworks(deepspeed='"bf16": {"enabled": true}'),
        look=Look("#882255", "hexagon", "solid"),
    ),
    Precision(
        name="fp16-true",
        summary="float16 everywhere: weights, batch norm, optimizer state (Apex O3); often diverges",
        aliases=("o3", "16-true", "half"),
        param_dtype="float16",
        batch_norm_dtype="float16",
        peak_dtype="fp16",
        format="fp16",
        frameworks=Frameworks(
            lightning="16-true", accelerate="no", transformers="", cast="model.half()", open_clip="pure_fp16"
        ),
        look=Look("#d55e00", "x", "dashdot"),
    ),
    Precision(
        name="bf16-true",
        summary="bfloat16 everywhere: small updates round away, accuracy must be checked",
        param_dtype="bfloat16",
        batch_norm_dtype="bfloat16",
        peak_dtype="bf16",
        format="bf16",
        frameworks=Frameworks(
            lightning="bf16-true", accelerate="no", transformers="", cast="model.bfloat16()", open_clip="pure_bf16"
        ),
        look=Look("#cc79a7", "cross", "longdash"),
    ),
)

_BF16_SR = Precision(
    name="bf16-sr",
    summary="bfloat16 weights, float32 batch norm and updates, rounded stochastically to the weights; no masters",
    param_dtype="bfloat16",
    stochastic_rounding=True,
    loop_changes=6,
    peak_dtype="bf16",
    format="bf16",
    look=Look("#d81848", "bowtie", "dot"),
)

# Precisions with products in less than 16 bits: like bf16-sr, they are measured only if they are named. Source of the
# recipes: torchao 0.18, torchao/float8/config.py. MXFP8 and NVFP4 are not for GeForce Blackwell (12.x): it lacks two of
# the three layouts of MXFP8's products in training, and the stochastic rounding of NVFP4's. Source:
# docs/support_matrix.rst of NVIDIA/TransformerEngine; pytorch/pytorch#198126 for MXFP8.
# torchao 0.18 trains in NVFP4 by Triton kernels for 10.x alone; without an emulation castwise cannot test it.
NARROW_PRECISIONS: tuple[Precision, ...] = (
    _fp8("fp8-tensorwise", "tensorwise", "a scale a tensor", "fp8", 7, Look("#4444ee", "pentagon", "solid")),
    _fp8("fp8-rowwise", "rowwise", "a scale a row", "fp8-rowwise", 8, Look("#66cc66", "triangle-left", "dash")),
    _fp8(
        "fp8-rowwise-gw-hp",
        "rowwise_with_gw_hp",
        "a scale a row, and the weights' gradients in bfloat16",
        "fp8-rowwise",
        8,
        Look("#664422", "triangle-right", "dot"),
    ),
    _fp8("mxfp8", "mxfp8", "a scale for 32 values (OCP MX)", "mxfp8", 9, Look("#6018a8", "hourglass", "dot")),
    Precision(
        name="nvfp4",
        summary="bf16-mixed with linear layers in FP4 with a scale for 16 values; castwise does not train in it yet",
        autocast_dtype="bfloat16",
        keeps_float32_weights=True,
        format="nvfp4",
        on_cpu=False,
        is_trained=False,
    ),
)

NAMED_PRECISIONS = (_BF16_SR, *NARROW_PRECISIONS)

# What a script does by itself: the precision of no other workload.
AS_WRITTEN = "as-written"
_AS_WRITTEN_ROW = Precision(
    name=AS_WRITTEN,
    summary="a script of yours in the precision that it chooses itself",
    float32_matmul=None,
    keeps_float32_weights=True,
    loop_changes=0,
)
# Those that a script is given from outside if none is named, and all that it can be given.
USUAL_OF_SCRIPTS = (AS_WRITTEN, "default", "fp32", "tf32", "fp16-mixed", "bf16-mixed")
OF_SCRIPTS = (*USUAL_OF_SCRIPTS, "fp16-master", "bf16-master", "fp16-true", "bf16-true")
# Those with everything in one type of 16 bits, and that type.
TRUE_PRECISIONS = {
    row.name: row.param_dtype for row in PRECISIONS if row.param_dtype != "float32" and not row.master_weights
}

_EIGHT_BIT_NAMES = ("fp8", "float8", "int8")
_DOUBLE_NAMES = ("fp64", "float64", "f64", "double", "64")

BASELINE = "fp32"
# The loop that users have before they change anything.
DEFAULT = "default"
# What a gain is over, in words, if it is not a precision that is named.
REFERENCE_WORDS = {DEFAULT: "PyTorch's default", AS_WRITTEN: "your script as written"}
BESIDE_FP8 = "bf16-mixed"  # what FP8 has to be faster than, in the same loop


def find_precision(name: str) -> Precision:
    """Return the row with this name or alias, in any case of letters, or raise UsageError, which names the nearest."""
    found = known_precision(name)
    if found is None and name.strip().lower().startswith(_EIGHT_BIT_NAMES):
        names = ", ".join(row.name for row in NARROW_PRECISIONS if row.is_trained)
        raise UsageError(f"castwise does not measure '{name}'. In 8 bits it trains linear layers: {names}.")
    if found is None and name.strip().lower().startswith(_DOUBLE_NAMES):
        raise UsageError(f"castwise does not measure '{name}': float64. Its most exact precision is fp32.")
    if found is None:
        raise unknown_name("precision", name, (row.name for row in _all_rows()))
    return found


def known_precision(name: str) -> Precision | None:
    """Return the row with this name or alias, and None if there is none: a record may come from elsewhere."""
    wanted = name.strip().lower()
    return next((row for row in _all_rows() if wanted == row.name or wanted in row.aliases), None)


def _all_rows() -> tuple[Precision, ...]:
    return (_AS_WRITTEN_ROW, *PRECISIONS, *NAMED_PRECISIONS)


def precision_row(name: str) -> Precision:
    """Return the row with this name or alias, and one of neutral defaults for a precision that has none here."""
    return known_precision(name) or Precision(name)


def precision_sort_key(name: str) -> tuple[int, str]:
    """Return the place of a precision among others: in the registry's order, unknown ones last."""
    row = known_precision(name)
    rows = _all_rows()
    return (rows.index(row) if row is not None else len(rows), name)


@dataclass(frozen=True)
class Hardware:
    """What a device can compute in, as far as it decides about precisions."""

    name: str  # for messages
    capability: tuple[int, int] | None  # of CUDA; None on a CPU
    cpu_features: tuple[str, ...] = ()  # the CPU's instructions for 16-bit floats
    code: str = ""  # torch's name of the architecture of a GPU without CUDA: "gfx942"

    @property
    def is_cpu(self) -> bool:
        return self.capability is None and not self.code

    @property
    def architecture(self) -> Architecture | None:
        """Return the GPU's generation; None of a CPU, and of a GPU that is not listed."""
        return find_architecture(self.capability, self.code)

    def support(self, row: Precision) -> str:
        """Return how a GPU trains in a precision: "native", "slow", "emulated", or not at all: empty."""
        if row.format is None:
            return "native"
        return "" if self.architecture is None else self.architecture.support(row.format)


# The kernel's names of instructions with which PyTorch multiplies in a 16-bit format, x86's and Arm's. With avx512_fp16
# alone a U-Net in fp16-mixed took 100 times as long as in fp32 (torch 2.11, benchmarks/advice_study.py).
_CPU_FEATURES = {
    "float16": frozenset({"amx_fp16", "asimdhp"}),
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"}),
}
_KNOWN_CPU_FEATURES = frozenset({"avx512_fp16"}).union(*_CPU_FEATURES.values())


def this_cpu() -> Hardware:
    """Return what decides about precisions of the CPU that this process runs on."""

    def values(prefix: str) -> list[str]:
        return [line.partition(":")[2].strip() for line in lines if line.startswith(prefix)]

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next(iter(values("model name")), platform.processor() or platform.machine())
    if hasattr(os, "sched_getaffinity"):
        name = f"{name} ({len(os.sched_getaffinity(0))} cores)"
    features = set(" ".join((values("flags") or values("Features"))[:1]).split())  # on x86, and on Arm
    return Hardware(name, None, tuple(sorted(features & _KNOWN_CPU_FEATURES)))


def why_unsupported(row: Precision, hardware: Hardware) -> str | None:
    if hardware.is_cpu and row.on_cpu:
        return None
    if hardware.is_cpu or not hardware.support(row):
        has = "is a CPU" if hardware.is_cpu else f"has {hardware.code or dotted(hardware.capability or (0, 0))}"
        return f"{row.name} needs {needs_of(row)}; {hardware.name} {has}"
    return None if row.is_trained else f"{row.name}: castwise does not train in it yet"


def needs_of(row: Precision) -> str:
    """Return in words which GPUs of NVIDIA have what a precision needs."""
    needed = needed_capabilities(row.format or "")
    if needed is None:
        return "no special hardware"
    since, before = needed
    return f"CUDA compute capability {dotted(since)} or newer" + (f", before {dotted(before)}" if before else "")


# Newer ones may have other recipes and optimizers, and patch other parts of torch.
TORCHAO = "0.18"


def why_without_torchao(row: Precision, installed: str | None) -> str | None:
    """Return why a precision cannot be had with this version of torchao, None being none; None if it can."""
    return lack_of_torchao(row.name, installed) if row.float8_recipe else None


def lack_of_torchao(name: str, installed: str | None) -> str | None:
    """Return why what needs torchao cannot be had with this version of it, None being none; None if it can."""
    if (installed or "").startswith(f"{TORCHAO}."):
        return None
    there = f"; this is torchao {installed}" if installed else ""
    return f"{name} needs torchao {TORCHAO}{there}: pip install 'castwise[fp8]'"


def is_same_as_fp32(row: Precision, hardware: Hardware) -> bool:
    """Return whether a device computes the same in a precision as in fp32: PyTorch's defaults without TF32."""
    return row.name == DEFAULT and not (hardware.architecture and hardware.architecture.support("tf32") == "native")


def why_emulated(row: Precision, hardware: Hardware) -> str | None:
    """Return why a device runs this precision without hardware for it, or None if it has the hardware."""
    if hardware.is_cpu:
        dtype = row.autocast_dtype or row.param_dtype
        if dtype == "float32" or _CPU_FEATURES[dtype] & set(hardware.cpu_features):
            return None
        return f"{hardware.name} has no {dtype} instructions that PyTorch trains with"
    needed = needed_capabilities(row.format or "")
    if hardware.support(row) != "emulated" or needed is None:
        return None
    if hardware.code:
        return f"{hardware.name} is {hardware.code}, without hardware for {row.format}"
    return f"{hardware.name} has compute capability {dotted(hardware.capability or (0, 0))}, before {dotted(needed[0])}"
