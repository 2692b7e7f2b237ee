"""Linear layers in FP8 and MXFP8 by torchao, and how far their products are from bfloat16's.

torchao changes Inductor for the whole process, so it is imported where a model is converted, and nowhere else.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from castwise.apply.techniques.padding import PaddedDecoder, find_decoder, hide_words
from castwise.errors import TechniqueError
from castwise.records.schema import Float8Facts
from castwise.registry.precisions import Precision, why_without_torchao

# cuBLASLt takes FP8 matrices whose dimensions are multiples of this; of the tokens, too, for the weight's gradient.
# MXFP8 has a scale for as many values, along rows and along columns.
_MULTIPLE = 16
_MULTIPLES = {"mxfp8": 32}
_LONGEST_REASON = 200

_UNITS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_NO_PRODUCT = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)


def version_of(package: str) -> str | None:
    """Return a package's version without importing it, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def convert_to_float8(model: nn.Module, row: Precision) -> Float8Facts:
    """Replace linear layers by torchao's, in place; weights and optimizers stay as they are, tied weights too."""
    reason = why_without_torchao(row, version_of("torchao"))
    if reason is not None:
        raise TechniqueError(reason)
    multiple = _MULTIPLES.get(row.float8_recipe, _MULTIPLE)
    left = Counter(why for name, module in model.named_modules() if (why := _why_left(module, name, multiple)))
    if row.float8_recipe == "mxfp8":
        convert_to_mxfp8(model)
    else:
        convert_linear_layers(model, row.float8_recipe)
    num_converted = sum(1 for _ in _converted(model))
    if not num_converted:
        why = "; ".join(f"{count} {reason}" for reason, count in left.most_common()) or "none has products"
        raise TechniqueError(f"{row.name} finds no layer that can run in FP8. Left: {why}.")
    return Float8Facts(recipe=row.float8_recipe, num_converted=num_converted, left=dict(left.most_common()))


def convert_linear_layers(model: nn.Module, recipe: str) -> None:
    """Replace the linear layers that FP8 takes by torchao's, in place."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    class PaddedFloat8Decoder(Float8Linear):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
            return hide_words(super().forward(input), self)

    padded = {name: layer for name, layer in model.named_modules() if isinstance(layer, PaddedDecoder)}
    convert_to_float8_training(model, module_filter_fn=fits_float8, config=Float8LinearConfig.from_recipe_name(recipe))
    for name, before in padded.items():  # torchao's layer knows of no padding
        decoder: Any = model.get_submodule(name)
        if isinstance(decoder, Float8Linear):
            decoder.__class__ = PaddedFloat8Decoder
            decoder.num_words, decoder.keeps_width = before.num_words, before.keeps_width


def convert_to_mxfp8(model: nn.Module) -> None:
    """Let the linear layers that MXFP8 takes compute torchao's products, in place; on a CPU they are emulated.

    Of torchao 0.18's quantize_ with MXFP8TrainingOpConfig only the product is taken: it leaves out biases, and makes
    new weights, which an optimizer does not step.
    """
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    class Mxfp8Layer(MXFP8Linear):  # type: ignore[misc]
        def product(self, data: Tensor, weight: Tensor) -> Tensor:
            kernels = KernelPreference.EMULATED if data.device.type == "cpu" else KernelPreference.AUTO
            product: Tensor = _to_mxfp8_then_scaled_mm(data, weight, kernels, ScaleCalculationMode.RCEIL)
            return product

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's own name
            with torch.autocast(input.device.type, enabled=False):
                output = self.product(input.to(torch.bfloat16), self.weight.to(torch.bfloat16))
            output = output if self.bias is None else output + self.bias.to(output.dtype)
            return hide_words(output, self) if hasattr(self, "num_words") else output

    for name, layer in list(model.named_modules()):
        if fits_float8(layer, name, _MULTIPLES["mxfp8"]):
            layer.__class__ = Mxfp8Layer


def keep_small_layers(model: nn.Module) -> None:
    """Let the linear layers stay in bfloat16 that are too small for FP8 to be faster, by torchao's own measurements."""
    from torchao.float8 import _auto_filter_for_recipe

    is_large = _auto_filter_for_recipe("tensorwise", [])
    small = [layer for name, layer in model.named_modules() if fits_float8(layer, name) and not is_large(layer, name)]
    if not small:
        raise TechniqueError("fp8-large-layers finds nothing to do: no linear layer is too small for FP8.")
    for layer in small:
        layer.stays_in_bfloat16 = True


