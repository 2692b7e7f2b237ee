"""What a step spends its time on, as records show it: the evidence for the causes in `analysis/causes.py`."""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from castwise.analysis import steady_metrics
from castwise.analysis.code_snippets import precision_of
from castwise.analysis.model_flops import flops_of
from castwise.analysis.result_table import Row
from castwise.analysis.steady_metrics import sustained_slowdown
from castwise.analysis.training_metrics import data_share
from castwise.errors import UsageError
from castwise.records.schema import GpuReading, KernelTime, StepFlops, StepProfile, Trial
from castwise.registry.kernel_classes import PRODUCTS, VECTOR_BYTES, KernelClass, format_of
from castwise.registry.technique_fit import why_unsupported
from castwise.registry.techniques import TECHNIQUES, captures_graph
from castwise.spec.quantities import format_share
from castwise.spec.trial import device_of_rank
from castwise.spec.typed import TypedLine
from castwise.spec.types import (
    DETERMINISTIC,
    FINDING_UNUSED,
    NO_CACHE,
    PROFILER,
    STARTING_COLLECTIVES,
    WITHOUT_CUDNN,
    CauseName,
)

# Work whose time is that of the bytes that it moves: what torch.compile may fuse, and what it does not.
FUSED: tuple[KernelClass, ...] = ("normalisation", "elementwise", "reduction", "copy", "other")
MEMORY: tuple[KernelClass, ...] = (*FUSED, "host_copy", "indexing", "cast", "layout_conversion")
OF_RANKS = (STARTING_COLLECTIVES, FINDING_UNUSED)  # work of the host that there is with several ranks alone
UPDATE: tuple[KernelClass, ...] = ("optimizer", "loss_scaling")
WRITES_SCORES = ("written", "math")
_READ = "aten::_local_scalar_dense"
_WAITS = {_READ: "`.item()`", "": "a synchronize()"}
_LEAST_WAITS = 0.9  # a step
# That a launch takes of the host at most. Source: chosen here; in castwise's records it is 34 µs of idle time at most.
LAUNCH_SECONDS = 50e-6
# Of these settings it is not known what they cost. Others keep the GPU waiting, but for that of autocast's cache.
UNPRICED = {DETERMINISTIC, WITHOUT_CUDNN, PROFILER}
_OWN_WAITS = 2  # of the profile itself, at its end
# Shares of a step. Source: chosen here; docs/evidence/causes.md has the cases that they tell apart.
LEAST = 0.05  # that a cause takes, and that a precision must differ by
LEAST_IDLE = 0.1  # below it, the gaps between kernels are those of any loop
MOSTLY = 0.5
# Ranks are timed one after the other: collectives whose times differ by less may be equal. Source: chosen here; two
# ranks of equal work took 12.5 and 15.6 ms (H200, torch 2.11), of unequal work 2.3 and 12 ms.
_EQUAL = 2 / 3
LEAST_MEMORY = 0.3
_MULTIPLIES = re.compile(r"conv|mm\b|_mm|linear|attention|rnn")  # operators whose kernels do more than move data
# Of the bandwidth, what one operator that moves data reaches, by its shapes: what else it reads is not known.
_LEAST_RATE = 0.02
# A GPU is at its power limit if this share of its blocks was, and its clock is below this share of its highest.
_AT_ITS_CLOCK = 0.98
_FEW_CHANNELS = 8
ITEM_BYTES = {"fp16": 2, "bf16": 2, "fp8": 1}  # others have 4


@dataclass(frozen=True)
class PowerLimit:
    """How the GPU's power limit set a loop's pace."""

    clock_hertz: float  # the mean clock of the streaming multiprocessors in the blocks
    max_clock_hertz: float
    watts: float
    slowdown: float | None = None  # how much longer steps took in sustained training, as a share


def power_limit_of(trials: Sequence[Trial]) -> PowerLimit | None:
    """Return how the power limit held a loop's clock down most of the time; None if not, or not known."""
    max_clock = next((trial.gpu_facts.max_sm_clock_hertz for trial in trials if trial.gpu_facts is not None), None)
    readings = [reading for trial in trials for reading in trial.readings]
    known = [reading for reading in readings if reading.throttle_reasons is not None and reading.sm_clock_hertz]
    watts = [power for reading in readings if (power := reading.gpu_power_watts) is not None]
    if max_clock is None or not known or not watts:
        return None
    capped = statistics.fmean(reading.is_at_power_limit for reading in known)
    clock = statistics.fmean(reading.sm_clock_hertz or 0.0 for reading in known)
    if capped < MOSTLY or clock > _AT_ITS_CLOCK * max_clock:
        return None
    slowdown = max(filter(None, map(sustained_slowdown, trials)), default=None)
    return PowerLimit(clock, max_clock, statistics.fmean(watts), slowdown)


