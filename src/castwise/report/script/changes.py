"""What a script does to its model before training: changes of shape and layout, weights of 16 bits."""

from collections.abc import Sequence

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
_CHECKING = ("pad-vocabulary", "pad-hidden", "space-to-depth", "matmul-stem", "max-pool-kernel", "batch-norm-kernel")

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
_BATCH_NORM = [
    "NO_ACTIVATION",
    "RELU",
    "SILU",
    "_MODULES",
    "_FUNCTIONS",
    "_METHODS",
    "_ADDITIONS",
    "_COMPUTED",
    "KernelBatchNorm",
    "_is_for_kernels",
    "RunningStatistics",
    "use_batch_norm_kernel",
    "_train_by",
    "_norms_in",
    "_tell",
    "_only_user",
    "_activation_of",
]
_BATCH_NORM_KERNELS = [
    "_ELEMENTS",
    "_WARPS",
    "_MOST_CHANNELS",
    "_MOST_PARTS",
    "_PROGRAMS",
    "_COMBINED_CHANNELS",
    "_activated",
    "_before_activation",
    "_traits",
    "statistics_kernel",
    "combine_kernel",
    "normalise_kernel",
    "gradient_sums_kernel",
    "combine_sums_kernel",
    "gradient_kernel",
    "launch_norm",
    "launch_norm_backward",
    "_blocks_of",
    "batch_norm",
    "batch_norm_backward",
    "_remember_norm",
    "_norm_backward",
]


def _stems(module: str, names: list[str]) -> str:
    common = definitions("measure/techniques/stems.py", ["find_stem", "take_place"])
    return "\n\n\n".join([common, definitions(f"measure/techniques/{module}", names)])


def _kernel_definitions(module: str, names: Sequence[str], kernels: Sequence[str], registered: str) -> str:
    """Return a module that has kernels, and these, which it imports where they are used.

    Args:
        module: The module's name; its kernels' ends in `_kernels`.
        names: What is wanted of it.
        kernels: What is wanted of them.
        registered: Their last line, which makes one operation the gradient of another.
    """
    modules = definitions(f"measure/techniques/{module}.py", names)
    imported = f"        from castwise.measure.techniques.{module}_kernels import {module}\n\n"
    code = definitions(f"measure/techniques/{module}_kernels.py", kernels)
    return "\n\n\n".join([modules.replace(imported, ""), code, registered])


# Of techniques with kernels: the module, what is taken of it and of its kernels, and their last line.
_KERNELS = {
    "max-pool-kernel": (
        "max_pool",
        _MAX_POOL,
        _MAX_POOL_KERNELS,
        "max_pool.register_autograd(_backward, setup_context=_remember)",
    ),
    "batch-norm-kernel": (
        "batch_norm",
        _BATCH_NORM,
        _BATCH_NORM_KERNELS,
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
    for name in (each for each in _KERNELS if each in names):
        lines += ["", "", _kernel_definitions(*_KERNELS[name]), "", "", f"use_{name.replace('-', '_')}(model)"]
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