def keep_decoder(model: nn.Module) -> None:
    """Let a language model's decoder stay in bfloat16."""
    found = find_decoder(model)
    if found is None:
        raise TechniqueError("fp8-without-decoder finds no linear layer with an output for each word.")
    found[1].stays_in_bfloat16 = True  # type: ignore[assignment]


def fits_float8(layer: nn.Module, name: str, multiple: int = 16) -> bool:
    """Return whether a layer can run in FP8: a plain or padded nn.Linear of these sizes, without hooks, in a model."""
    if not isinstance(layer, nn.Linear) or type(layer) not in (nn.Linear, PaddedDecoder):
        return False
    if not name or layer._forward_hooks or layer._forward_pre_hooks or getattr(layer, "stays_in_bfloat16", False):
        return False
    return "weight" in layer._parameters and layer.in_features % multiple == layer.out_features % multiple == 0


def _why_left(module: nn.Module, name: str, multiple: int) -> str:
    """Return why a layer stays as it is; empty if it is converted, or has no products of weights."""
    kind = type(module)
    if fits_float8(module, name, multiple):
        return ""
    if not isinstance(module, nn.Linear):
        is_layer = next(module.children(), None) is None and not isinstance(module, _NO_PRODUCT)
        has_matrix = is_layer and any(weight.dim() > 1 for weight in module.parameters(recurse=False))
        return f"no nn.Linear but {kind.__name__}" if has_matrix or isinstance(module, _UNITS) else ""
    if kind not in (nn.Linear, PaddedDecoder):  # as in nn.MultiheadAttention, which does not call its layer
        return f"no plain nn.Linear but {kind.__name__}"
    if module.in_features % multiple or module.out_features % multiple:
        return f"with a dimension that is no multiple of {multiple}"
    if getattr(module, "stays_in_bfloat16", False):
        return "left out by a technique"
    return "with hooks, or a weight that is computed" if name else "that is the whole model"


def _converted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from torchao.float8.float8_linear import Float8Linear
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

    kinds = (Float8Linear, MXFP8Linear)
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))


