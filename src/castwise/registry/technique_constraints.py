"""Which techniques a trial can have: conditions of device, model, optimizer and schedule, and the reasons in words."""

from collections.abc import Mapping, Sequence

from castwise.registry.techniques import SETS, Technique, find_technique, in_order
from castwise.registry.workloads import find_workload
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.trial import TrialSpec


def resolve(names: Sequence[str], spec: TrialSpec, sets: Mapping[str, Sequence[str]] = SETS) -> TrialSpec:
    """Return a spec with these techniques, and of the sets among them those members that it can have.

    Args:
        names: Techniques and sets.
        spec: The trial.
        sets: The members of each set.
    """
    named = {name for name in names if name not in sets}
    members = {member for name in names for member in sets.get(name, ())}
    if find_workload(spec.workload).family == "own":
        members -= _OF_AN_OPTIMIZER  # nobody knows it yet, and a member that it refuses would take the set with it
    taken: set[str] = set()
    for member in in_order(members):  # one may need another, which comes before it
        if why_unsupported(spec.model_copy(update={"techniques": in_order(taken | {member})})) is None:
            taken.add(member)
    return spec.model_copy(update={"techniques": in_order(named | taken)})


def why_unsupported(spec: TrialSpec, capability: tuple[int, int] | None = None) -> str | None:
    """Return why a trial cannot have one of its techniques, or None where it can have all.

    Args:
        spec: The trial.
        capability: The GPU's compute capability, where it is known.

    Raises:
        UsageError: A technique does not exist.
    """
    for name in spec.techniques:
        reason = _why_not(find_technique(name), spec, capability)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _why_not(row: Technique, spec: TrialSpec, capability: tuple[int, int] | None) -> str | None:
    beside = [name for name in spec.techniques if name in row.excludes]
    if beside:
        return f"excludes {beside[0]}"
    if spec.device_type not in row.devices:
        return f"needs a {'CUDA device' if spec.device_type == 'cpu' else 'CPU'}; this is {spec.device}"
    if spec.kind not in row.kinds:
        return "changes how a training run reads its data; steady trials have theirs on the device"
    if spec.world_size > 1 and row.on_several_gpus not in ("", *spec.techniques):
        return f"needs {row.on_several_gpus} where a step is spread; this one is over {spec.spread}"
    misfit = _why_misfit(row, spec)
    return _SPECIAL[row.name](spec, capability) if misfit is None and row.name in _SPECIAL else misfit


def _why_misfit(row: Technique, spec: TrialSpec) -> str | None:
    """Return why a technique is not for a trial's model or optimizer."""
    workload = find_workload(spec.workload)
    if workload.family == "own":
        return None if row.fits_own_models else "is for castwise's own workloads"
    if workload.unit not in row.units:
        return f"is for {' and '.join(row.units)}; {workload.name} has {workload.unit}"
    if row.families and workload.family not in row.families:
        return f"is for recurrent language models; {workload.name} is none"
    if row.optimizers and optimizer_of(spec) not in row.optimizers:
        return f"fits {', '.join(row.optimizers)}; torch has no such {optimizer_of(spec)}"
    return None


def optimizer_of(spec: TrialSpec) -> str:
    """Return the name of the optimizer that a trial steps with."""
    if spec.recipe is not None and spec.recipe.optimizer is not None:
        return spec.recipe.optimizer.name
    return find_workload(spec.workload).optimizer.name


def _why_no_sync(spec: TrialSpec, _: tuple[int, int] | None) -> str | None:
    reads_loss = spec.recipe is not None and spec.recipe.read_loss_every_step
    if reads_loss or is_dynamic(spec.loss_scale):
        return None
    return "finds nothing to leave out: this loop reads nothing from the device within a step"


def _why_no_resident_data(spec: TrialSpec, _: tuple[int, int] | None) -> str | None:
    if spec.recipe is not None and spec.recipe.loader.resident:
        return "finds nothing to do: the source's data lies on the device already"
    transform = spec.recipe.transform if spec.recipe is not None else None
    if transform not in (None, *_ON_DEVICE_TRANSFORMS):
        return f"cannot do the augmentation '{transform}' on the device; it can do {', '.join(_ON_DEVICE_TRANSFORMS)}"
    return None


def _why_no_loader(spec: TrialSpec, _: tuple[int, int] | None) -> str | None:
    if spec.recipe is not None and spec.recipe.loader.resident:
        return "finds no loader: the source's data lies on the device"
    return None


def _why_no_compile(_: TrialSpec, capability: tuple[int, int] | None) -> str | None:
    if capability is None or capability >= _TRITON_CAPABILITY:
        return None
    return f"needs CUDA compute capability 7.0 or newer, for Triton; this GPU has {capability[0]}.{capability[1]}"


def _why_no_compiled_update(spec: TrialSpec, capability: tuple[int, int] | None) -> str | None:
    if spec.recipe is not None and spec.recipe.schedule.kind == "one_cycle":
        return "cannot follow the schedule one_cycle: the momentum that it moves is compiled in"
    return _why_no_compile(spec, capability)


