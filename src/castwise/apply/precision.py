"""Apply a precision to a model: the one place where a row of the precision registry meets torch."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from castwise.apply.float8 import convert_to_float8
from castwise.apply.pytree import tree_map_tensors
from castwise.errors import UsageError
from castwise.records.schema import Float8Facts
from castwise.registry.precisions import Precision
from castwise.registry.techniques import ATTENTION_KERNELS, PLAIN, StepConfig

# These two are written with the older switch for matrix products. It decides nothing, but torch 2.11's max-autotune
# reads it, and torch raises if it contradicts them.
_OLDER_WRITES = ("cuda.matmul", "mkldnn.matmul")

_MOST_COPIES = 1 << 26  # weights that have float32 copies at a time: 0.5 GiB with their gradients. Chosen here
_SMALL = 1e-6  # Source: torch.nn.utils.clip_grad_norm_

# Where torch decides how float32 products are computed, parents first: `cudnn` is also cuda.matmul's. `mkldnn` itself
# is left out: writing it writes the one for all.
_PARTS = ("cudnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
FP32_SWITCHES: dict[str, Any] = {
    "all": torch.backends,
    **{part: functools.reduce(getattr, part.split("."), torch.backends) for part in _PARTS},
}


def read_fp32_precision() -> dict[str, str]:
    """Return what float32 products compute in, by PyTorch's name of each switch."""
    return {name: str(switch.fp32_precision) for name, switch in FP32_SWITCHES.items()}


def read_products(device_type: str) -> tuple[str, ...]:
    """Return what float32 matrix products, convolutions and RNNs of a device really compute in: "ieee" or less."""
    parts = ("cuda.matmul", "cudnn.conv", "cudnn.rnn") if device_type == "cuda" else _PARTS[-3:]
    found = read_fp32_precision()
    return tuple("ieee" if found[part] == "none" else found[part] for part in parts)


@contextmanager
def numeric_state(row: Precision, loop: StepConfig = PLAIN) -> Iterator[None]:
    """Set the global switches as precision and techniques want them; restore them whatever happens inside."""
    before, benchmark = read_fp32_precision(), torch.backends.cudnn.benchmark
    accumulation = torch.backends.cuda.matmul.allow_fp16_accumulation
    attention = [name for name in ATTENTION_KERNELS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    written: list[str] = []
    try:
        written = set_switches(row, loop)
        yield
    finally:
        restore_fp32_precision(before, written)
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cuda.matmul.allow_fp16_accumulation = accumulation
        if loop.attention:
            _set_attention(attention)


def set_switches(row: Precision, loop: StepConfig) -> list[str]:
    """Set the global switches as precision and techniques want them; return those for float32 that this wrote."""
    if loop.cudnn_search:
        torch.backends.cudnn.benchmark = True
    if loop.fp16_accumulation:
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
    if loop.attention:
        _set_attention([loop.attention])
    return [] if row.float32_matmul is None else set_fp32_precision(row.float32_matmul)


def _set_attention(kernels: Sequence[str]) -> None:
    for name in ATTENTION_KERNELS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name in kernels)


def set_fp32_precision(products: str) -> list[str]:
    """Set every switch for float32 products; return those that this wrote."""
    written = _set_older("high" if products == "tf32" else "highest")
    for name, switch in FP32_SWITCHES.items():
        # oneDNN on CPUs has no TF32 of its own; the switch would be refused there.
        wanted = "ieee" if name.startswith("mkldnn") else products
        # A switch that follows its parent already is not written: torch's default would not come back.
        if switch.fp32_precision != wanted:
            switch.fp32_precision = wanted
            written.append(name)
    return written


