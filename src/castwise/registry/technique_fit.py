"""Which trials can have which techniques."""

from collections.abc import Iterator, Mapping, Sequence

from castwise.registry.precisions import precision_row
from castwise.registry.technique_conditions import optimizer_of
from castwise.registry.techniques import SETS, Technique, find_technique, in_order, rows_of, step_config_of
from castwise.registry.workloads import Workload, find_workload
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import is_script

_TRITON_CAPABILITY = (7, 0)  # Source: triton-lang/triton README, "Compatibility"


def resolve(names: Sequence[str], spec: TrialSpec, sets: Mapping[str, Sequence[str]] = SETS) -> TrialSpec:
    """Return a spec with these techniques, and of the sets among them those members that it can have."""
    named = {name for name in names if name not in sets}
    members = rows_of(member for name in names for member in sets.get(name, ()))
    if find_workload(spec.workload).family == "own":
        # Nobody knows the user's optimizer yet, and a member that it refuses would take the set with it.
        members = [row for row in members if "optimizer_arguments" not in row.settings]
    taken: set[str] = set()
    for row in members:  # one may need another, which comes before it
        tried = spec.model_copy(update={"techniques": in_order({*taken, row.name})})
        if _why_unfit(tried) is None:
            taken.add(row.name)
    return spec.model_copy(update={"techniques": in_order(named | taken)})


def why_unsupported(spec: TrialSpec, capability: tuple[int, int] | None = None) -> str | None:
    """Return why a trial cannot have one of its techniques, or lacks one that its precision needs; None if it is fine.

    The GPU's capability is left out of account if it is not known.
    """
    return _why_unfit(spec, capability) or _why_without_precision(spec)


def why_not_on(row: Technique, device_type: str) -> str | None:
    """Return why a kind of device cannot have a technique, or None if it can."""
    if device_type not in row.devices:
        return "needs a CPU" if row.devices == ("cpu",) else "needs a CUDA device"
    is_compiled = row.compile_cost or {"compiled_update", "optimizer_state"} & {*row.settings}
    if device_type == "mps" and is_compiled:
        return "is compiled, and torch.compile for mps is a prototype"
    return None


def _why_without_precision(spec: TrialSpec) -> str | None:
    row, loop = precision_row(spec.precision), step_config_of(spec.techniques)
    if spec.parallelism == "fsdp" and spec.kind != "steady":
        return "fsdp is for steady steps; take the parallelism ddp"
    if spec.parallelism == "fsdp" and (row.param_dtype != "float32" or row.float8_recipe):
        return f"fsdp shards float32 weights, and {row.name} converts them; take a -mixed precision, or ddp"
    if row.stochastic_rounding and (loop.compiled_update or loop.cuda_graph):
        return f"{row.name} copies weights for the time of an update: no compiled update or CUDA graph can have that"
    if row.float8_recipe and (spec.kind != "steady" or spec.parallelism == "dp"):
        return f"{spec.precision} is for steady steps, with one process per GPU"
    if row.float8_recipe and loop.compile_mode is None:
        return f"{spec.precision} needs compile, without which FP8 is several times slower: add --techniques compile"
    return None


def _why_unfit(spec: TrialSpec, capability: tuple[int, int] | None = None) -> str | None:
    rows = map(find_technique, spec.techniques)
    return next((f"{row.name} {reason}" for row in rows for reason in _reasons(row, spec, capability)), None)


def _reasons(row: Technique, spec: TrialSpec, capability: tuple[int, int] | None) -> Iterator[str]:
    """Yield why a trial cannot have a technique; a reason holds only if none comes before it."""
    yield from _wrong_loop(row, spec)
    workload = find_workload(spec.workload)
    if workload.family != "own":
        yield from _wrong_workload(row, spec, workload)
    elif not (row.fits_user_models or is_script(spec.workload)):
        yield "is for castwise's own workloads"
    if row.requires and row.requires not in spec.techniques:
        yield f"needs {row.requires}"
    if row.why_not is not None and (reason := row.why_not(spec)) is not None:
        yield reason
    if row.needs_triton and capability is not None and capability < _TRITON_CAPABILITY:
        yield f"needs CUDA compute capability 7.0 or newer, for Triton; this GPU has {capability[0]}.{capability[1]}"


def _wrong_loop(row: Technique, spec: TrialSpec) -> Iterator[str]:
    """Yield why a technique does not go with the others, with the device, or with how the loop runs on it."""
    for name in spec.techniques:
        if name in row.excludes:
            yield f"excludes {name}"
    if (reason := why_not_on(row, spec.device_type)) is not None:
        yield f"{reason}; this is {spec.device}"
    of_script = is_script(spec.workload)
    if of_script and not row.fits_scripts:
        yield "cannot be given to a script from outside"
    if spec.kind not in row.kinds and not of_script:
        yield "changes how a training run reads its data; steady trials have theirs on the device"
    if row.required_on_several_gpus and spec.parallelism == "fsdp":
        yield "does not fit fsdp, whose ranks exchange weights and gradients during a step"
    if spec.world_size > 1 and row.required_on_several_gpus not in ("", *spec.techniques):
        yield f"needs {row.required_on_several_gpus} if a step is spread; this one is over {spec.world_size_label}"


def _wrong_workload(row: Technique, spec: TrialSpec, workload: Workload) -> Iterator[str]:
    """Yield why a technique is not for a workload of castwise's, or for its optimizer."""
    if workload.unit not in row.units:
        yield f"is for {' and '.join(row.units)}; {workload.name} has {workload.unit}"
    if row.families and workload.family not in row.families:
        yield f"is for language models; {workload.name} is none"
    if row.optimizers and optimizer_of(spec) not in row.optimizers:
        yield f"fits {', '.join(row.optimizers)}; torch has no such {optimizer_of(spec)}"
    model = str(dict(workload.options).get("model", ""))
    if workload.family in row.absent_in or (model and model.startswith(row.absent_in)):
        yield f"finds nothing to do: {workload.name} has no {row.acts_on}"
