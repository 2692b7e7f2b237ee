"""What a script does to its model before training: changes of shape and layout, weights of 16 bits."""

from dataclasses import dataclass

from castwise.registry.precisions import Precision
from castwise.render.emit.source import all_definitions, definitions
from castwise.spec.trial import TrialSpec

_SPACE_TO_DEPTH = [
    "_STRIDE",
    "_MOST_CHANNELS",
    "_CHANNEL_MULTIPLE",
    "SpaceToDepthConv",
    "use_space_to_depth",
    "_is_strided",
]
_MATMUL_STEM = ["_ALIGNED", "_MOST_NUMBERS", "MatmulConv", "use_matmul_stem", "_is_short"]


def _stems(module: str, names: list[str]) -> str:
    common = definitions("worker/techniques/first_conv.py", ["find_stem", "take_place"])
    return "\n\n\n".join(
        [all_definitions("worker/techniques/hooks.py"), common, definitions(f"worker/techniques/{module}", names)]
    )


@dataclass(frozen=True)
class _Kernels:
    """What a script takes of a technique that has kernels.

    Attributes:
        modules: Modules below worker/, in their order; all that they define is taken.
        imported: The import within a function that it has no use for.
        registered: The last line, which makes one operation the gradient of another.
    """

    modules: tuple[str, ...]
    imported: str
    registered: str

    @property
    def text(self) -> str:
        """Return all of it."""
        code = [all_definitions(f"worker/{module}.py") for module in self.modules]
        imported = f"        from castwise.worker.{self.imported}\n\n"
        return "\n\n\n".join([*code, self.registered]).replace(imported, "")


_KERNELS = {
    "max-pool-kernel": _Kernels(
        ("techniques/hooks", "kernels/max_pool/module", "kernels/max_pool/triton_kernels"),
        "kernels.max_pool.triton_kernels import max_pool",
        "max_pool.register_autograd(_backward, setup_context=_remember)",
    ),
    "batch-norm-kernel": _Kernels(
        (
            "kernels/batch_norm/types",
            "kernels/batch_norm/module",
            "kernels/batch_norm/triton_kernels",
            "kernels/batch_norm/ops",
            "techniques/hooks",
            "kernels/batch_norm/aliasing",
            "kernels/batch_norm/tracing",
            "kernels/batch_norm/fusion",
        ),
        "kernels.batch_norm.ops import batch_norm",
        "batch_norm.register_autograd(_norm_backward, setup_context=_remember_norm)",
    ),
}


def channels_of(spec: TrialSpec) -> int | None:
    """Return how many channels images are brought to; None leaves them."""
    return next((int(name.rpartition("-")[2]) for name in spec.techniques if name.startswith("pad-channels")), None)


def model_lines(spec: TrialSpec, precision: Precision) -> str:
    """Return what is done to the model once it is built."""
    names = set(spec.techniques)
    lines: list[str] = []
    channels = channels_of(spec)
    if channels is not None:
        lines += ["", "", definitions("worker/techniques/padding.py", ["pad_first_conv"]), "", ""]
        lines.append(f"pad_first_conv(model, {channels})")
    if "space-to-depth" in names:
        lines += ["", "", _stems("first_conv.py", _SPACE_TO_DEPTH), "", ""]
        lines.append("use_space_to_depth(model)")
    if "matmul-stem" in names:
        lines += ["", "", _stems("first_conv.py", _MATMUL_STEM), "", "", "use_matmul_stem(model)"]
    for name in (each for each in _KERNELS if each in names):
        lines += ["", "", _KERNELS[name].text, "", "", f"use_{name.replace('-', '_')}(model)"]
    if "pad-hidden" in names:
        lines += ["", "", definitions("worker/techniques/padding.py", ["_ALIGNED", "pad_hidden"]), "", ""]
        lines.append("pad_hidden(model, 64)")
    if "pad-vocabulary" in names:
        lines += ["", "", definitions("worker/techniques/padding.py", ["_NEVER", "pad_decoder"]), "", ""]
        lines.append("pad_decoder(model, 64)")
    if "chunked-loss" in names:
        lines.append("carried.chunk(8)")
    lines.append("model.to(DEVICE)")
    lines += _conversion(precision)
    if "channels-last" in names:
        lines.append("model.to(memory_format=torch.channels_last)")
    lines.append("model.train()")
    return "\n".join(lines)


_CAST_FLOATING = '''def cast_floating(nested: Any, dtype: torch.dtype) -> Any:
    """Return the same nest with every floating-point tensor in `dtype`."""
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, nested)'''


def _conversion(precision: Precision) -> list[str]:
    if precision.param_dtype == "float32":
        return []
    dtype = f"torch.{precision.param_dtype}"
    lines = [f"model.to({dtype})"]
    if precision.batch_norm_dtype != precision.param_dtype:
        lines += [
            "for module in model.modules():",
            "    if isinstance(module, nn.modules.batchnorm._BatchNorm):",
            f"        module.to(torch.{precision.batch_norm_dtype})",
        ]
    return [
        *lines,
        "",
        "",
        _CAST_FLOATING,
        "",
        "",
        "# Inputs are cast to the weights' dtype, and outputs to float32, so that the loss is taken in float32.",
        "model.register_forward_pre_hook(",
        f"    lambda _, args, kwargs: (cast_floating(args, {dtype}), cast_floating(kwargs, {dtype})), with_kwargs=True",
        ")",
        "model.register_forward_hook(lambda _, __, output: cast_floating(output, torch.float32))",
    ]
