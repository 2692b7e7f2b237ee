"""The plan of a job: workloads, precisions, batch sizes and techniques, crossed into trial specs."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from castwise.errors import UsageError, unknown_name
from castwise.registry.precisions import PRECISIONS, Precision, find_precision
from castwise.registry.technique_fit import resolve
from castwise.registry.techniques import (
    NONE,
    find_technique,
    loops_with_states,
    normalize_for_world_size,
    parse_techniques,
)
from castwise.registry.techniques import SETS as TECHNIQUE_SETS
from castwise.registry.workloads import Workload, at_length, check_data_set, find_workload
from castwise.spec.loss_scale import parse_loss_scale
from castwise.spec.options import ParameterGrid
from castwise.spec.trial import CPU_PROTOCOL, CUDA_PROTOCOL, MeasurementProtocol, TrialSpec
from castwise.spec.types import SYNTHETIC, Parallelism
from castwise.spec.user_model import UserWorkload, is_script


@dataclass(frozen=True)
class Axes:
    """A grid whose names are known and go together: what a plan is the product of."""

    workloads: tuple[tuple[str, Workload], ...]  # by their names in the grid
    precisions: tuple[Precision, ...]
    loss_scales: Mapping[str, tuple[str, ...]]  # those of each precision
    layouts: tuple[tuple[int, Parallelism], ...]  # numbers of GPUs, and how they share a step
    loops: tuple[tuple[str, ...], ...]
    batch_sizes: tuple[int, ...]  # empty: each workload's own
    data_set: str
    num_nodes: int

    def specs(
        self,
        device: str,
        protocol: MeasurementProtocol | None = None,
        seed: int = 0,
        user_workloads: Mapping[str, UserWorkload] = MappingProxyType({}),
    ) -> tuple[TrialSpec, ...]:
        """Return each configuration once, in the order in which they run.

        Without a protocol they have the device type's. What is known of users' own models is by their names in the
        grid.
        """
        is_cpu = device.startswith("cpu")
        most_gpus = max(world_size for world_size, _ in self.layouts)
        specs: dict[str, TrialSpec] = {}
        for name, workload in self.workloads:
            user = user_workloads.get(name)
            usual = (user and user.batch_size) or (workload.cpu_batch_size if is_cpu else workload.batch_size)
            for batch_size, (world_size, parallelism), techniques, precision in itertools.product(
                self.batch_sizes or (usual,), self.layouts, self.loops, self.precisions
            ):
                for loss_scale in self.loss_scales[precision.name]:
                    spec = TrialSpec(
                        workload=workload.name,
                        precision=precision.name,
                        loss_scale=loss_scale,
                        batch_size=batch_size,
                        device=device,
                        data_set=self.data_set,
                        world_size=world_size,
                        num_nodes=self.num_nodes if world_size > 1 else 1,
                        parallelism=parallelism,
                        user_model=user.model if user else None,
                        protocol=protocol or (CPU_PROTOCOL if is_cpu else CUDA_PROTOCOL),
                        seed=seed,
                    )
                    # Techniques on one GPU are compared with those on several, so all know the largest number.
                    spec = resolve(normalize_for_world_size(techniques, world_size, most_gpus), spec)
                    specs.setdefault(spec.key, spec)
        return tuple(specs.values())


def parse_grid(grid: ParameterGrid, data_set: str = SYNTHETIC, num_nodes: int = 1) -> Axes:
    """Return what a plan is the product of.

    A loss scale applies to the precisions that scale their loss by default, so that `--loss-scale dynamic,128` with
    fp32 does not measure fp32 twice. If none of the precisions does, it applies to those with float16: `fp16-true` with
    a scale of 128 can be measured. `num_nodes` hosts share each trial on several GPUs.

    Raises:
        UsageError: A name is unknown, a batch size or a number of GPUs is under 1, techniques exclude each other,
            no precision takes the loss scale, or a workload cannot take the data set.
    """
    precisions = tuple(find_precision(name) for name in grid.precisions or [row.name for row in PRECISIONS])
    of_script = any(map(is_script, grid.workloads or ()))  # whose loader is timed, too
    if min(grid.batch_sizes or (1,)) < 1:
        least = min(grid.batch_sizes or ())
        raise UsageError(f"A batch holds at least one sample; batch size {least} is impossible.")
    states = grid.optimizer_states or ("fp32",)  # a script as it is written is always measured
    loops = loops_with_states(
        grid.techniques or (NONE,), tuple(dict.fromkeys(["fp32", *states])) if of_script else states
    )
    return Axes(
        loss_scales=_loss_scales(grid, precisions),
        layouts=_layouts(grid, num_nodes),
        loops=tuple(_parse_step_techniques(text, has_loader=of_script) for text in loops),
        workloads=tuple(
            (name, _workload_at(name, length, data_set))
            for name in grid.workloads or ()
            for length in grid.lengths or (None,)
        ),
        precisions=precisions,
        batch_sizes=grid.batch_sizes or (),
        data_set=data_set,
        num_nodes=num_nodes,
    )


def _loss_scales(grid: ParameterGrid, precisions: Sequence[Precision]) -> dict[str, tuple[str, ...]]:
    asked = tuple(parse_loss_scale(text) for text in grid.loss_scales or ())
    scaling = [row for row in precisions if row.loss_scale != "none"] or [row for row in precisions if row.has_float16]
    if asked and not scaling:
        names = ", ".join(row.name for row in PRECISIONS if row.has_float16)
        own = ", ".join(row.name for row in precisions)
        raise UsageError(f"A loss scale is for float16 ({names}), and {own} needs none. Leave --loss-scale out.")
    return {row.name: asked if asked and row in scaling else (row.loss_scale,) for row in precisions}


def _layouts(grid: ParameterGrid, num_nodes: int) -> tuple[tuple[int, Parallelism], ...]:
    ways = [_parse_parallelism(name) for name in grid.parallelisms or ("ddp",)]
    world_sizes = grid.world_sizes or (1,)
    if min(world_sizes) < 1:
        raise UsageError(f"A trial runs on one GPU at least; {min(world_sizes)} GPUs are impossible.")
    for size in world_sizes:
        if size > 1 and (size % num_nodes or (num_nodes > 1 and "dp" in ways)):
            raise UsageError(f"{size} GPUs cannot be shared by {num_nodes} nodes: each has as many, with ddp or fsdp.")
    if num_nodes > 1 and max(world_sizes) == 1:
        raise UsageError(f"One GPU is not on {num_nodes} nodes. Give --gpus the number of all nodes together.")
    alone: list[tuple[int, Parallelism]] = [(1, "none")]
    return tuple(layout for size in world_sizes for layout in ([(size, way) for way in ways] if size > 1 else alone))


def _workload_at(name: str, length: int | None, data_set: str) -> Workload:
    workload = find_workload(name)
    if length is not None:
        workload = at_length(workload, length)
        if "@" in name:
            raise UsageError(f"{name} and --seq-len both name a length of sequences. Leave one of them out.")
    check_data_set(workload, data_set)
    return workload


def _parse_step_techniques(text: str, *, has_loader: bool) -> tuple[str, ...]:
    names = parse_techniques(text)
    for name in names:
        if not has_loader and name not in TECHNIQUE_SETS and "steady" not in find_technique(name).kinds:
            raise UsageError(
                f"{name} changes how a training run reads its data; here only steps are timed, "
                "on data that lies on the device. Leave it out."
            )
    return names


def _parse_parallelism(name: str) -> Parallelism:
    known: dict[str, Parallelism] = {way: way for way in get_args(Parallelism) if way != "none"}
    try:
        return known[name.strip().lower()]
    except KeyError:
        raise unknown_name("parallelism", name, list(known)) from None
