"""What a script does to its model before training: changes of shape and layout, weights of 16 bits."""

from castwise.plan import TrialSpec
from castwise.precisions import Precision
from castwise.report.script.sources import definitions

_SPACE_TO_DEPTH = [
    "_STRIDE",
    "_MOST_CHANNELS",
    "_CHANNEL_MULTIPLE",
    "SpaceToDepthConv",
    "use_space_to_depth",
    "_is_strided",
]
_MATMUL_STEM = ["_ALIGNED", "_MOST_NUMBERS", "MatmulConv", "use_matmul_stem", "_is_short"]
# The techniques whose code refuses models that they do not fit.
_CHECKING = ("pad-vocabulary", "pad-hidden", "space-to-depth", "matmul-stem", "max-pool-kernel")

_MAX_POOL = ["_SIDE", "_STRIDE", "_PADDINGS", "KernelMaxPool", "use_max_pool_kernel", "_is_such"]
_MAX_POOL_KERNELS = [
    "_SIDE",
    "_STRIDE",
    "_BLOCK",
    "forward_kernel",
    "_window",
    "backward_kernel",
    "launch_forward",
    "launch_backward",
    "_outputs",
    "max_pool",
    "max_pool_backward",
    "_remember",
    "_backward",
]
_IMPORT_OF_KERNELS = "        from castwise.measure.techniques.max_pool_kernels import max_pool\n\n"


def _stems(module: str, names: list[str]) -> str:
    common = definitions("measure/techniques/stems.py", ["find_stem", "take_place"])
    return "\n\n\n".join([common, definitions(f"measure/techniques/{module}", names)])


def _max_pool_definitions() -> str:
    modules = definitions("measure/techniques/max_pool.py", _MAX_POOL)
    kernels = definitions("measure/techniques/max_pool_kernels.py", _MAX_POOL_KERNELS)
    registered = "max_pool.register_autograd(_backward, setup_context=_remember)"
    return "\n\n\n".join([modules.replace(_IMPORT_OF_KERNELS, ""), kernels, registered])


def channels_of(spec: TrialSpec) -> int | None:
    """Return how many channels images are brought to; None leaves them."""
    return next((int(name.rpartition("-")[2]) for name in spec.techniques if name.startswith("pad-channels")), None)


def model_lines(spec: TrialSpec, precision: Precision) -> str:
    """Return what is done to the model once it is built."""
    names = set(spec.techniques)
    lines: list[str] = []
    channels = channels_of(spec)
    if channels is not None or not names.isdisjoint(_CHECKING):
        lines.append("UsageError = RuntimeError")
    if channels is not None:
        lines += ["", "", definitions("measure/techniques/models.py", ["widen_first_convolution"]), "", ""]
        lines.append(f"widen_first_convolution(model, {channels})")
    if "space-to-depth" in names:
        lines += ["", "", _stems("space_to_depth.py", _SPACE_TO_DEPTH), "", ""]
        lines.append("use_space_to_depth(model)")
    if "matmul-stem" in names:
        lines += ["", "", _stems("matmul_stem.py", _MATMUL_STEM), "", "", "use_matmul_stem(model)"]
    if "max-pool-kernel" in names:
        lines += ["", "", _max_pool_definitions(), "", "", "use_max_pool_kernel(model)"]
    if "pad-hidden" in names:
        lines += ["", "", definitions("measure/techniques/models.py", ["_ALIGNED", "pad_hidden"]), "", ""]
        lines.append("pad_hidden(model, 64)")
    if "pad-vocabulary" in names:
        lines += ["", "", definitions("measure/techniques/models.py", ["_NEVER", "pad_decoder"]), "", ""]
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
