"""Which techniques a trial can have, by their rows, and the reasons in words."""

from collections.abc import Iterator, Mapping, Sequence

from castwise.registry.techniques import SETS, Technique, find_technique, in_order, optimizer_of, rows_of
from castwise.registry.workloads import Workload, find_workload
from castwise.spec.trial import TrialSpec

_TRITON_CAPABILITY = (7, 0)  # Source: triton-lang/triton README, "Compatibility"


def resolve(names: Sequence[str], spec: TrialSpec, sets: Mapping[str, Sequence[str]] = SETS) -> TrialSpec:
    """Return a spec with these techniques, and of the sets among them those members that it can have.

    Args:
        names: Techniques and sets.
        spec: The trial.
        sets: The members of each set.
    """
    named = {name for name in names if name not in sets}
    members = rows_of(member for name in names for member in sets.get(name, ()))
    if find_workload(spec.workload).family == "own":
        # Nobody knows the user's optimizer yet, and a member that it refuses would take the set with it.
        members = [row for row in members if "optimizer_arguments" not in row.settings]
    taken: set[str] = set()
    for row in members:  # one may need another, which comes before it
        tried = spec.model_copy(update={"techniques": in_order({*taken, row.name})})
        if why_unsupported(tried) is None:
            taken.add(row.name)
    return spec.model_copy(update={"techniques": in_order(named | taken)})


def why_unsupported(spec: TrialSpec, capability: tuple[int, int] | None = None) -> str | None:
    """Return why a trial cannot have one of its techniques, or None if it can have all.

    Args:
        spec: The trial.
        capability: The GPU's compute capability, if it is known.

    Raises:
        UsageError: A technique does not exist.
    """
    for name in spec.techniques:
        reason = next(_reasons(find_technique(name), spec, capability), None)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _reasons(row: Technique, spec: TrialSpec, capability: tuple[int, int] | None) -> Iterator[str]:
    """Yield why a trial cannot have a technique; a reason holds only if none comes before it."""
    for name in spec.techniques:
        if name in row.excludes:
            yield f"excludes {name}"
    if spec.device_type not in row.devices:
        yield f"needs a {'CUDA device' if spec.device_type == 'cpu' else 'CPU'}; this is {spec.device}"
    if spec.kind not in row.kinds:
        yield "changes how a training run reads its data; steady trials have theirs on the device"
    if spec.world_size > 1 and row.required_on_several_gpus not in ("", *spec.techniques):
        yield f"needs {row.required_on_several_gpus} if a step is spread; this one is over {spec.world_size_label}"
    workload = find_workload(spec.workload)
    if workload.family != "own":
        yield from _misfits(row, spec, workload)
    elif not row.fits_user_models:
        yield "is for castwise's own workloads"
    if row.requires and row.requires not in spec.techniques:
        yield f"needs {row.requires}"
    reason = row.why_not(spec) if row.why_not is not None else None
    if reason is not None:
        yield reason
    if row.needs_triton and capability is not None and capability < _TRITON_CAPABILITY:
        yield f"needs CUDA compute capability 7.0 or newer, for Triton; this GPU has {capability[0]}.{capability[1]}"


def _misfits(row: Technique, spec: TrialSpec, workload: Workload) -> Iterator[str]:
    """Yield why a technique is not for a workload of castwise's, or for its optimizer."""
    if workload.unit not in row.units:
        yield f"is for {' and '.join(row.units)}; {workload.name} has {workload.unit}"
    if row.families and workload.family not in row.families:
        yield f"is for recurrent language models; {workload.name} is none"
    if row.optimizers and optimizer_of(spec) not in row.optimizers:
        yield f"fits {', '.join(row.optimizers)}; torch has no such {optimizer_of(spec)}"
    model = str(dict(workload.options).get("model", ""))
    if workload.family in row.absent_in or (model and model.startswith(row.absent_in)):
        yield f"finds nothing to do: {workload.name} has no {row.acts_on}"
