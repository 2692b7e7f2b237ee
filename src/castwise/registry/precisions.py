"""The numeric precisions a model can be trained in: one row each, data only.

`worker/precision.py` is the one place where a row is applied; this module is what the command line,
the plan and the reports know of it, without torch.
"""

from dataclasses import dataclass
from typing import Literal

from castwise.errors import unknown_name

Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Precision:
    """How weights, activations and updates are represented during training.

    Attributes:
        name: The name users write.
        aliases: Other accepted spellings, in lower case (Apex's levels O0 to O3).
        param_dtype: The dtype of the model's weights, in torch's spelling.
        autocast_dtype: The dtype that `torch.autocast` runs its list of operations in, or None without autocast.
        float32_matmul: What float32 matrix products, convolutions and RNNs compute in, all three alike.
        master_weights: Whether the optimizer steps float32 copies of the weights.
        batch_norm_dtype: The dtype of batch norm's weights and running statistics.
        loss_scale: The loss scaling used unless the user names another.
        peak_dtype: The column of a GPU's datasheet that bounds this precision's matrix work.
        capability: The compute capability from which CUDA hardware has it, as (major, minor).
        emulated_below: True where older hardware still runs it, by emulation.
        on_cpu: Whether PyTorch trains in it on a CPU.
        summary: One line on what it is.
        code: The few lines of PyTorch that switch it on, for a loop with `model`, `loss_fn` and `optimizer`.
    """

    name: str
    aliases: tuple[str, ...]
    param_dtype: Dtype
    autocast_dtype: Dtype | None
    float32_matmul: Literal["ieee", "tf32"]
    master_weights: bool
    batch_norm_dtype: Dtype
    loss_scale: str
    peak_dtype: str
    capability: tuple[int, int]
    emulated_below: bool
    on_cpu: bool
    summary: str
    code: str


_IEEE_CODE = """\
torch.backends.fp32_precision = "ieee"
torch.backends.cuda.matmul.fp32_precision = "ieee"
torch.backends.cudnn.conv.fp32_precision = "ieee"
torch.backends.cudnn.rnn.fp32_precision = "ieee\""""

_MIXED_BF16_CODE = """\
with torch.autocast(device_type={device!r}, dtype=torch.bfloat16):
    loss = loss_fn(model(x), y)
loss.backward()
optimizer.step()"""

_MIXED_FP16_CODE = """\
scaler = torch.amp.GradScaler({device!r})  # once, before the loop
with torch.autocast(device_type={device!r}, dtype=torch.float16):
    loss = loss_fn(model(x), y)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()"""

_MASTER_FP16_CODE = """\
model.half()  # once, before the loop
for module in model.modules():
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        module.float()
params = list(model.parameters())
masters = [p.detach().clone().float().requires_grad_() for p in params]
optimizer = torch.optim.SGD(masters, lr=lr)  # your optimizer, over the masters
scaler = torch.amp.GradScaler({device!r})
loss = loss_fn(model(x.half()).float(), y)  # each step
scaler.scale(loss).backward()
for master, p in zip(masters, params):
    master.grad, p.grad = p.grad.float(), None
scaler.step(optimizer)
scaler.update()
with torch.no_grad():
    torch._foreach_copy_(params, masters)"""

_MASTER_BF16_CODE = """\
model.bfloat16()  # once, before the loop
for module in model.modules():
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        module.float()
params = list(model.parameters())
masters = [p.detach().clone().float().requires_grad_() for p in params]
optimizer = torch.optim.SGD(masters, lr=lr)  # your optimizer, over the masters
loss = loss_fn(model(x.bfloat16()).float(), y)  # each step
loss.backward()
for master, p in zip(masters, params):
    master.grad, p.grad = p.grad.float(), None
optimizer.step()
with torch.no_grad():
    torch._foreach_copy_(params, masters)"""

_TRUE_CODE = """\
model.to(torch.{dtype})  # once, before the loop and the optimizer
loss = loss_fn(model(x.to(torch.{dtype})).float(), y)
loss.backward()
optimizer.step()"""