def restore_fp32_precision(before: dict[str, str], written: Sequence[str] = ()) -> None:
    """Set the global float32 switches to what `read_fp32_precision` returned, and the older one to agree with them.

    `written` are the switches that were written since, as far as is known.
    """
    matmuls = {before[name] for name in _OLDER_WRITES}
    older = "medium" if "bf16" in matmuls else "high" if "tf32" in matmuls else "highest"
    written = [*written, *_set_older(older)]
    for name, switch in FP32_SWITCHES.items():
        if name in written:
            switch.fp32_precision = "none"  # follows its parent again
        if switch.fp32_precision != before[name]:
            switch.fp32_precision = before[name]


def _set_older(wanted: str) -> list[str]:
    """Set the older switch for matrix products, unless it is set already; return the switches that this wrote."""
    try:
        if torch.get_float32_matmul_precision() == wanted:
            return []
    except RuntimeError:
        pass  # torch raises where one of the others contradicts it, and does not say what it is
    torch.set_float32_matmul_precision(wanted)
    return list(_OLDER_WRITES)


def autocast_maker(row: Precision, device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes a new autocast for every step, as a loop written by hand does, or a context without effect."""
    if row.autocast_dtype is None:
        return nullcontext
    # torch 2.11 and 2.12 take what was compiled under autocast to another dtype from their cache: bf16-mixed would
    # compute in float16 without a loss scale. Source: pytorch/pytorch#181564.
    users, _, _ = torch.compiler.config.cache_key_tag.partition("autocast ")
    torch.compiler.config.cache_key_tag = f"{users}autocast {row.autocast_dtype}"
    return functools.partial(torch.autocast, device_type, dtype=getattr(torch, row.autocast_dtype))


_CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float16": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "float32": nn.Module.float,
}


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def _cast_outputs(_: nn.Module, __: Any, output: Any) -> Any:
    return cast_floating(output, torch.float32)


def cast_weights(model: nn.Module, dtype: str, batch_norm_dtype: str) -> None:
    """Cast a model's weights and buffers in place; complex ones stay, of which a cast would drop a half.

    Source: NVIDIA/apex apex/amp/_initialize.py at 47e3367f (convert_network).
    """
    _CASTS[dtype](model)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            _CASTS[batch_norm_dtype](module)


def cast_calls(
    model: nn.Module, dtype: torch.dtype, cast_inputs: Callable[..., tuple[Any, Any]] = _cast_inputs
) -> None:
    """Cast a model's inputs to its weights' dtype and outputs to float32, so that the loss is taken in float32.

    Source: NVIDIA/apex apex/amp/_initialize.py at 47e3367f (patched forward).
    """
    model.register_forward_pre_hook(functools.partial(cast_inputs, dtype), with_kwargs=True)
    model.register_forward_hook(_cast_outputs)


def convert_weights(
    model: nn.Module, row: Precision, cast_inputs: Callable[..., tuple[Any, Any]] = _cast_inputs
) -> Float8Facts | None:
    """Cast the model's weights in place to what the precision holds them in, or let its linear layers run in FP8."""
    if row.float8_recipe:
        return convert_to_float8(model, row)
    if row.param_dtype != "float32":
        cast_weights(model, row.param_dtype, row.batch_norm_dtype)
        cast_calls(model, getattr(torch, row.param_dtype), cast_inputs)
    return None


def rounded_buffers(model: nn.Module, row: Precision) -> tuple[str, ...]:
    """Return a note if the precision rounds buffers in which the model keeps numbers, such as rotary frequencies."""
    dtype = getattr(torch, row.param_dtype)
    names = [
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if not isinstance(module, nn.modules.batchnorm._BatchNorm)
        if buffer.dtype == torch.float32 and not torch.equal(buffer.to(dtype).float(), buffer)
    ]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (f"buffer {names[0]}{more} is rounded to {row.param_dtype}",) if names else ()


@contextmanager
def weights_in_float32(model: nn.Module) -> Iterator[None]:
    """Hold a model's weights, buffers and inputs in float32; afterwards they are the same tensors as before."""
    held = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    with patch.dict(model._forward_pre_hooks):
        for number, hook in list(model._forward_pre_hooks.items()):
            if isinstance(hook, functools.partial) and hook.func is _cast_inputs:
                model._forward_pre_hooks[number] = functools.partial(_cast_inputs, torch.float32)
        try:
            for tensor, data in held:
                tensor.data = data.float()
            yield
        finally:
            model.zero_grad(set_to_none=True)  # a gradient has its weight's dtype
            for tensor, data in held:
                tensor.data = data


def cast_floating(nested: Any, dtype: torch.dtype) -> Any:
    return tree_map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, nested)


