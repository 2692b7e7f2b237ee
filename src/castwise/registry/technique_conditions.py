"""Why a trial cannot have a technique, for the conditions that take more than membership in a list.

Each function returns the reason, or None if the trial can have the technique.
"""

from castwise.registry.precisions import precision_row
from castwise.registry.workloads import find_workload
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec

# The transforms of `trial/data/transforms.py` that `trial/data/gpu_augmentation.py` does.
ON_DEVICE_TRANSFORMS = ("mnist", "cifar10", "cifar10-cutout", "cifar100")
# The schedules that change the rate between epochs only.
_CONSTANT_WITHIN_EPOCHS = ("constant", "step", "plateau")
# What a trial of steps has of a training run's settings.
_NO_RECIPE = Recipe(epochs=1)


def reads_nothing(spec: TrialSpec) -> str | None:
    if (spec.recipe or _NO_RECIPE).read_loss_every_step or is_dynamic(spec.loss_scale):
        return None
    return "finds nothing to leave out: this loop reads nothing from the device within a step"


def cannot_be_resident(spec: TrialSpec) -> str | None:
    recipe = spec.recipe or _NO_RECIPE
    if recipe.loader.resident:
        return "finds nothing to do: the source's data lies on the device already"
    if recipe.transform not in (None, *ON_DEVICE_TRANSFORMS):
        known = ", ".join(ON_DEVICE_TRANSFORMS)
        return f"cannot do the augmentation '{recipe.transform}' on the device; it can do {known}"
    return None


def has_no_loader(spec: TrialSpec) -> str | None:
    is_resident = (spec.recipe or _NO_RECIPE).loader.resident
    return "finds no loader: the source's data lies on the device" if is_resident else None


def compiles_momentum(spec: TrialSpec) -> str | None:
    if (spec.recipe or _NO_RECIPE).schedule.kind == "one_cycle":
        return "cannot follow the schedule one_cycle: the momentum that it changes is compiled in"
    return None


def captures_schedule(spec: TrialSpec) -> str | None:
    kind = (spec.recipe or _NO_RECIPE).schedule.kind
    if kind == "one_cycle":
        return "cannot follow the schedule one_cycle: a graph holds the momentum fixed that it changes"
    # torch's other SGDs read the rate on the host.
    is_tensor_rate = optimizer_of(spec) != "SGD" or {"fused-optimizer", "compiled-update"} & {*spec.techniques}
    if kind != "constant" and not is_tensor_rate:
        return "needs fused-optimizer or compiled-update if a schedule changes SGD's rate"
    return None


def captures_rate(spec: TrialSpec) -> str | None:
    reason = captures_schedule(spec)
    kind = (spec.recipe or _NO_RECIPE).schedule.kind
    if reason is None and kind not in _CONSTANT_WITHIN_EPOCHS:
        return f"cannot follow the schedule {kind}, which changes the rate each step: take cuda-graph"
    return reason


def is_replicated(spec: TrialSpec) -> str | None:
    if spec.parallelism == "dp":
        return "needs one process per GPU, as with ddp; DataParallel's replicas cannot have it"
    return None


def reorders_shards(spec: TrialSpec) -> str | None:
    return "does not fit fsdp, which shards contiguous weights only" if spec.parallelism == "fsdp" else None


def steps_shards(spec: TrialSpec) -> str | None:
    is_refused = spec.parallelism == "fsdp" and optimizer_of(spec) == "SGD"
    return "does not fit fsdp here: torch has no fused SGD for sharded weights" if is_refused else None


def has_no_ranks(spec: TrialSpec) -> str | None:
    if spec.parallelism == "ddp":
        return None
    if spec.parallelism == "dp":
        return "needs one process per GPU, as with ddp: DataParallel's one process adds the gradients up itself"
    if spec.parallelism == "fsdp":
        return "averages whole gradients, as with ddp; fsdp leaves each rank a part of them"
    return "finds nothing to do: one device takes the whole step"


def has_no_wrapper(spec: TrialSpec) -> str | None:
    if spec.parallelism == "ddp" or (spec.user_model is not None and spec.user_model.launcher):
        return None  # of a script it shows whether it has one
    return "needs several GPUs, and DistributedDataParallel on them, as ddp has it"


def reduces_no_float32(spec: TrialSpec) -> str | None:
    row = precision_row(spec.precision)
    if row.param_dtype != "float32" or row.autocast_dtype != "bfloat16":
        return f"is for float32 gradients of products in bfloat16, and {spec.precision} has others"
    return has_no_wrapper(spec)


def has_no_shards(spec: TrialSpec) -> str | None:
    return None if spec.parallelism == "fsdp" else "finds nothing to keep: fsdp alone shards weights"


def is_aligned(spec: TrialSpec) -> str | None:
    width = int(dict(find_workload(spec.workload).options)["width"])
    return None if width % 8 else f"finds nothing to do: a width of {width} is a multiple of 8 already"


def predicts_all(spec: TrialSpec) -> str | None:
    if dict(find_workload(spec.workload).options).get("kind") != "bert":
        return "finds nothing to leave out: every token has a target"
    return is_replicated(spec)


def needs_16_bits(spec: TrialSpec) -> str | None:
    is_16_bit = precision_row(spec.precision).is_16_bit
    return None if is_16_bit else f"computes attention in 16 bits, and {spec.precision} does not"


def needs_float16(spec: TrialSpec) -> str | None:
    has_float16 = precision_row(spec.precision).has_float16
    return None if has_float16 else f"is for products in float16, and {spec.precision} has none"


def needs_transformers(spec: TrialSpec) -> str | None:
    return "finds nothing to do: no model of transformers" if spec.user_model is None else None


def needs_fp8(spec: TrialSpec) -> str | None:
    return None if precision_row(spec.precision).float8_recipe else f"{spec.precision} has no layers in FP8"


def optimizer_of(spec: TrialSpec) -> str:
    if spec.recipe is not None and spec.recipe.optimizer is not None:
        return spec.recipe.optimizer.name
    return find_workload(spec.workload).optimizer.name