PRECISIONS: tuple[Precision, ...] = (
    Precision(
        name="fp32",
        aliases=("o0", "float32", "single"),
        param_dtype="float32",
        autocast_dtype=None,
        float32_matmul="ieee",
        master_weights=False,
        batch_norm_dtype="float32",
        loss_scale="none",
        peak_dtype="fp32",
        capability=(0, 0),
        emulated_below=False,
        on_cpu=True,
        summary="IEEE float32 in matmul, convolution and RNN alike (PyTorch's default uses TF32 in two of them)",
        code=_IEEE_CODE,
    ),
    Precision(
        name="tf32",
        aliases=("tensorfloat-32", "tensorfloat32"),
        param_dtype="float32",
        autocast_dtype=None,
        float32_matmul="tf32",
        master_weights=False,
        batch_norm_dtype="float32",
        loss_scale="none",
        peak_dtype="tf32",
        capability=(8, 0),
        emulated_below=False,
        on_cpu=False,
        summary="float32 storage; matrix products round their inputs to 10 bits of mantissa",
        code=_IEEE_CODE.replace("ieee", "tf32"),
    ),
    Precision(
        name="fp16-mixed",
        aliases=("o1", "16-mixed", "amp"),
        param_dtype="float32",
        autocast_dtype="float16",
        float32_matmul="ieee",
        master_weights=False,
        batch_norm_dtype="float32",
        loss_scale="dynamic",
        peak_dtype="fp16",
        capability=(5, 3),
        emulated_below=False,
        on_cpu=True,
        summary="float32 weights, autocast to float16, dynamic loss scaling (Apex O1, torch.amp)",
        code=_MIXED_FP16_CODE,
    ),
    Precision(
        name="bf16-mixed",
        aliases=(),
        param_dtype="float32",
        autocast_dtype="bfloat16",
        float32_matmul="ieee",
        master_weights=False,
        batch_norm_dtype="float32",
        loss_scale="none",
        peak_dtype="bf16",
        capability=(8, 0),
        emulated_below=True,
        on_cpu=True,
        summary="float32 weights, autocast to bfloat16, no loss scaling needed",
        code=_MIXED_BF16_CODE,
    ),
    Precision(
        name="fp16-master",
        aliases=("o2",),
        param_dtype="float16",
        autocast_dtype=None,
        float32_matmul="ieee",
        master_weights=True,
        batch_norm_dtype="float32",
        loss_scale="dynamic",
        peak_dtype="fp16",
        capability=(5, 3),
        emulated_below=False,
        on_cpu=True,
        summary="float16 weights, float32 batch norm, float32 masters that the optimizer steps (Apex O2)",
        code=_MASTER_FP16_CODE,
    ),
    Precision(
        name="bf16-master",
        aliases=(),
        param_dtype="bfloat16",
        autocast_dtype=None,
        float32_matmul="ieee",
        master_weights=True,
        batch_norm_dtype="float32",
        loss_scale="none",
        peak_dtype="bf16",
        capability=(8, 0),
        emulated_below=True,
        on_cpu=True,
        summary="bfloat16 weights, float32 batch norm, float32 masters that the optimizer steps, no loss scaling",
        code=_MASTER_BF16_CODE,
    ),
    Precision(
        name="fp16-true",
        aliases=("o3", "16-true", "half"),
        param_dtype="float16",
        autocast_dtype=None,
        float32_matmul="ieee",
        master_weights=False,
        batch_norm_dtype="float16",
        loss_scale="none",
        peak_dtype="fp16",
        capability=(5, 3),
        emulated_below=False,
        on_cpu=True,
        summary="float16 everywhere: weights, batch norm, optimizer state (Apex O3); often diverges",
        code=_TRUE_CODE.replace("{dtype}", "float16"),
    ),
    Precision(
        name="bf16-true",
        aliases=(),
        param_dtype="bfloat16",
        autocast_dtype=None,
        float32_matmul="ieee",
        master_weights=False,
        batch_norm_dtype="bfloat16",
        loss_scale="none",
        peak_dtype="bf16",
        capability=(8, 0),
        emulated_below=True,
        on_cpu=True,
        summary="bfloat16 everywhere: small updates round away, accuracy must be checked",
        code=_TRUE_CODE.replace("{dtype}", "bfloat16"),
    ),
)

_PLACES = {row.name: place for place, row in enumerate(PRECISIONS)}

BASELINE = "fp32"


def find_precision(name: str) -> Precision:
    """Return the row with this name or alias, in any case of letters.

    Raises:
        UsageError: No row has the name; the message offers the nearest.
    """
    found = known_precision(name)
    if found is not None:
        return found
    raise unknown_name("precision", name, (row.name for row in PRECISIONS))


def known_precision(name: str) -> Precision | None:
    """Return the row with this name or alias, and None where no row has it: a record may come from elsewhere."""
    wanted = name.strip().lower()
    return next((row for row in PRECISIONS if wanted == row.name or wanted in row.aliases), None)


def precision_sort_key(name: str) -> tuple[int, str]:
    """Return where a precision stands when precisions are sorted: in the registry's order, unknown ones behind."""
    return (_PLACES.get(name, len(_PLACES)), name)


@dataclass(frozen=True)
class Hardware:
    """What a device can compute in, as far as it decides about precisions.

    Attributes:
        name: The device's name, for messages.
        capability: The CUDA compute capability; None on a CPU.
        cpu_features: The CPU's instructions for 16-bit floats.
    """

    name: str
    capability: tuple[int, int] | None
    cpu_features: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Return whether this is a CPU."""
        return self.capability is None


# The kernel's names of instructions that multiply in a 16-bit format, x86's and Arm's.
_CPU_FEATURES = {
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"}),
}
KNOWN_CPU_FEATURES = frozenset[str]().union(*_CPU_FEATURES.values())


def why_unsupported(row: Precision, hardware: Hardware) -> str | None:
    """Return why a device cannot train in this precision, or None where it can."""
    needed = f"{row.name} needs CUDA compute capability {_dotted(row.capability)} or newer"
    if hardware.is_cpu:
        return None if row.on_cpu else f"{needed}; {hardware.name} is a CPU"
    if row.emulated_below or hardware.capability is None or hardware.capability >= row.capability:
        return None
    return f"{needed}; {hardware.name} has {_dotted(hardware.capability)}"


def why_emulated(row: Precision, hardware: Hardware) -> str | None:
    """Return why a device runs this precision without hardware for it, or None where it has the hardware."""
    if hardware.is_cpu:
        features = _CPU_FEATURES.get(row.autocast_dtype or row.param_dtype)
        if features is None or features & set(hardware.cpu_features):
            return None
        return f"{hardware.name} has no {row.autocast_dtype or row.param_dtype} instructions"
    if hardware.capability is not None and hardware.capability < row.capability and row.emulated_below:
        return (
            f"{hardware.name} has compute capability {_dotted(hardware.capability)}, before {_dotted(row.capability)}"
        )
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
