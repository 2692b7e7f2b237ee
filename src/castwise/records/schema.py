"""The record of a trial: its spec, its raw samples and its circumstances, one JSON file each.

Records hold raw samples only, so that any statistic can be recomputed from old files.
"""

import hashlib
from collections import Counter
from typing import Annotated, Literal

from pydantic import Field, field_validator

from castwise.registry.gpus import GpuModel, find_gpu_model
from castwise.registry.kernel_classes import Format, KernelClass
from castwise.registry.precisions import Hardware
from castwise.spec.frozen import FrozenModel, renamed
from castwise.spec.trial import TrialSpec
from castwise.spec.types import Unit

# 1: first version (castwise 0.1.0). What came later has a default, so that older records load:
# - Trial.readings, gpu_facts, telemetry_note: an older record reads as one without telemetry.
# - TrialSpec.user_model; Facts.unit, clip_grad_norm, accumulate, notes; RankSamples.notes: for users' own models.
# - TrialSpec.memory_limit_bytes, MeasurementProtocol.memory_parts, RankSamples.memory_parts, Trial.shortfall.
# - UserModel.folder_digest: the path of an older record is absolute, and is read as if it were not.
# - Environment.gpu_uuids, TelemetrySummary.num_gpus, EnergyMeasurement.num_gpus: older readings are of the first GPU.
# - MeasurementProtocol.lead_in_seconds, Block.lead_in_steps: older blocks began after an idle gap.
# - Block.in_stretch: older blocks of loops at the power limit had pauses between them.
# - Trial.counters, profile, MeasurementProtocol.profile_steps: older records have no hardware evidence.
# - RankSamples.flops: the FLOPs of an older record's step are not known.
# - Facts.layers: it is not known what layers an older model had.
# - Environment.torchao, Facts.float8: older records have no FP8.
# - StepFlops.large_linear_flops: it is not known of older records.
# - MeasurementProtocol.numerics, StepProfile.numerics: older records say nothing of rounding.
# - UserModel.arguments, units_per_step, unit, scratch, MeasurementProtocol.num_steps, Facts.hooked,
#   Block.data_seconds, num_samples: for scripts.
# - Facts.own_precision, framework: older records say nothing of what a script does itself.
# - RankSamples.between_steps: older records of scripts have it in a note, if at all.
# - Facts.padding_share, RankSamples.compiled_steps, compiled_share: they are not known of older records of scripts.
# - Block.num_values: the batches of older records of scripts are taken to be of one size.
# - StepFlops.misaligned_flops, misaligned_shapes, lines, StepProfile.products, unlisted_seconds, flops: older profiles
#   tell formats by kernels' names, and have no FLOPs of scripts.
# - StepProfile.host_seconds, loader_kernels, allocates, settings: older records do not tell what the host does between
#   launches.
# - StepNumerics.falls: it is not known of older records where precision is lost first.
# A renamed field keeps its first name in JSON (`renamed`).
SCHEMA_VERSION = 1

# A loss may be NaN; a time that is not a number, or negative memory, means a damaged file.
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Bytes = Annotated[int, Field(ge=0)]

Status = Literal["ok", "oom", "timeout", "crashed", "diverged", "unsupported"]