def _mean_of(readings: Sequence[GpuReading]) -> GpuReading:
    clocks = [each.sm_clock_hertz for each in readings if each.sm_clock_hertz]
    watts = [each.power_watts for each in readings if each.power_watts]
    num_capped = sum("sw_power_cap" in (each.throttle_reasons or ()) for each in readings)
    return GpuReading(
        device="",
        sm_clock_hertz=statistics.fmean(clocks) if clocks else None,
        power_watts=statistics.fmean(watts) if watts else None,
        throttle_reasons=("sw_power_cap",) if num_capped >= MOSTLY * len(readings) else (),
    )


class StepEvidence:
    """What a configuration spends its step on, as its records show it. Shares are of its step's time."""

    def __init__(self, row: Row, others: Mapping[str, Row], typed: TypedLine | None = None) -> None:
        """Gather the evidence; `others` are configurations of the same group, by precision."""
        self.row, self.others, self.typed = row, others, typed
        # The process that was profiled, or else the first.
        profiled = (trial for trial in row.trials if trial.profile is not None and trial.profile.num_steps)
        self.trial = next(profiled, row.trials[0])
        profile = self.trial.profile
        self.profile = profile if profile is not None and profile.class_seconds else None
        self.spent = self.profile or StepProfile(device_type="cuda")  # nothing, without one
        numerics = (trial.profile.numerics for trial in reversed(row.trials) if trial.profile is not None)
        self.numerics = next((known for known in numerics if known is not None), None)  # the latest
        self.counters = next((trial.counters for trial in row.trials if trial.counters is not None), None)
        self.flops = flops_of(row.trials)
        self.counted = self.flops or StepFlops()  # nothing, where none were
        self.gpu = self.trial.environment.gpu_model
        self.precision = precision_of(self.trial)
        self.optimizer = "" if self.trial.facts is None else self.trial.facts.optimizer  # its class and arguments
        self.on_cpu = self.trial.spec.device_type == "cpu"
        self.settings = set[str]() if self.on_cpu else {*self.spent.settings}
        self.slowed_by = " and ".join(sorted(self.settings - UNPRICED - {NO_CACHE}))  # that keep the GPU waiting

    @cached_property
    def seconds(self) -> float:
        """Return the timed step; on a CPU the profiled one, whose operators take longer."""
        if self.profile is not None and self.on_cpu:
            return max(self.profile.busy_seconds, self.profile.seconds)
        return self.row.step_seconds or 0.0

    @cached_property
    def busy(self) -> float | None:
        """Return the share of the step in which a kernel runs."""
        return None if self.profile is None else min(1.0, self.profile.busy_seconds / self.seconds)

    @cached_property
    def idle_share(self) -> float | None:
        """Return the share in which no kernel runs; None without a profile, and on a CPU."""
        return None if self.busy is None or self.on_cpu else 1 - self.busy

    @cached_property
    def class_seconds(self) -> Mapping[KernelClass, float]:
        """Return each class's time, of collectives only what nothing hides: recording operators makes ranks wait."""
        found = self.spent.class_seconds
        if self.spent.communication is None or "communication" not in found:
            return found
        return {**found, "communication": min(found["communication"], self.spent.communication.exposed_seconds)}

    @cached_property
    def shares(self) -> dict[str, float]:
        """Return each class's share; kernels that overlap count by their part of the busy time."""
        seconds = self.class_seconds
        return {name: self.scale * seconds[name] for name in sorted(seconds, key=seconds.__getitem__, reverse=True)}

    @cached_property
    def scale(self) -> float:
        """Return the share of the step that a second of a kernel stands for."""
        if self.profile is None or self.busy is None:
            return 0.0
        return self.busy / max(sum(self.class_seconds.values()), self.profile.busy_seconds)

    def share_of(self, *classes: str) -> float:
        """Return the share of some classes of kernels."""
        return sum(self.shares.get(name, 0.0) for name in classes)

    @property
    def bound(self) -> str:
        """Return in words what takes most of the step."""
        parts = {
            "products": self.share_of(*PRODUCTS),
            "work that is bound by memory": self.share_of(*MEMORY),
            "the optimizer and loss scaling": self.share_of(*UPDATE),
            "communication": self.share_of("communication"),
            "waiting: no kernel runs": self.idle_share or 0.0,
        }
        most = max(parts, key=parts.__getitem__)
        return (
            f"{format_share(parts[most])} of the step is {most}" if parts[most] else "what takes its time is not known"
        )

    @cached_property
    def waits(self) -> float | None:
        """Return the share of the step in which the host waited for the device."""
        wait = self.spent.wait_seconds
        return None if wait is None else min(1.0, wait / self.seconds)

    @property
    def reads(self) -> str:
        """Return for what of the device the host waits each step, and how often; empty if it is not known."""
        if not self.spent.waits:
            return ""
        found = self.spent.waits | {"aten::copy_": 0.0}  # which `host-copies` is about
        found[""] = found.get("", 0.0) - _OWN_WAITS / self.spent.num_steps
        if self.share_of("loss_scaling"):
            found[_READ] = found.get(_READ, 0.0) - 1
        often = {name: round(times) for name, times in found.items() if times > _LEAST_WAITS}
        named = (
            f"{_WAITS.get(name, name.removeprefix('aten::'))} {f'{times} times' if times > 1 else 'once'}"
            for name, times in sorted(often.items(), key=lambda each: -each[1])
        )
        return " and ".join([*named][:2])

    @property
    def input_share(self) -> float:
        """Return the share of the step in which the host waited for a batch; 0 if there is no loader."""
        found = (steady_metrics.data_share([trial]) or data_share(trial) or 0.0 for trial in self.row.trials)
        return statistics.median(found)

    @cached_property
    def formats(self) -> Mapping[str, float]:
        """Return how much of the products each format of factors has, the most first; empty if that is not known.

        It is a share of the FLOPs; if none were counted, as of scripts, of the time of a GPU's known kernels.
        """
        if self.counted.total:
            return self.counted.by_format
        seconds = defaultdict[str, float](float)
        for kernel in () if self.on_cpu else self.spent.kernels:
            # A product without Tensor Cores is float32's unless its name says another format.
            found = kernel.format or format_of(kernel.name) or ("fp32" if kernel.kind == "plain_product" else "")
            if kernel.kind in PRODUCTS and found:
                seconds[found] += kernel.seconds
        return dict(sorted(seconds.items(), key=lambda pair: -pair[1]))

    @cached_property
    def plain_seconds(self) -> dict[str, dict[str, float]]:
        """Return the seconds of products without Tensor Cores, and of float64's, by format and module."""
        if self.profile is None or self.on_cpu:
            return {}
        if not self.profile.products:  # an older record: most products tell
            seconds = self.profile.class_seconds.get("plain_product", 0.0)
            return {"fp32" if self.computes_in_float32 else "": {"": seconds}}
        found = defaultdict[str, dict[str, float]](lambda: defaultdict(float))
        for each in self.profile.products:
            if each.kind == "plain_product" or each.format == "fp64":
                found[each.format][each.module] += each.seconds
        return found

    @cached_property
    def exposed(self) -> float:
        """Return the share of the step in which the first rank communicates and does nothing else; waiting, too."""
        communication = self.spent.communication
        return 0.0 if communication is None else min(1.0, communication.exposed_seconds / self.seconds)

    @cached_property
    def rank_waits(self) -> Sequence[float]:
        """Return the share of the step that each rank waits for the slowest; empty if that is not known.

        What it computes in the meantime is no wait. The profiler slows the host, one rank's more than another's: in a
        timed step a rank waits no longer than that leaves beside what it computes.
        """
        found = self.spent.communication
        seconds = () if found is None or self.on_cpu else found.rank_seconds
        if found is None or min(seconds, default=0.0) >= _EQUAL * max(seconds, default=0.0):
            return ()
        own = [each - min(seconds) for each in seconds]
        for rank, step in enumerate(found.rank_steps):  # none in older records
            most = own[rank] if step.exposed_seconds is None else step.exposed_seconds
            own[rank] = min(own[rank], most, max(0.0, self.seconds - step.compute_seconds))
        return [each / self.seconds for each in own]

    @cached_property
    def gpus(self) -> list[GpuReading]:
        """Return each GPU's mean reading of the timed blocks, by rank, or its clock after the profile; empty on one."""
        spec, ranks = self.trial.spec, () if self.spent.communication is None else self.spent.communication.rank_steps
        readings = [each for block in self.trial.readings for each in block.each_gpu]
        found = [GpuReading(device="", sm_clock_hertz=each.clock_hertz) for each in ranks]
        if readings:
            devices = [device_of_rank(spec.device, rank) for rank in range(spec.world_size)]
            found = [_mean_of([each for each in readings if each.device == device]) for device in devices]
        return found if all(each.sm_clock_hertz for each in found) else []

    @property
    def rank_batch(self) -> float:
        """Return the units (images, tokens, samples) of one GPU's part of a step, a mean of those that were timed."""
        return (self.row.throughput or 0.0) * self.seconds / self.trial.spec.num_gpus

    @property
    def item_bytes(self) -> int:
        """Return the bytes of a factor of most products."""
        return ITEM_BYTES.get(next(iter(self.formats), ""), 4)

    @property
    def computes_in_float32(self) -> bool:
        """Return whether most products are IEEE float32's; by the precision if their formats are not known."""
        if not self.formats:
            return not self.precision.is_16_bit and self.precision.float32_matmul == "ieee"
        return self.formats.get("fp32", 0) >= MOSTLY * sum(self.formats.values())

    def least_share(self, num_bytes: int) -> float:
        """Return the least share of the step that moving so many bytes takes; 0 if that is not known."""
        return 0.0 if self.gpu is None else num_bytes / self.gpu.bandwidth_bytes_per_second / self.seconds

    @property
    def scores(self) -> float:
        """Return the share of the step in which attention's scores go through memory between its products."""
        written = [each for each in self.spent.attention if each.backend in WRITES_SCORES]
        return self.scale * sum(each.seconds - each.product_seconds for each in written)

    @property
    def copied(self) -> float:
        """Return the share of the step that copies between host and device take while no kernel runs."""
        return min(1.0, sum(self.spent.host_copy_seconds.values()) / self.seconds)

    @cached_property
    def narrow(self) -> tuple[float, str]:
        """Return the share of an operator with long kernels that hardly move data, and a sentence; zero without one."""
        bandwidth = 0.0 if self.gpu is None else self.gpu.bandwidth_bytes_per_second
        long = [each for each in self.spent.kernels if each.shapes and each.seconds >= LAUNCH_SECONDS * each.launches]
        long = [each for each in long if each.kind in FUSED and not _MULTIPLIES.search(each.operator)]
        for operator in dict.fromkeys(each.operator for each in long):
            own = [each for each in long if each.operator == operator]
            seconds, moved = sum(each.seconds for each in own), 0.0
            for each in own:
                largest = map(max, zip_longest(*map(reversed, each.shapes), fillvalue=1))  # which an output may have
                moved += 4 * each.launches * (sum(map(math.prod, each.shapes)) + math.prod(largest))
            if self.scale * seconds >= LEAST_MEMORY and moved < _LEAST_RATE * bandwidth * seconds:
                seen = f"{operator} of {'×'.join(f'{size:,}' for size in own[0].shapes[0])} takes"
                seen += f" {format_share(self.scale * seconds)} of the step, with less than"
                return self.scale * seconds, f"{seen} {format_share(_LEAST_RATE)} of the memory's bandwidth"
        return 0.0, ""

    @property
    def waiting(self) -> tuple[float, float]:
        """Return how much of the step would go if the host waited for nothing, and how much the GPU is idle.

        A host that did not wait would be ahead by as much: a step takes what the device or the host needs, whichever is
        longer. It would not launch the copies that it reads, either.
        """
        idle = self.idle_share
        if idle is None or self.slowed_by or captures_graph(self.trial.spec.techniques):
            return 0.0, 0.0
        waits, num_reads = self.waits or 0.0, self.spent.waits.get(_READ, 0.0)
        return min(idle, waits + (1 - waits) * num_reads / max(1.0, self.spent.num_kernels)), idle

    def idle_as(self, work: str) -> float:
        """Return the share of the step in which no kernel runs, as the host does such work for the ranks."""
        seconds = (self.spent.host_seconds or {}).get(work, 0.0)
        return seconds / self.seconds if seconds else 0.0

    @property
    def host_work(self) -> dict[str, float]:
        """Return the share of the step in which no kernel runs, by what the host does but for OF_RANKS."""
        found = self.spent.host_seconds or {}
        return {name: each / self.seconds for name, each in found.items() if name not in OF_RANKS}

    @cached_property
    def idle_parts(self) -> tuple[float, float]:
        """Return for how much of the step the GPU idles due to launches, and due to other work of the host."""
        if self.profile is None or self.slowed_by or captures_graph(self.trial.spec.techniques):
            return 0.0, 0.0
        # While it copies or waits, the host launches nothing.
        loads = self.input_share if self.trial.spec.is_script else 0.0
        for_ranks = sum(map(self.idle_as, OF_RANKS))  # which `communication` and `settings` tell of
        idle = max(0.0, (self.idle_share or 0.0) - max(self.waiting[0], self.copied, loads) - for_ranks)
        known = min(idle, sum(self.host_work.values()))
        launches = min(idle - known, LAUNCH_SECONDS * self.profile.num_kernels / self.seconds)
        return (launches, idle - launches) if idle - launches >= LEAST_IDLE else (idle, 0.0)

    @cached_property
    def slow_norm(self) -> float:
        """Return the share of batch norm that channels-last would make faster; 0 if there is nothing to convert."""
        norms = [kernel.name for kernel in self.spent.kernels if kernel.kind == "normalisation"]
        in_nchw = norms and not any(re.search("channels_last|nhwc", name) for name in norms)
        converts = self.share_of("layout_conversion") >= LEAST and not self.on_cpu
        if in_nchw and converts and self.precision.is_16_bit and self.technique("layout"):
            return self.share_of("normalisation")
        return 0.0

    @cached_property
    def misaligned(self) -> list[KernelTime]:
        """Return the products whose name or shapes say that rows are no multiple of what Tensor Cores load."""
        products = [] if self.computes_in_float32 else [each for each in self.spent.kernels if each.kind in PRODUCTS]
        return [kernel for kernel in products if is_misaligned(kernel, self.item_bytes)]

    def technique(self, cause: CauseName, *, convolutions: bool | None = None, among: Sequence[str] = ()) -> str:
        """Return the first technique against a cause that this loop can have, and has not.

        If `convolutions` is given, it is one that changes convolutions, or else one that does not; if names are given,
        it is one of these.
        """
        spec, layers = self.trial.spec, self.trial.layers
        for row in TECHNIQUES:
            is_new = cause in row.cures and row.name not in spec.techniques
            is_of_kind = convolutions in (None, row.layer == "convolution") and row.finds_layer(layers)
            if not is_new or not is_of_kind or (among and row.name not in among):
                continue
            if row.tried_after not in ("", *spec.techniques):
                continue
            tried = spec.model_copy(update={"techniques": (*spec.techniques, row.name)})
            try:
                reason = why_unsupported(tried, self.trial.environment.capability)
            except UsageError:
                return ""  # another castwise's record names what this one does not know
            if reason is None:
                return row.name
        return ""