def compare_with_bfloat16(model: nn.Module, facts: Float8Facts, run: Callable[[], object]) -> Float8Facts:
    """Return the facts with what FP8 loses in `run`, forward and backward passes of the model, not compiled.

    Each layer's products are computed from the same input, weight and output gradient in both formats. Gradients,
    buffers and random numbers are afterwards as before.
    """
    noises: dict[str, Tensor] = {}
    underflows: dict[str, Tensor] = {}
    multiple = _MULTIPLES.get(facts.recipe, _MULTIPLE)
    called: set[str] = set()

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            data = inputs[0].detach()
            num_rows = data[..., 0].numel()
            if num_rows % multiple:
                raise TechniqueError(
                    f"FP8 needs batches of a multiple of {multiple} tokens; '{name}' gets {num_rows}. "
                    "Take another batch size or length."
                )
            called.add(name)
            if output.requires_grad:
                compare = partial(_compare, name, layer, data, noises=noises, underflows=underflows)
                output.register_hook(compare)  # type: ignore[no-untyped-call]

        return hook

    layers = dict(_converted(model))
    missing = ""
    with ExitStack() as stack, as_before(model):
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(hook_of(name)).remove)
        try:
            run()
        except (RuntimeError, MemoryError) as error:  # memory, above all: a step that is not compiled takes more
            missing = f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST_REASON]
    if missing:
        return facts.model_copy(update={"missing": missing})
    if not called:
        raise TechniqueError(f"FP8 finds {len(layers)} linear layers, and the model calls none of them.")
    left = facts.left | (
        {"that are not called as layers": len(layers) - len(called)} if len(called) < len(layers) else {}
    )
    update: dict[str, Any] = {"num_converted": len(called), "left": left}
    if noises:
        product, sqnr = min(_floats(noises).items(), key=lambda item: item[1])
        factor, share = max(_floats(underflows).items(), key=lambda item: item[1])
        update |= {"min_sqnr_db": sqnr, "min_sqnr_product": product}
        update |= {"max_underflow_share": share, "max_underflow_factor": factor}
    return facts.model_copy(update=update)


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Let a model run uncompiled; its buffers and random numbers are then as before, and its gradients dropped."""
    gpus = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices=gpus):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        model.zero_grad(set_to_none=True)


def _compare(
    name: str, layer: Any, data: Tensor, gradient: Tensor, *, noises: dict[str, Tensor], underflows: dict[str, Tensor]
) -> None:
    """Compute a layer's products in FP8, as torchao's layer does, and in bfloat16; keep what tells them apart."""
    data, gradient = (tensor.to(torch.bfloat16).flatten(0, -2) for tensor in (data, gradient))
    gradient = nn.functional.pad(gradient, (0, layer.out_features - gradient.shape[-1]))  # of a padded decoder
    weight = layer.weight.detach()
    with torch.autocast(data.device.type, enabled=False):
        with torch.enable_grad():
            is_mx = hasattr(layer, "product")  # its product takes a weight that is cast
            factors = [each.detach().requires_grad_() for each in (data, weight.to(data.dtype) if is_mx else weight)]
            output = _product(layer, *factors)
        of_data, of_weight = torch.autograd.grad(output, factors, gradient)
        low = weight.to(torch.bfloat16)
        for kind, found, one, other in (  # one after another: they are large
            ("output", output.detach(), data, low.t()),
            ("input gradient", of_data, gradient, low),
            ("weight gradient", of_weight, gradient.t(), data),
        ):
            _keep_worst(noises, f"{name}, {kind}", sqnr_db(one @ other, found), torch.minimum)
    for kind, factor, low in _casts(layer, data, weight, gradient):
        is_zero = low.view(torch.uint8) & 0x7F == 0  # of either sign
        lost = (is_zero & (factor != 0)).sum() / (factor != 0).sum().clamp(min=1)
        _keep_worst(underflows, f"{name}, {kind}", lost, torch.maximum)


def _product(layer: Any, data: Tensor, weight: Tensor) -> Tensor:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    if hasattr(layer, "product"):
        return layer.product(data, weight)  # type: ignore[no-any-return]
    product: Tensor = matmul_with_hp_or_float8_args.apply(data, weight.t(), layer.linear_mm_config, layer.config)
    return product


def _casts(layer: Any, data: Tensor, weight: Tensor, gradient: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each factor of a layer's products, the factor, and its values in FP8 without their scales."""
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    named = {"input": data, "weight": weight, "output gradient": gradient}
    if hasattr(layer, "product"):
        for kind, factor in named.items():
            mx = MXTensor.to_mx(factor, torch.float8_e4m3fn, _MULTIPLES["mxfp8"], ScaleCalculationMode.RCEIL)
            yield kind, factor, mx.qdata
        return
    config = layer.config
    for kind, cast, dim in (
        ("input", config.cast_config_input, -1),
        ("weight", config.cast_config_weight, 0),
        ("output gradient", config.cast_config_grad_output, -1),
    ):
        factor = named[kind].t() if kind == "weight" else named[kind]
        low = hp_tensor_to_float8_dynamic(
            factor,
            cast.target_dtype,
            layer.linear_mm_config,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )._data
        yield kind, factor, low


def sqnr_db(reference: Tensor, found: Tensor) -> Tensor:
    """Return the ratio of a signal to its error in decibels, within 0 and 200."""
    signal, noise = (torch.linalg.vector_norm(x, dtype=torch.float32) for x in (reference, reference - found))
    exact = torch.where(noise == 0, 200.0, 20 * torch.log10(signal / noise))
    return exact.nan_to_num(nan=0.0).clamp(0.0, 200.0)


def _keep_worst(kept: dict[str, Tensor], name: str, value: Tensor, worst: Callable[[Tensor, Tensor], Tensor]) -> None:
    kept[name] = worst(kept[name], value) if name in kept else value  # a layer may be called twice


def _floats(values: dict[str, Tensor]) -> dict[str, float]:
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