def _why_no_graph(spec: TrialSpec, _: tuple[int, int] | None) -> str | None:
    schedule = spec.recipe.schedule if spec.recipe is not None else None
    if schedule is None or schedule.kind == "constant":
        return None
    if schedule.kind == "one_cycle":
        return "cannot follow the schedule one_cycle: a graph holds the momentum fixed that it moves"
    # torch's other SGDs read the rate on the host.
    if optimizer_of(spec) == "SGD" and {"fused-optimizer", "compiled-update"}.isdisjoint(spec.techniques):
        return "needs fused-optimizer or compiled-update where a schedule moves SGD's rate"
    return None


def _why_no_space_to_depth(spec: TrialSpec, _: tuple[int, int] | None) -> str | None:
    workload = find_workload(spec.workload)
    if workload.family in _STEMS_OF_STRIDE_1:
        return f"finds nothing to do: the first convolution of {workload.name} has stride 1"
    return None


def _why_no_matmul_stem(spec: TrialSpec, _: tuple[int, int] | None) -> str | None:
    workload = find_workload(spec.workload)
    if workload.family in ("torchvision", "fastai_resnet", "mlp"):
        return f"finds nothing to do: {workload.name} begins with no convolution of stride 1"
    return None


def _why_no_pool_kernel(spec: TrialSpec, capability: tuple[int, int] | None) -> str | None:
    workload = find_workload(spec.workload)
    is_without = workload.family in _WITHOUT_SUCH_POOLING
    is_without |= str(dict(workload.options).get("model")).startswith("efficientnet")
    return _why_no_kernel(spec, capability, "max pooling of 3 by 3 with stride 2" if is_without else None)


def _why_no_norm_kernel(spec: TrialSpec, capability: tuple[int, int] | None) -> str | None:
    if spec.parallelism == "dp":
        return "needs a process a GPU, as ddp has: a replica of DataParallel would run the first GPU's weights"
    is_without = find_workload(spec.workload).family in _WITHOUT_BATCH_NORM
    return _why_no_kernel(spec, capability, "batch norm" if is_without else None)


def _why_no_kernel(spec: TrialSpec, capability: tuple[int, int] | None, lack: str | None) -> str | None:
    """Return why a trial cannot have kernels of castwise's for a kind of layer.

    Args:
        spec: The trial.
        capability: As in `why_unsupported`.
        lack: The kind of layer, where its model has none; None where it has.
    """
    if "channels-last" not in spec.techniques:
        return "needs channels-last, whose layout its kernels read"
    if lack is not None:
        return f"finds nothing to do: {find_workload(spec.workload).name} has no {lack}"
    return _why_no_compile(spec, capability)


def _why_no_coalesced_reduce(spec: TrialSpec, _: tuple[int, int] | None) -> str | None:
    if spec.parallelism == "ddp":
        return None
    if spec.parallelism == "dp":
        return "needs a process a GPU, as ddp has: DataParallel's one process adds the gradients up itself"
    return "finds nothing to do: one device takes the whole step"


def _why_no_wider_state(spec: TrialSpec, _: tuple[int, int] | None) -> str | None:
    width = int(dict(find_workload(spec.workload).options)["width"])
    return None if width % 8 else f"finds nothing to do: a width of {width} is a multiple of 8 already"


def _why_no_long_graph(spec: TrialSpec, capability: tuple[int, int] | None) -> str | None:
    reason = _why_no_graph(spec, capability)
    schedule = spec.recipe.schedule if spec.recipe is not None else None
    if reason is None and schedule is not None and schedule.kind not in _STEADY_WITHIN_EPOCHS:
        return f"cannot follow the schedule {schedule.kind}, which moves the rate each step: take cuda-graph"
    return reason


# What only some optimizers have.
_OF_AN_OPTIMIZER = {"fused-optimizer", "foreach-optimizer", "compiled-update"}
# The schedules that move the rate between epochs alone.
_STEADY_WITHIN_EPOCHS = ("constant", "step", "plateau")

# The transforms of `worker/data/transforms.py` that `worker/data/gpu_augmentation.py` does.
_ON_DEVICE_TRANSFORMS = ("mnist", "cifar10", "cifar100")
# The families whose images are read by a convolution of stride 1, or by none.
_STEMS_OF_STRIDE_1 = ("mnist_cnn", "wide_resnet", "dpn", "mlp")
# Those that pool by other sizes, or not at all.
_WITHOUT_SUCH_POOLING = ("mnist_cnn", "wide_resnet", "dpn", "mlp")
_WITHOUT_BATCH_NORM = ("mnist_cnn", "mlp")
_TRITON_CAPABILITY = (7, 0)  # Source: triton-lang/triton README, "Compatibility"

# Conditions of a row that are more than membership.
_SPECIAL = {
    "no-step-sync": _why_no_sync,
    "resident-data": _why_no_resident_data,
    "loader-workers": _why_no_loader,
    "pinned-transfer": _why_no_loader,
    "compile": _why_no_compile,
    "compiled-update": _why_no_compiled_update,
    "space-to-depth": _why_no_space_to_depth,
    "pad-hidden": _why_no_wider_state,
    "matmul-stem": _why_no_matmul_stem,
    "max-pool-kernel": _why_no_pool_kernel,
    "batch-norm-kernel": _why_no_norm_kernel,
    "compile-max-autotune": _why_no_compile,
    "coalesced-reduce": _why_no_coalesced_reduce,
    "cuda-graph": _why_no_graph,
    "cuda-graph-8": _why_no_long_graph,
}