def is_misaligned(kernel: KernelTime, item_bytes: int) -> bool:
    """Return whether a product's rows are no multiple of 16 bytes, by its name (CUTLASS), or of few channels."""
    aligned = re.search(r"align(\d+)", kernel.name)
    if aligned is not None and int(aligned[1]) * item_bytes < VECTOR_BYTES:
        return True
    images, weight = convolved(kernel)
    if images:
        return 1 < weight[1] < _FEW_CHANNELS <= weight[0] and not is_grouped(kernel)
    if kernel.kind != "tensor_core_product" or "mm" not in kernel.operator or kernel.name.startswith("nvjet"):
        return False
    step = VECTOR_BYTES // item_bytes
    return any(factor[-1] % step for factor in matrices(kernel))


def is_grouped(kernel: KernelTime) -> bool:
    """Return whether a kernel is of a grouped or depthwise convolution, by its shapes."""
    images, weight = convolved(kernel)
    return bool(images) and "transpose" not in kernel.operator and images[1] != weight[1]


def convolved(kernel: KernelTime) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a convolution's images and weight; both empty if the kernel is of none."""
    shapes = kernel.shapes[1:] if "backward" in kernel.operator else kernel.shapes
    is_known = "conv" in kernel.operator and len(shapes) > 1 and all(len(shape) > 2 for shape in shapes[:2])
    return (shapes[0], shapes[1]) if is_known else ((), ())


def matrices(kernel: KernelTime) -> list[tuple[int, ...]]:
    return [shape for shape in kernel.shapes if len(shape) >= 2][-2:]