class Weights:
    """The model's weights as backward leaves them and as the optimizer steps them: the same tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    @property
    def stepped(self) -> list[Tensor]:
        """Return the tensors the optimizer steps, in the model's order."""
        return [self.stepped_for(p) for p in self._parameters]

    @property
    def kept(self) -> list[Tensor]:
        """Return those of the stepped tensors that hold values between steps, which a checkpoint needs."""
        return self.stepped

    def stepped_for(self, parameter: Tensor) -> Tensor:
        """Return what the optimizer steps instead of a tensor; a tensor that is no weight itself."""
        return parameter

    def behind(self, stepped: Tensor) -> Tensor:
        """Return the weight, with the gradient of backward, that a stepped tensor stands for."""
        return stepped

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer of the model's weights step what stands for them, its state included.

        Source: NVIDIA/apex apex/amp/_process_optimizer.py at 47e3367f (masters take the weights' places in the groups).
        """
        for group in optimizer.param_groups:
            group["params"] = [self.stepped_for(parameter) for parameter in group["params"]]
        state, optimizer.state = dict(optimizer.state), type(optimizer.state)(dict)
        for parameter, values in state.items():
            stepped = self.stepped_for(parameter)
            optimizer.state[stepped] = {
                name: value.to(stepped.device, stepped.dtype if value.shape == stepped.shape else None)
                if isinstance(value, Tensor)
                else value
                for name, value in values.items()
            }

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def collect_gradients(self) -> None:
        """Bring the gradients of backward to the tensors the optimizer steps."""

    def publish(self) -> None:
        """Bring the stepped tensors back to the model."""

    def updates(self, clip: float | None) -> Iterator[float | None]:
        """Yield before each step of the optimizer that an update takes what its gradients are to be clipped to."""
        self.collect_gradients()
        yield clip
        self.publish()


class MasterWeights(Weights):
    """Float32 masters of every lower-precision weight; float32 weights are stepped as they are.

    Source: NVIDIA/apex apex/fp16_utils/fp16_optimizer.py at 79ad5a88 (FP16_Optimizer); apex.amp's O2.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._low: list[Tensor] = [p for p in self._parameters if p.is_floating_point() and p.dtype != torch.float32]
        self._masters = [p.detach().clone().float().requires_grad_() for p in self._low]
        self._gradients = [torch.zeros_like(master) for master in self._masters]
        self._master_of = dict(zip((id(p) for p in self._low), self._masters, strict=True))
        self._weight_of = dict(zip((id(m) for m in self._masters), self._low, strict=True))

    def stepped_for(self, parameter: Tensor) -> Tensor:
        return self._master_of.get(id(parameter), parameter)

    def behind(self, stepped: Tensor) -> Tensor:
        return self._weight_of.get(id(stepped), stepped)

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Copy lower-precision gradients into the masters' float32 gradients.

        The master of a weight that took no part in the step gets no gradient, so that the optimizer skips it as it
        skips every such weight; a gradient of zeros would still decay it and move it by its momentum.
        """
        sources = [p.grad for p in self._low]
        for master, gradient, source in zip(self._masters, self._gradients, sources, strict=True):
            master.grad = None if source is None else gradient
        targets = [master.grad for master in self._masters if master.grad is not None]
        if targets:
            torch._foreach_copy_(targets, [source for source in sources if source is not None])

    @torch.no_grad()
    def publish(self) -> None:
        if self._low:
            torch._foreach_copy_(self._low, self._masters)


class RoundedWeights(MasterWeights):
    """Float32 copies of every lower-precision weight that last for its update, and are rounded to it at random.

    A weight is rounded up as often as it lies near the number above: so many small updates move it in the mean, though
    each is less than half of the distance to the next number. Weights are stepped in parts, so that not all of them
    have a copy at a time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        copies = list(zip(self._low, self._masters, self._gradients, strict=True))
        self._parts: list[list[tuple[Tensor, Tensor, Tensor]]] = [[]]
        size = 0
        for weight, master, gradient in copies:
            if size and size + weight.numel() > _MOST_COPIES:
                self._parts.append([])
                size = 0
            self._parts[-1].append((weight, master, gradient))
            size += weight.numel()
        for _, master, gradient in copies:
            _set_storage(master, gradient, is_kept=False)

    @property
    def kept(self) -> list[Tensor]:
        return []

    @torch.no_grad()
    def updates(self, clip: float | None) -> Iterator[float | None]:
        """Yield what `Weights.updates` does; gradients are clipped here, since their norm is that of all parts."""
        gradients = [(weight, weight.grad) for weight in self._parameters if weight.grad is not None]
        factor = None
        if clip is not None and gradients:
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for _, gradient in gradients]
            factor = torch.clamp(clip / (torch.linalg.vector_norm(torch.stack(norms)) + _SMALL), max=1.0)
        others = [(weight, gradient) for weight, gradient in gradients if self.stepped_for(weight) is weight]
        if factor is not None and others:
            torch._foreach_mul_([gradient for _, gradient in others], factor)
        for part in self._parts:
            for weight, master, gradient in part:
                if weight.grad is not None:
                    _set_storage(master, gradient, is_kept=True)
                    master.copy_(weight)
                    master.grad = gradient.copy_(weight.grad)
                    if factor is not None:
                        gradient.mul_(factor)
            yield None
            for weight, master, gradient in part:
                if master.grad is not None:
                    weight.copy_(round_stochastically(master))
                    master.grad = None
                    _set_storage(master, gradient, is_kept=False)
            for weight, _ in others:  # they are stepped with the first part
                weight.grad = None
        for weight, gradient in others:
            weight.grad = gradient


