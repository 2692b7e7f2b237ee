"""The plan of a job: workloads, precisions, batch sizes and techniques crossed into trial specs."""

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from castwise.errors import UsageError, unknown_name
from castwise.registry.precisions import PRECISIONS, find_precision
from castwise.registry.technique_constraints import resolve
from castwise.registry.techniques import NONE, find_technique, normalize_for_world_size, parse_techniques
from castwise.registry.techniques import SETS as TECHNIQUE_SETS
from castwise.registry.workloads import check_data_set, find_workload
from castwise.spec.frozen import FrozenModel
from castwise.spec.loss_scale import parse_loss_scale
from castwise.spec.options import ParameterGrid
from castwise.spec.trial import CPU_PROTOCOL, CUDA_PROTOCOL, MeasurementProtocol, TrialSpec
from castwise.spec.types import SYNTHETIC, Parallelism
from castwise.spec.user_model import UserWorkload


class Plan(FrozenModel):
    """The trials of one job, in the order in which they run."""

    specs: tuple[TrialSpec, ...]


def build_plan(
    grid: ParameterGrid,
    *,
    device: str,
    data_set: str = SYNTHETIC,
    protocol: MeasurementProtocol | None = None,
    seed: int = 0,
    own: Mapping[str, UserWorkload] = MappingProxyType({}),
) -> Plan:
    """Return the product of a grid's parameters as a plan, each configuration once.

    A loss scale applies to the precisions that scale their loss by default, so that `--loss-scale dynamic,128` with
    fp32 does not measure fp32 twice. If none of the precisions does, it applies to all: `fp16-true` with a scale of 128
    can be measured.

    Args:
        grid: The parameters.
        device: "cpu" or "cuda:N".
        data_set: `synthetic` or the name of a real data set that every workload named accepts.
        protocol: How long to measure; None takes the device type's default.
        seed: Seeds weights, data and dropout.
        own: What is known of the user's own models among the workloads, by their names in the grid.

    Raises:
        UsageError: A name is unknown, a batch size or a number of GPUs is under 1, techniques exclude each other,
            or a workload cannot take the data set.
    """
    is_cpu = device.startswith("cpu")
    protocol = protocol or (CPU_PROTOCOL if is_cpu else CUDA_PROTOCOL)
    precisions = [find_precision(name) for name in grid.precisions or [row.name for row in PRECISIONS]]
    loss_scales = [parse_loss_scale(text) for text in grid.loss_scales or ()]
    all_unscaled = all(row.loss_scale == "none" for row in precisions)
    spreads = _spreads(grid)
    most_gpus = max(size for size, _ in spreads)  # techniques on one GPU are compared with those on several
    loops = [_steady_techniques(text) for text in grid.techniques or (NONE,)]
    specs: dict[str, TrialSpec] = {}
    for name in grid.workloads or ():
        workload, known = find_workload(name), own.get(name)
        check_data_set(workload, data_set)
        own_size = known.batch_size if known is not None else None
        batch_sizes = grid.batch_sizes or (own_size or (workload.cpu_batch_size if is_cpu else workload.batch_size),)
        for batch_size, spread, techniques, precision in itertools.product(batch_sizes, spreads, loops, precisions):
            _check_batch_size(batch_size)
            takes_scales = loss_scales and (all_unscaled or precision.loss_scale != "none")
            for loss_scale in loss_scales if takes_scales else (precision.loss_scale,):
                spec = TrialSpec(
                    workload=workload.name,
                    precision=precision.name,
                    loss_scale=loss_scale,
                    batch_size=batch_size,
                    device=device,
                    data_set=data_set,
                    world_size=spread[0],
                    parallelism=spread[1],
                    user_model=known.model if known is not None else None,
                    protocol=protocol,
                    seed=seed,
                )
                spec = resolve(normalize_for_world_size(techniques, spread[0], most_gpus), spec)
                specs.setdefault(spec.key, spec)
    return Plan(specs=tuple(specs.values()))


def _spreads(grid: ParameterGrid) -> list[tuple[int, Parallelism]]:
    """Return the numbers of GPUs, each with its ways to share a step; `none` for one GPU."""
    ways: list[Parallelism] = [_parallelism(name) for name in grid.parallelisms or ("ddp",)]
    spreads: list[tuple[int, Parallelism]] = []
    for world_size in grid.world_sizes or (1,):
        if world_size < 1:
            raise UsageError(f"A trial runs on one GPU at least; {world_size} GPUs are impossible.")
        spreads += [(world_size, way) for way in ways] if world_size > 1 else [(1, "none")]
    return spreads


def _steady_techniques(text: str) -> tuple[str, ...]:
    names = parse_techniques(text)
    for name in names:
        if name not in TECHNIQUE_SETS and "steady" not in find_technique(name).kinds:
            raise UsageError(
                f"{name} changes how a training run reads its data; here only steps are timed, "
                "on data that lies on the device. Leave it out."
            )
    return names


def _parallelism(name: str) -> Parallelism:
    known: tuple[Parallelism, ...] = get_args(Parallelism)
    for way in known:
        if name.strip().lower() == way != "none":
            return way
    raise unknown_name("parallelism", name, [way for way in known if way != "none"])


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise UsageError(f"A batch holds at least one sample; batch size {batch_size} is impossible.")