class Environment(FrozenModel):
    """The machine and software a trial ran on."""

    castwise: str  # castwise's version
    # The commit castwise was run from, with "+" where files were changed; None outside a checkout.
    commit: str | None = None
    python: str  # Python's version
    torch: str  # torch's version
    host: str  # the machine's name
    system: str  # operating system and kernel
    cpu: str  # the processor's name
    num_threads: int  # threads that torch uses for one operation
    # The processor's instructions for 16-bit floats, by the kernel's names ("avx512_bf16").
    cpu_features: tuple[str, ...] = ()
    gpu: str | None = None  # the GPU's exact name, or None on a CPU
    gpu_uuid: str | None = None  # the GPU's UUID as NVML knows it
    gpu_uuids: tuple[str, ...] = ()  # the UUIDs of all GPUs that torch sees, in its order; empty in older records
    capability: tuple[int, int] | None = None  # CUDA compute capability, as (major, minor)
    architecture: str | None = None  # torch's name of the architecture of a GPU without CUDA: "gfx942"
    gpu_memory_bytes: int | None = None  # the GPU's memory
    num_gpus: int = 0  # GPUs that torch sees
    other_hosts: tuple[str, ...] = ()  # the other nodes of a trial over several, by rank
    packed: bool = False  # whether trials on other GPUs of the host were allowed to run at the same time
    # The GPU's power limit in force; None in older records, and if it cannot be read.
    power_limit_watts: float | None = None
    driver: str | None = None  # the GPU driver's version
    cuda: str | None = None  # the CUDA version torch was built with
    cudnn: str | None = None  # cuDNN's version as torch prints it
    torchvision: str | None = None  # torchvision's version, or None if it is not installed
    torchao: str | None = None  # torchao's version, or None if it is not installed
    # What float32 products compute in before a trial sets it, by torch's switches.
    fp32_precision: dict[str, str] = Field(default_factory=dict)

    @property
    def device_name(self) -> str:
        """Return the name of what was measured: the GPU, or the CPU if there is none."""
        return self.gpu or self.cpu

    @property
    def hosts(self) -> str:
        """Return the names of its nodes: "node1", and "node1+node2" of a trial over several."""
        return "+".join((self.host, *sorted({*self.other_hosts} - {self.host})))

    @property
    def machine(self) -> tuple[str | float | None, ...]:
        """Return what tells machines, and sets of nodes, apart; containers of several may all have one host name."""
        # A GPU with another limit, or with busy neighbours, is another.
        limit = () if self.power_limit_watts is None else (self.power_limit_watts,)
        return (self.hosts, self.cpu, self.gpu_uuid, *limit, *(["packed"] if self.packed else []))

    @property
    def hardware(self) -> Hardware:
        """Return what decides which precisions the device has."""
        if self.gpu is None:
            return Hardware(self.device_name, None, self.cpu_features)
        return Hardware(self.device_name, self.capability, self.cpu_features, self.architecture or "")

    @property
    def device_type(self) -> str:
        """Return torch's name of the device's kind: "cpu", "cuda", "xpu" or "mps"."""
        return "cpu" if self.gpu is None else self.architecture if self.architecture in ("xpu", "mps") else "cuda"

    @property
    def gpu_model(self) -> GpuModel | None:
        """Return what the GPU's vendor prints of it; None on a CPU, and if castwise does not know the GPU."""
        return find_gpu_model(self.gpu or "", self.gpu_memory_bytes)

    def gpus_of(self, spec: TrialSpec) -> dict[str, str]:
        """Return the UUIDs of a trial's GPUs by torch's device names; an unknown UUID is empty, a CPU has none."""
        if self.gpu is None:
            return {}
        first = int(spec.device.partition(":")[2] or 0)
        kind = spec.device_type
        known = {f"{kind}:{index}": uuid for index, uuid in enumerate(self.gpu_uuids)}
        if self.gpu_uuid:
            known[f"{kind}:{first}"] = self.gpu_uuid
        devices = [f"{kind}:{index}" for index in range(first, first + spec.world_size // spec.num_nodes)]
        return {device: known.get(device, "") for device in devices}

    @property
    def fingerprint(self) -> str:
        """Return 8 hexadecimal digits, equal for machines and software whose figures can be compared as they are."""
        parts = (
            self.castwise,
            self.torch,
            self.torchvision,
            self.device_name,
            self.driver,
            self.cuda,
            self.cudnn,
            self.num_threads,
            *self.machine,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


class Float8Facts(FrozenModel):
    """Which layers of a model run in FP8, and how far their products are from bfloat16's, on the trial's first batch.

    A layer's products are its output, and the gradients of its input and its weight, from the same factors. The
    signal-to-quantization-noise ratio (SQNR) is 20 log10(‖r‖ / ‖r - q‖) of r in bfloat16 and q in FP8.
    """

    recipe: str  # torchao's name
    num_converted: int  # layers
    left: dict[str, int]  # layers with products that were left as they are, by the reason
    min_sqnr_db: float | None = None  # the lowest of all products; None if it was not measured
    min_sqnr_product: str = ""  # which it is: "blocks.0.mlp.2, weight gradient"
    max_underflow_share: float | None = None  # the most of a factor's non-zero values that the cast makes 0
    max_underflow_factor: str = ""  # which it is: "head, output gradient"
    missing: str = ""  # why the products were not compared


class LostUpdates(FrozenModel):
    """The share of weights in 16 bits, with gradients that are not 0, that a step of a script as written left as is."""

    share: float
    weight: str  # the tensor that has the largest share
    weight_share: float
    learning_rate: float | None  # of that step, the highest


class Facts(FrozenModel):
    """What a trial actually ran, found out in its process before the first timed step."""

    num_parameters: int
    units_per_sample: int = Field(ge=1)  # 35 tokens in a column of the language model; else 1
    unit: Unit | None = None  # what throughput counts for a user's own model; None for the workload's own unit
    param_dtypes: dict[str, int]  # number of weights by dtype, after the precision was applied
    layers: tuple[str, ...] | None = None  # the kinds of layers in the model, of those that techniques act on
    optimizer: str  # class and arguments
    float8: Float8Facts | None = None  # of a precision of FP8
    clip_grad_norm: float | None = None
    accumulate: int = 1  # batches whose gradients are added up for one optimizer step
    higher_is_better: bool | None = None  # whether a higher score of a user's own model is better; None without one
    fp32_precision: dict[str, str]  # of float32 matmul, convolution and RNN, as torch reports it
    notes: tuple[str, ...] = ()  # what the user's own code changed before the first timed step, a sentence each
    hooked: tuple[str, ...] = ()  # of a script: its models and optimizers by class, and whether its loader was timed
    # Of a script as written: "autocast bfloat16", "GradScaler", "weights bfloat16" (those that it trains), "frozen
    # bfloat16", "layers bitsandbytes's Linear4bit" and "state 8-bit", as far as it has them, with their lines
    # ("t.py:25").
    own_precision: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    lost_updates: LostUpdates | None = None  # of a script as written that trains weights in 16 bits
    # The one of registry/frameworks.py that takes a script's steps; "" if itself does, None if not known.
    framework: str | None = None
    padding_share: float | None = None  # of a script's tokens in warm-up; None if it has none
    data_note: str | None = None  # what the data was, if the spec's name does not say it
    data_bytes: int = 0  # batches that lie on the device all the time; part of every peak
    ready_seconds: float = 0.0  # from the request for a process until torch is imported and the device is open
    join_seconds: float = 0.0  # of several ranks: until all had joined their process group
    set_up_seconds: float = 0.0  # building model, data and optimizer
    first_step_seconds: float = 0.0  # libraries, algorithms, compilation; 0 in older records: part of the warm-up
    # Of the first step: torch.compile, how many graphs it compiled, and how many it loaded from its cache on disk.
    compile_seconds: float = 0.0
    compiled_graphs: int = 0
    loaded_graphs: int = 0
    warm_up_seconds: float = 0.0  # from the second step until the step time had settled
    warm_up_steps: int = 0  # until then, the first one included
    capture_seconds: float | None = None  # of the warm-up: capturing the step as a CUDA graph
    settled: bool = True  # False if warm-up ended because its time was up
    # Until then, although none failed: without memory for workspace cuDNN takes slower kernels, and says nothing.
    refused_allocations: int = 0
    # How ranks average gradients with `coalesced-reduce`; None without it, and in runs of epochs.
    averaged_by: Literal["collectives", "shared memory"] | None = None


class Block(FrozenModel):
    """A few steps timed as one: by CUDA events on a GPU, by the host's clock on a CPU."""

    seconds: _Seconds = Field(gt=0)
    num_steps: int = Field(ge=1)
    lead_in_steps: int = renamed(0, "lead_steps", ge=0)  # untimed, right before it
    num_samples: float | None = None  # of `num_steps`, that a script trained on; None if they are not counted
    num_values: float | None = None  # of all tensors of their batches, padding included; likewise
    in_stretch: bool = False  # whether it is one of a stretch: blocks with no pause before or between them
    loss: float | None  # of the last step; None of a script that never calls backward
    loss_scale: float | None = None  # after the last step; None without scaling
    skipped_steps: int = 0  # of the block and of its lead-in
    data_seconds: _Seconds | None = None  # of `seconds`: a script waited for its loader's batches; None without one

    @property
    def all_steps(self) -> int:
        """Return its steps and those that lead in."""
        return self.lead_in_steps + self.num_steps


class Epoch(FrozenModel):
    """One pass over the training data, and over the validation data after it; times are of the host's clock."""

    seconds: _Seconds  # of training, waiting for data included, synchronised at its end
    data_seconds: _Seconds  # of `seconds`: the host waited for the next batch
    # Of `seconds`: the host brought batches to the device; a copy that is not asynchronous waits for the steps in
    # flight. None in older records, whose `data_seconds` include it.
    placing_seconds: _Seconds | None = None
    first_step_seconds: _Seconds | None = None  # of `seconds`: the run's first step, synchronised; None in later epochs
    validation_seconds: _Seconds = 0.0
    num_steps: int
    num_samples: int  # of this process: each rank has its share
    counted_seconds: _Seconds  # of `seconds`: without the recipe's skipped batches
    counted_samples: int  # trained on in `counted_seconds`
    losses: tuple[tuple[int, float], ...]  # (step of the epoch, loss) at some steps, the last one always
    learning_rate: float  # of the first parameter group, at the end
    accuracy: float | None = None  # share of validation samples; None for language models or without validation
    validation_loss: float | None = None  # mean per target; its exponential is a language model's perplexity
    score: float | None = None  # of a user's own model, by their function
    loss_scale: float | None = None  # at the end; None without scaling
    skipped_steps: int = 0
    shortened: bool = False  # whether the recipe's `max_steps` cut it short
    diverged: str | None = None  # why the run was stopped


class Resumed(FrozenModel):
    """What a training trial runs, and the epochs that an earlier process of it did."""

    facts: Facts
    epochs: tuple[Epoch, ...]


class MemoryParts(FrozenModel):
    """What held memory at the peak of one training step after the timed ones, profiled operation by operation.

    A tensor counts once, by its storage; a weight or batch that is saved for backward counts as a weight or a batch.
    """

    weights_bytes: _Bytes = 0  # parameters and buffers
    masters_bytes: _Bytes = 0  # float32 masters of lower-precision weights
    gradients_bytes: _Bytes = 0  # of parameters and masters, as many as there were at that moment
    optimizer_bytes: _Bytes = 0  # momentum, Adam's moments
    batches_bytes: _Bytes = 0  # that stay on the device
    saved_bytes: _Bytes = 0  # activations saved for backward
    weight_casts_bytes: _Bytes = 0  # lower-precision copies that autocast keeps for backward
    temporaries_bytes: _Bytes = 0  # all other tensors: outputs in flight, gradients of activations
    workspace_bytes: _Bytes | None = None  # else given out by the allocator: cuBLAS, rounding; None on a CPU
    outside_bytes: _Bytes | None = None  # outside the allocator: context, libraries, other processes; None on a CPU
    missing: str = ""  # why the step was not profiled; all else is 0 then

    @property
    def tensors_bytes(self) -> int:
        """Return what tensors held at that moment."""
        others = ("workspace_bytes", "outside_bytes", "missing")
        return sum(value for name, value in self if name not in others)

    @property
    def peak_bytes(self) -> int:
        """Return the step's peak: what tensors held, and workspaces."""
        return self.tensors_bytes + (self.workspace_bytes or 0)


class TracedMemory(FrozenModel):
    """What would hold memory at the peak of a step, traced without a GPU."""

    batches: dict[int, MemoryParts]  # by batch size
    largest: dict[int, int] = Field(default_factory=dict)  # that fits the allocator, by the bytes that it may hold
    layers: tuple[str, ...] = ()  # the kinds of layers that the model has, as `Facts.layers`
    needs_values: str = ""  # why steps were taken on the CPU instead of with fake tensors; empty if they were not
    guesses: tuple[str, ...] = ()  # lines of the user's code that read a number, which was 1, or a truth value: False
    compiling: tuple[str, ...] = ()  # lines of a script that compile: it was traced without that
    notes: tuple[str, ...] = ()  # what becomes of a script's weights in 16 bits, and which GPU it has seen


class StepFlops(FrozenModel):
    """The multiply-adds of one optimizer step of one process, and what a step has to keep: counted, not timed.

    A multiply-add is 2 FLOPs. They are the model's: forward and backward, accumulation included, padding by techniques
    too; without what backward computes again, and without the optimizer. Attention counts the full matrix.
    """

    # FLOPs by kind of product (linear, batched, convolution, grouped_convolution, attention, recurrent), and by the
    # format of the factors ("fp32", "tf32", "fp16", "bf16", "fp8"). "batched" are products of batches of matrices, as
    # in attention that is written out; recurrent layers without a kernel of their own are linear.
    products: dict[str, dict[str, Annotated[int, Field(ge=0)]]] = Field(default_factory=dict)
    # Of linear products, the FLOPs of those whose matrices are large enough for FP8 to be faster.
    large_linear_flops: int | None = None
    recomputed_flops: int = 0  # that checkpoints compute again in backward
    recomputed_bytes: _Bytes = 0  # of what they compute: the most that it would take to keep it; 0 in older records
    # Of attention in PyTorch's kernels that is given a mask, the share of the FLOPs whose mask is causal; None if none
    # is, and in older records.
    causal_mask_share: float | None = None
    saved_bytes: _Bytes = 0  # of activations that are saved for backward, each storage once
    weights_bytes: _Bytes = 0  # as forward reads them
    gradients_bytes: _Bytes = 0  # of the weights that are trained
    update_bytes: _Bytes = 0  # what the optimizer reads and writes: the weights that it steps, and its state
    uncounted: tuple[str, ...] = ()  # operators that are not PyTorch's own: what they multiply is not known
    # Of linear and batched products on Tensor Cores, the FLOPs of those with a matrix whose rows are no multiple of 16
    # bytes, and the shapes of the factors that have most of them; None in older records.
    misaligned_flops: int | None = None
    misaligned_shapes: tuple[tuple[int, ...], ...] = ()
    # How much faster the GPU multiplies these matrices if their sizes are padded to multiples of 16 bytes; None if less
    # than half of the FLOPs are misaligned, if it could not be measured, and in older records.
    padded_speedup: float | None = None
    # Of forward products in "fp32" and "fp64", the lines of the user's code that have the most FLOPs.
    lines: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    missing: str = ""  # why nothing was counted; all else is 0 then

    @property
    def by_format(self) -> dict[str, int]:
        """Return the FLOPs by format, the most first."""
        totals: Counter[str] = Counter()
        for formats in self.products.values():
            totals.update(formats)
        return dict(totals.most_common())

    def share_of(self, kind_or_format: str) -> float:
        """Return the share of the FLOPs in a kind of product or a format."""
        found = self.by_format.get(kind_or_format, 0) + sum(self.products.get(kind_or_format, {}).values())
        return found / self.total if self.total else 0.0

    @property
    def total(self) -> int:
        return sum(self.by_format.values())


class WorkBetweenSteps(FrozenModel):
    """Work that a script does with some of its steps only, such as a rollout, and that was not timed in whole periods.

    The shares are of wall time, which includes it.
    """

    period_steps: int = Field(ge=0)  # after so many steps it comes again; 0 if that is not known
    times_seen: int  # once: that it comes again is not known
    seconds: _Seconds  # each time
    share: float  # of all steps; if the period is not known, of those that the process took
    timed_share: float  # of the timed steps


class RankSamples(FrozenModel):
    """Everything one process measured; of several devices (DataParallel), memory is that of the fullest."""

    blocks: tuple[Block, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    peak_allocated_bytes: _Bytes | None = None  # by tensors, during the timed blocks
    peak_reserved_bytes: _Bytes | None = None  # by the caching allocator; None on a CPU
    warm_up_peak_allocated_bytes: _Bytes | None = None  # by tensors, during set-up and warm-up
    driver_used_bytes: _Bytes | None = None  # at the end, as nvidia-smi reports it, other processes' included
    notes: tuple[str, ...] = ()  # what the user's own code did while steps were timed, a sentence each
    compiled_steps: int = 0  # of a script's timed steps, those in which torch.compile compiled
    compiled_share: float = 0.0  # of the timed steps' wall time, in those
    between_steps: WorkBetweenSteps | None = None  # of a script; None if timed steps have as much of it as all
    memory_parts: MemoryParts | None = None  # None if the protocol does not ask for it
    flops: StepFlops | None = None  # counted in the first process of a configuration


class Shortfall(FrozenModel):
    """How far memory fell short when a trial ran out of it."""

    needed_bytes: _Bytes  # held plus asked for: at least so much is needed
    free_bytes: _Bytes  # the trial's limit, or what other processes left of the device


class GpuFacts(FrozenModel):
    """What the driver reports of a GPU that does not change while a trial runs; None if `missing` says why.

    Of several GPUs a limit is the lowest of any, a mode is on if it is on for all, and memory errors are their sum.
    """

    max_sm_clock_hertz: float | None = None
    power_limit_watts: float | None = None  # in force
    persistence_mode: bool | None = None
    ecc_mode: bool | None = None
    ecc_errors: int | None = None  # uncorrected memory errors from the driver's loading to the trial's start
    max_pcie_generation: int | None = None  # that GPU and slot can do
    max_pcie_width: int | None = None  # lanes that GPU and slot can do
    nvlinked_gpus: int | None = None  # other GPUs of the host that it reaches over NVLink; None in older records
    missing: dict[str, str] = Field(default_factory=dict)  # why a field is None, or not of all GPUs; "gpu": all fields


class GpuReading(FrozenModel):
    """What one of several GPUs did while a block or epoch was timed; fields are as in `TelemetrySummary`."""

    device: str  # torch's name: "cuda:1"
    sm_clock_hertz: float | None = None
    power_watts: float | None = None
    max_temperature_celsius: float | None = None
    throttle_reasons: tuple[str, ...] | None = None


class TelemetrySummary(FrozenModel):
    """What GPU and host did while one block or epoch was timed, as the parent process saw it.

    Clocks and power are from the samples taken while it ran, or from those just before and just after if it was too
    short. Of several GPUs there are the lowest clock, PCIe link and number of samples, the highest temperature, and
    totals for the rest. Power and energy are there only if they are known for each GPU. Older records have the first
    GPU alone.
    """

    seconds: float  # from the sample just before to the one just after, by the host's clock
    num_gpus: int = 1  # that could be read; 0 on a CPU
    num_samples: int = 0  # of the GPU; 0 on a CPU
    sm_clock_hertz: float | None = None  # mean, of the streaming multiprocessors
    min_sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None  # mean
    power_watts: float | None = None  # mean, of the board
    max_temperature_celsius: float | None = None  # of the core
    throttle_reasons: tuple[str, ...] | None = None  # in any sample, by nvidia-smi's names
    foreign_processes: int | None = None  # the most at once that computed on the GPU and are not this program's
    energy_joules: float | None = None  # by how much the driver's counter rose; None also if it did not
    pcie_generation: int | None = None  # the highest that the link ran at
    pcie_width: int | None = None  # the most lanes in use
    ecc_errors: int | None = None  # uncorrected memory errors from the driver's loading to the end
    cpu_pressure: float | None = None  # share of time in which a runnable task waited for a CPU (PSI's "some")
    cpu_steal: float | None = None  # share of the CPUs' time that the hypervisor gave to others
    cpu_load: float | None = None  # runnable tasks over usable CPUs, averaged over a minute
    # Why a field is None, or of a part of the time or of the GPUs only; "gpu" stands for all of the GPU's.
    missing: dict[str, str] = Field(default_factory=dict)
    # Which GPUs, in torch's names, if not all were throttled, had others' processes or memory errors: by the throttle
    # reason, or by the field's name.
    affected_gpus: dict[str, tuple[str, ...]] = renamed({}, "whose")
    each_gpu: tuple[GpuReading, ...] = ()  # of several, those that could be read; empty in older records

    @property
    def is_at_power_limit(self) -> bool:
        """Return whether the power limit held a GPU's clock down."""
        return "sw_power_cap" in (self.throttle_reasons or ())

    @property
    def gpu_power_watts(self) -> float | None:
        return None if self.power_watts is None else self.power_watts / max(1, self.num_gpus)


class EnergyMeasurement(FrozenModel):
    """The driver's energy counter over sustained steps, after the timed blocks.

    The counter ticks ten times a second (H200), too seldom for a timed block. Here the time is taken from tick to tick,
    so that the mean power is that of running steps alone. Each GPU's counter ticks on its own: of several GPUs it is
    the sum of their powers, each from its own first tick to its last, over the shortest of these times.
    """

    num_gpus: int = 1  # the first of several in older records
    joules: float = 0.0  # from the first tick to the last
    seconds: float = 0.0  # between the two, by the host's clock
    num_ticks: int = 0  # without the first; the fewest of any GPU's
    step_seconds: float = 0.0  # of a sustained step; 0 if not known
    late_seconds: float = 0.02  # how late the first and last tick can have been seen; older records: read every 20 ms
    missing: str = ""  # why joules are 0


class GpuCounters(FrozenModel):
    """The GPU's own counters over the timed blocks or epochs: means weighted by time, and over the GPUs.

    Each is a share of what the hardware can do, 0 to 1; None if the driver does not give it. Source: nvml.h,
    nvmlGpmMetricId_t.
    """

    num_blocks: int  # or epochs, for which they were read
    sm_share: float | None = None  # of the streaming multiprocessors, those that were busy
    occupancy_share: float | None = None  # of the warps that fit, those that were active
    tensor_share: float | None = None  # of the time, Tensor Cores computed; in any format
    fp32_share: float | None = None  # of the time, float32 units outside the Tensor Cores computed
    fp16_share: float | None = None  # of the time, float16 units outside the Tensor Cores computed
    integer_share: float | None = None  # of the time, integer units computed
    dram_share: float | None = None  # of the memory's bandwidth, what was used


class ModuleTime(FrozenModel):
    """The time of a step that is spent in a module of the user's model, without the modules in it that are listed."""

    forward_seconds: _Seconds = 0.0
    backward_seconds: _Seconds = 0.0


class KernelTime(FrozenModel):
    """A kernel of a step with the shapes that it worked on; on a CPU an operator."""

    name: str  # the first 200 characters
    kind: KernelClass
    format: Format = ""  # of the inputs of a product; "" if it is not known
    operator: str = ""  # torch's, which launched it; "" for compiled code and CUDA graphs
    shapes: tuple[tuple[int, ...], ...] = ()  # of the operator's tensors
    launches: float  # a step
    seconds: _Seconds  # a step, all launches together


class ProductTime(FrozenModel):
    """The time of a step's products of one kind and format in a module, or in all whose names differ by numbers."""

    kind: KernelClass
    format: Format = ""  # as in `KernelTime`
    module: str = ""  # "blocks.*.mlp"; as in `StepProfile.module_seconds`
    seconds: _Seconds


class AttentionTime(FrozenModel):
    """The time of a step's attention of one backend and size, forward and backward."""

    # The kernels of scaled_dot_product_attention that ran; "math", its own products and softmax; "written", the user's.
    backend: Literal["flash", "efficient", "cudnn", "math", "written"]
    format: Format = ""  # of its inputs
    queries: int  # a sequence
    keys: int
    head_size: int
    is_masked: bool = False  # whether fused kernels were given a mask
    seconds: _Seconds
    product_seconds: _Seconds  # of these, in matrix products; of fused kernels all
    flops: int  # of the full matrix of scores


class GradientHistogram(FrozenModel):
    """How many nonzero gradients have which exponent, floor(log2 |g|), in float32 and without a loss scale."""

    first_exponent: int = 0
    counts: str = ""  # of the first exponent and each one after it, apart by spaces: numbers would be a line each
    largest: float = 0.0  # of the absolute values

    @property
    def by_exponent(self) -> dict[int, int]:
        """Return the counts by exponent; none of a text that is no list of numbers."""
        parts = self.counts.split()
        return dict(enumerate(map(int, parts), self.first_exponent)) if all(map(str.isdecimal, parts)) else {}


class ModuleNumerics(FrozenModel):
    """What a precision loses in a module that owns weights, or in several whose names begin alike.

    The signal-to-quantization-noise ratio (SQNR) is that of `Float8Facts`, of r in float32 and q in the precision; of
    several modules it is the lowest.
    """

    name: str
    num_weights: int
    weights: GradientHistogram = GradientHistogram()  # of the gradients of weights
    outputs: GradientHistogram = GradientHistogram()  # of the gradients of outputs, of large ones a sample
    output_sqnr_db: float | None = None  # of the outputs' first call; None if the module is not called
    gradient_sqnr_db: float | None = None  # of the gradients of weights; None if one is not finite in the precision
    overflow_share: float = 0.0  # of the weights' gradients that are not finite in the precision, with its loss scale
    # Of the weights with a gradient, those that an optimizer step leaves as they are; None with autocast or masters, if
    # a gradient overflowed, and in older records of float32 or stochastically rounded weights.
    lost_update_share: float | None = None


class PrecisionFall(FrozenModel):
    """A place of the forward pass where the SQNR falls: a module's call, or its own code before a module within it."""

    module: str = ""  # the model itself if empty
    before: str = ""  # the module within it that gets what was computed; empty if that is what `module` returns
    before_db: float  # the lowest of the tensors that `module` got, and that modules within it had returned so far
    after_db: float  # the lowest of the tensors that were computed
    dtype: str = ""  # of the first of them in the precision


class StepNumerics(FrozenModel):
    """What a precision rounds away in one step, against float32 with the same weights, batch and dropout."""

    modules: tuple[ModuleNumerics, ...] = ()  # in the model's order; of a script only the outputs are known
    falls: tuple[PrecisionFall, ...] = ()  # the largest, in forward order; none are known of older records
    loss_scale: float | None = None  # when the step was taken; None without scaling
    # How far an optimizer step moves all weights in the direction of their updates, over the size of these; 1 if
    # rounding loses nothing in the mean. None as `lost_update_share` is, and if the update depends on the weights.
    kept_update_share: float | None = None
    note: str = ""  # what differs from the timed loop
    missing: str = ""  # why nothing was measured


class Collectives(FrozenModel):
    """The collectives of a step that do the same in one format, such as all-reduces of float32."""

    kind: str  # "all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all" or "other"
    format: Format = ""  # of the first tensor; "" if it is no float, or not known
    launches: float  # a step
    num_bytes: float = 0.0  # of the tensors that a rank gives, a step; 0 if their shapes are not known
    largest_bytes: float = 0.0  # of the one with the most; 0 if that is not known, and in older records


class RankStep(FrozenModel):
    """What a rank's step takes besides its collectives."""

    compute_seconds: _Seconds = 0.0  # in which a kernel of other work ran
    exposed_seconds: _Seconds | None = None  # in which a kernel of its collectives ran alone; None in older records
    idle_seconds: _Seconds | None = None  # in which no kernel ran; None in older records
    data_seconds: _Seconds = 0.0  # in which a script waited for its loader's batches
    clock_hertz: float | None = None  # of the GPU's multiprocessors after the profile; None if it is not known


class Communication(FrozenModel):
    """What ranks exchange in a step, by the first rank's profile."""

    seconds: _Seconds = 0.0  # in which a kernel of it ran; waiting for other ranks is part of it
    exposed_seconds: _Seconds = 0.0  # of `seconds`, no other kernel ran
    collectives: tuple[Collectives, ...] = ()  # those of the most bytes first
    # Backward passes after which gradients were reduced, for one update; 0 if that is not known.
    reduced_passes: float = 0.0
    late_share: float = 0.0  # of the reduced bytes, those that were reduced after backward
    rank_seconds: tuple[_Seconds, ...] = ()  # `seconds` of each rank; empty if the others' are not known
    rank_steps: tuple[RankStep, ...] = ()  # of the ranks that are known, the first one's first; empty in older records
    threads_per_rank: int | None = None  # of PyTorch on the CPU, in the first rank; None in older records
    # The trained weight with the most values, if it has most of them: its name, its layer's class and its gradient's
    # bytes. Empty if none has, and in older records.
    largest_weight: str = ""
    largest_weight_layer: str = ""  # likewise
    largest_weight_bytes: float = 0.0  # likewise


class StepProfile(FrozenModel):
    """What a step spends its time on, from a few steps under torch's profiler after the timed blocks.

    All figures are of one step: means. Times of kernels are the device's, of several GPUs the first one's; on a CPU
    they are those of operators, each without the operators that it called. Kernels that overlap count each, so classes
    can add up to more than `busy_seconds`. The steps of the profile are no samples, and take longer than timed ones if
    the host sets the pace.
    """

    device_type: Literal["cuda", "cpu"]
    num_steps: int = 0  # that were profiled; 0 if none could be
    seconds: _Seconds = 0.0  # from the first kernel's start to the last one's end
    busy_seconds: _Seconds = 0.0  # of `seconds`, at least one kernel ran
    idle_seconds: _Seconds | None = None  # of `seconds`, no kernel ran; None on a CPU
    # Of a step without the profiler, the host waits for values from the device; None on a CPU, and in older records.
    wait_seconds: _Seconds | None = None
    # How often the host waits for the device, by the operator that does ("" is none); empty in older records.
    waits: dict[str, float] = Field(default_factory=dict)
    # Of `seconds`, copies between host and device, and what follows them, in which no kernel runs: by direction and
    # the host's memory, as in "HtoD Pageable"; empty in older records.
    host_copy_seconds: dict[str, _Seconds] = Field(default_factory=dict)
    # While no kernel ran, the host allocated the device's memory or computed, by name; None on a CPU, in older records.
    host_seconds: dict[str, _Seconds] | None = None
    # Kernels and copies that a loader launches in the process that trains; None on a CPU, and in older records.
    loader_kernels: float | None = None
    # PyTorch's allocator asks the driver for memory in each step, and does not keep it; False in older records, too.
    allocates: bool = False
    # What slows steps and is on, as Python or the environment sets it; empty in older records.
    settings: tuple[str, ...] = ()
    recomputed_seconds: _Seconds | None = None  # that backward computes of forward again; None in older records
    num_kernels: float = 0.0  # launches; on a CPU calls of operators
    class_seconds: dict[KernelClass, _Seconds] = Field(default_factory=dict)
    format_seconds: dict[Format, _Seconds] = Field(default_factory=dict)  # of products on Tensor Cores
    # By the module's name, at most two levels deep; "" is the time outside of all modules (loss, optimizer). Empty if
    # modules cannot be told apart.
    module_seconds: dict[str, ModuleTime] = Field(default_factory=dict)
    kernels: tuple[KernelTime, ...] = ()  # the ten that take longest
    products: tuple[ProductTime, ...] = ()  # empty in older records
    attention: tuple[AttentionTime, ...] = ()  # the longest first; empty on a CPU, and in older records
    # Of products, and of kernels of unknown names, that no operator of PyTorch's launched, by what did ("" is a CUDA
    # graph or Python); empty on a CPU, and if no operators were recorded.
    unlisted_seconds: dict[str, _Seconds] = Field(default_factory=dict)
    communication: Communication | None = None  # None without any, and in older records
    flops: StepFlops | None = None  # of a script's step, counted in steps of their own; else `RankSamples` has them
    numerics: StepNumerics | None = None  # None if the protocol does not ask for it
    missing: str = ""  # what could not be found out, and why


class Trial(FrozenModel):
    """The result of a spec on a machine, with all raw samples."""

    spec: TrialSpec  # what was measured
    status: Status  # how it ended; everything but `ok` has a message
    message: str = ""  # what happened, in a line
    facts: Facts | None = None  # what actually ran; None if set-up did not get that far
    ranks: tuple[RankSamples, ...] = ()  # the samples of each process; empty if nothing was timed
    environment: Environment  # the machine and software
    started_at: str  # UTC, ISO 8601
    duration_seconds: float  # the whole trial, set-up included; in an interleaved session with the others' blocks, too
    log: str = ""  # the end of what the process printed, if it failed
    # Shared by trials whose processes were interleaved; None for one that ran by itself.
    session_id: str | None = renamed(None, "sitting")
    # What its session took for all configurations, by stage; empty in older records.
    stage_seconds: dict[str, _Seconds] = Field(default_factory=dict)
    # One for each timed block or epoch, in order (of a stretch each block has the same, with its share of the time and
    # energy); empty in records without telemetry.
    readings: tuple[TelemetrySummary, ...] = ()
    # Its energy; None if it was not measured over sustained steps.
    energy_measurement: EnergyMeasurement | None = renamed(None, "metered")
    gpu_facts: GpuFacts | None = None  # what the driver says of the GPUs; None on a CPU and without telemetry
    # The GPU's hardware counters over the timed blocks; None if there are none (`telemetry_note` says why).
    counters: GpuCounters | None = None
    profile: StepProfile | None = None  # what a step spends its time on; None if the protocol does not ask for it
    shortfall: Shortfall | None = None  # by how much memory fell short; None if it did not, or if it is not known
    telemetry_note: str = ""  # which readings are "not available: why"; empty where all are
    schema_version: int = SCHEMA_VERSION  # the version of this format

    def __repr__(self) -> str:
        """Return the trial in a line; `model_dump` has all its fields."""
        return f"Trial({self.spec.label}, repeat {self.spec.repeat}: {self.status})"

    __str__ = __repr__

    @property
    def layers(self) -> tuple[str, ...] | None:
        """Return the kinds of layers that techniques act on, attention if a step computes it; None if not known."""
        if self.facts is None or self.facts.layers is None:
            return None
        has_attention = any(rank.flops is not None and "attention" in rank.flops.products for rank in self.ranks)
        return (*self.facts.layers, *(("attention",) if has_attention else ()))

    @field_validator("spec")
    @classmethod
    def _without_folders(cls, spec: TrialSpec) -> TrialSpec:
        return spec.redacted  # records older than `UserModel.folder_digest` have the folder