def _set_storage(*tensors: Tensor, is_kept: bool) -> None:
    """Give tensors the memory that they need, or none."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size() * is_kept)


def round_stochastically(values: Tensor) -> Tensor:
    """Return float32 values that bfloat16 can hold, each one of the two next to a value; their mean is that value.

    A random number of 16 bits is added to the 16 that bfloat16 lacks, and these are cut off: the carry rounds up.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(1 << 16, bits.shape, device=bits.device, dtype=torch.int32)
    return ((bits + noise) & -(1 << 16)).view(torch.float32)


class ShardedWeights(Weights):
    """Weights of which the optimizer steps this rank's shards."""

    def __init__(self, model: nn.Module, shard: Callable[[nn.Module], None]) -> None:
        whole = dict(model.named_parameters())
        shard(model)
        super().__init__(model)
        shards = dict(model.named_parameters())
        # Without keeping whole weights alive, which only a user's optimizer does.
        self._shard_of = WeakIdKeyDictionary({weight: shards[name] for name, weight in whole.items()})

    def stepped_for(self, parameter: Tensor) -> Tensor:
        stepped: Tensor = self._shard_of.get(parameter, parameter)  # type: ignore[no-untyped-call]
        return stepped

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer of the whole weights step the shards, before its first step."""
        if optimizer.state:
            raise UsageError("fsdp cannot shard the state of an optimizer that has stepped already. Take ddp.")
        super().adopt(optimizer)


def make_weights(model: nn.Module, row: Precision) -> Weights:
    """Return the weights of a model whose precision has been applied."""
    if row.stochastic_rounding:
        return RoundedWeights(model)
    return MasterWeights(model) if row.master_weights else Weights(model)
