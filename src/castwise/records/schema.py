"""The record of a trial: its spec, its raw samples and its circumstances, one JSON file each.

Records hold raw samples only, so that any statistic can be recomputed from old files. The history of the format is next
to its version.
"""

import hashlib
from typing import Annotated, Literal

from pydantic import Field, field_validator

from castwise.registry.precisions import Hardware
from castwise.spec.frozen import FrozenModel, renamed
from castwise.spec.trial import TrialSpec
from castwise.spec.types import Unit

# 1: first version (castwise 0.1.0). Trial.readings, gpu_facts and telemetry_note came later, with defaults: a record
# without them reads as one without telemetry. TrialSpec.user_model, Facts.unit, clip_grad_norm, accumulate and notes,
# and RankSamples.notes came with users' own models, with defaults; TrialSpec.memory_limit_bytes, Protocol.memory_parts,
# RankSamples.memory_parts and Trial.shortfall with `castwise max-batch`, with defaults. UserModel.folder_digest
# came later: in older records UserModel.path is absolute, and is read as if it were not. Environment.gpu_uuids,
# TelemetrySummary.num_gpus and EnergyMeasurement.num_gpus came later, with defaults: older readings are of a trial's
# first GPU alone. MeasurementProtocol.lead_in_seconds and Block.lead_in_steps came later, with defaults: older blocks
# began after an idle gap. A renamed field keeps its first name in JSON (`renamed`).
SCHEMA_VERSION = 1

# A loss may be NaN; a time that is not a number, or negative memory, means a damaged file.
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Bytes = Annotated[int, Field(ge=0)]

Status = Literal["ok", "oom", "timeout", "crashed", "diverged", "unsupported"]


class Environment(FrozenModel):
    """The machine and software a trial ran on.

    Attributes:
        castwise: castwise's version.
        commit: The commit castwise was run from, with "+" where files were changed; None outside a checkout.
        python: Python's version.
        torch: torch's version.
        host: The machine's name.
        system: Operating system and kernel.
        cpu: The processor's name.
        num_threads: Threads that torch uses for one operation.
        cpu_features: The processor's instructions for 16-bit floats, by the kernel's names ("avx512_bf16").
        gpu: The GPU's exact name, or None on a CPU.
        gpu_uuid: The GPU's UUID as NVML knows it.
        gpu_uuids: The UUIDs of all GPUs that torch sees, in its order; empty in older records.
        capability: CUDA compute capability, as (major, minor).
        gpu_memory_bytes: The GPU's memory.
        num_gpus: GPUs that torch sees.
        driver: The GPU driver's version.
        cuda: The CUDA version torch was built with.
        cudnn: cuDNN's version as torch prints it.
        torchvision: torchvision's version, or None if it is not installed.
        fp32_precision: What float32 products compute in before a trial sets it, by torch's switches.
    """

    castwise: str
    commit: str | None = None
    python: str
    torch: str
    host: str
    system: str
    cpu: str
    num_threads: int
    cpu_features: tuple[str, ...] = ()
    gpu: str | None = None
    gpu_uuid: str | None = None
    gpu_uuids: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    gpu_memory_bytes: int | None = None
    num_gpus: int = 0
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    torchvision: str | None = None
    fp32_precision: dict[str, str] = Field(default_factory=dict)

    @property
    def device_name(self) -> str:
        """Return the name of what was measured: the GPU, or the CPU where there is none."""
        return self.gpu or self.cpu

    @property
    def hardware(self) -> Hardware:
        """Return what decides which precisions the device has."""
        return Hardware(self.device_name, self.capability if self.gpu else None, self.cpu_features)

    def gpus_of(self, spec: TrialSpec) -> dict[str, str]:
        """Return the UUIDs of the GPUs that a trial runs on, by torch's names for them ("cuda:1"); none on a CPU.

        The first is the environment's own. A UUID that is not known is empty.
        """
        if self.gpu is None:
            return {}
        first = int(spec.device.partition(":")[2] or 0)
        indices = range(first, first + spec.world_size)
        known = {f"cuda:{index}": uuid for index, uuid in enumerate(self.gpu_uuids)}
        if self.gpu_uuid:
            known[f"cuda:{first}"] = self.gpu_uuid
        return {device: known.get(device, "") for device in (f"cuda:{index}" for index in indices)}

    @property
    def fingerprint(self) -> str:
        """Return 8 hexadecimal digits, equal for machines and software whose figures can be compared as they are."""
        parts = (
            self.castwise,
            self.torch,
            self.torchvision,
            self.host,
            self.device_name,
            self.driver,
            self.cuda,
            self.cudnn,
        )
        return hashlib.sha256(repr((*parts, self.num_threads)).encode()).hexdigest()[:8]


class Facts(FrozenModel):
    """What a trial actually ran, found out in its process before the first timed step.

    Attributes:
        num_parameters: Trainable and other weights of the model.
        units_per_sample: Units of throughput in one sample (35 tokens in a column of the language model; else 1).
        unit: What throughput counts, for a user's own model; None for the workload's own unit.
        param_dtypes: Number of weights by dtype, after the precision was applied.
        optimizer: The optimizer's class and its arguments.
        clip_grad_norm: The norm that gradients are clipped to, or None.
        accumulate: Batches whose gradients are added up for one optimizer step.
        fp32_precision: What float32 matmul, convolution and RNN compute in, as torch reports it.
        notes: What the user's own code changed or did before the first timed step, a sentence each.
        data_note: What the data was, in words, if the spec's name does not say it.
        data_bytes: Memory of the batches that lie on the device all the time; part of every peak.
        ready_seconds: From the request for a process until torch is imported and the device is open.
        set_up_seconds: Building model, data and optimizer.
        first_step_seconds: The first step: libraries are loaded, algorithms searched, code compiled. 0 in older
            records, where it is part of the warm-up.
        warm_up_seconds: From the second step until the step time had settled.
        warm_up_steps: Steps until then, the first one included.
        capture_seconds: Of the warm-up, capturing the step as a CUDA graph; None without one.
        settled: Whether warm-up ended because the step time had settled, and not because its time was up.
        averaged_by: How ranks take the mean of their gradients with `coalesced-reduce`: by the backend's collectives,
            or by a kernel in memory that all their GPUs see; None without it, and in runs of epochs.
    """

    num_parameters: int
    units_per_sample: int = Field(ge=1)
    unit: Unit | None = None
    param_dtypes: dict[str, int]
    optimizer: str
    clip_grad_norm: float | None = None
    accumulate: int = 1
    fp32_precision: dict[str, str]
    notes: tuple[str, ...] = ()
    data_note: str | None = None
    data_bytes: int = 0
    ready_seconds: float = 0.0
    set_up_seconds: float = 0.0
    first_step_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    warm_up_steps: int = 0
    capture_seconds: float | None = None
    settled: bool = True
    averaged_by: Literal["collectives", "shared memory"] | None = None


class Block(FrozenModel):
    """A few steps timed as one.

    Attributes:
        seconds: Time of the block, by CUDA events on a GPU, by the host's clock on a CPU.
        num_steps: Steps in it.
        lead_in_steps: Untimed steps right before it; 0 in older records.
        loss: The loss of its last step.
        loss_scale: The loss scale after its last step; None without scaling.
        skipped_steps: Steps of the block, and of those before it, that loss scaling skipped.
    """

    seconds: _Seconds = Field(gt=0)
    num_steps: int = Field(ge=1)
    lead_in_steps: int = renamed(0, "lead_steps", ge=0)
    loss: float
    loss_scale: float | None = None
    skipped_steps: int = 0

    @property
    def all_steps(self) -> int:
        """Return its steps and those before it."""
        return self.lead_in_steps + self.num_steps


class Epoch(FrozenModel):
    """One pass over the training data, and over the validation data after it.

    Attributes:
        seconds: Training part, waiting for data included; by the host's clock, synchronised at its end.
        data_seconds: Of that, the time the host waited for the next batch.
        placing_seconds: Of that, the time the host took to bring batches to the device; a copy that is not asynchronous
            waits for the steps in flight. None in older records, whose `data_seconds` include it.
        first_step_seconds: Of `seconds`, the run's first step, synchronised at its end: libraries are loaded and
            algorithms are searched in it. None in later epochs.
        validation_seconds: The pass over the validation data; 0 without one.
        num_steps: Optimizer steps.
        num_samples: Samples this process trained on; each rank has its share.
        counted_seconds: The part of `seconds` that throughput counts (without the recipe's skipped batches).
        counted_samples: The samples trained on in that time.
        losses: The training loss at some steps, as (step of the epoch, loss), the last step always.
        learning_rate: The first parameter group's rate at the epoch's end.
        accuracy: Share of validation samples classified right; None for language models or without validation.
        validation_loss: Mean validation loss per target; its exponential is a language model's perplexity.
        loss_scale: The loss scale at the epoch's end; None without scaling.
        skipped_steps: Steps that loss scaling skipped.
        shortened: Whether the recipe's `max_steps` cut the epoch short.
        diverged: Why the run was stopped in or after this epoch; None if it was not.
    """

    seconds: _Seconds
    data_seconds: _Seconds
    placing_seconds: _Seconds | None = None
    first_step_seconds: _Seconds | None = None
    validation_seconds: _Seconds = 0.0
    num_steps: int
    num_samples: int
    counted_seconds: _Seconds
    counted_samples: int
    losses: tuple[tuple[int, float], ...]
    learning_rate: float
    accuracy: float | None = None
    validation_loss: float | None = None
    loss_scale: float | None = None
    skipped_steps: int = 0
    shortened: bool = False
    diverged: str | None = None


class Resumed(FrozenModel):
    """How far a training trial is after its set-up.

    Attributes:
        facts: What it runs.
        epochs: The epochs done by an earlier process of the same trial.
    """

    facts: Facts
    epochs: tuple[Epoch, ...]


class MemoryParts(FrozenModel):
    """What held memory at the peak of one training step after the timed ones, profiled operation by operation.

    A tensor counts once, by its storage; a weight or batch that is saved for backward counts as a weight or a batch.

    Attributes:
        weights_bytes: The model's parameters and buffers.
        masters_bytes: Float32 masters of lower-precision weights.
        gradients_bytes: Gradients of parameters and masters, as many as there were at that moment.
        optimizer_bytes: The optimizer's state: momentum, Adam's moments.
        batches_bytes: Batches that stay on the device.
        saved_bytes: Activations saved for backward.
        weight_casts_bytes: Lower-precision copies of weights that autocast makes and keeps for backward.
        temporaries_bytes: All other tensors alive at that moment: outputs in flight, gradients of activations.
        workspace_bytes: What else the allocator had given out: workspaces within operations, those that cuBLAS keeps,
            rounding. None on a CPU, where it is not known.
        outside_bytes: In use on the device outside the allocator: the CUDA context, libraries, other processes. None
            on a CPU.
        missing: Why the step was not profiled; all else is 0 then.
    """

    weights_bytes: _Bytes = 0
    masters_bytes: _Bytes = 0
    gradients_bytes: _Bytes = 0
    optimizer_bytes: _Bytes = 0
    batches_bytes: _Bytes = 0
    saved_bytes: _Bytes = 0
    weight_casts_bytes: _Bytes = 0
    temporaries_bytes: _Bytes = 0
    workspace_bytes: _Bytes | None = None
    outside_bytes: _Bytes | None = None
    missing: str = ""

    @property
    def tensors_bytes(self) -> int:
        """Return what tensors held at that moment."""
        return (
            self.weights_bytes
            + self.masters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.batches_bytes
            + self.saved_bytes
            + self.weight_casts_bytes
            + self.temporaries_bytes
        )

    @property
    def peak_bytes(self) -> int:
        """Return the step's peak: what tensors held, and workspaces."""
        return self.tensors_bytes + (self.workspace_bytes or 0)


class RankSamples(FrozenModel):
    """Everything one process measured; of several devices (DataParallel), memory is that of the fullest.

    Attributes:
        blocks: The timed blocks of a steady trial, in order.
        epochs: The epochs of a training trial, in order.
        peak_allocated_bytes: Most memory held by tensors at once during the timed blocks.
        peak_reserved_bytes: Most memory the caching allocator held; None on a CPU.
        driver_used_bytes: Memory in use on the device at the end as the driver and nvidia-smi report it: the
            allocator's, the CUDA context's and other processes'. None on a CPU.
        warm_up_peak_allocated_bytes: The same as `peak_allocated_bytes`, for set-up and warm-up.
        notes: What the user's own code did while steps were timed, a sentence each.
        memory_parts: What held the memory at a step's peak; None if the protocol does not ask for it.
    """

    blocks: tuple[Block, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    peak_allocated_bytes: _Bytes | None = None
    peak_reserved_bytes: _Bytes | None = None
    warm_up_peak_allocated_bytes: _Bytes | None = None
    driver_used_bytes: _Bytes | None = None
    notes: tuple[str, ...] = ()
    memory_parts: MemoryParts | None = None


class Shortfall(FrozenModel):
    """How far memory fell short when a trial ran out of it.

    Attributes:
        needed_bytes: What was held plus what was asked for: at least so much is needed.
        free_bytes: What the trial could have: its limit, or what other processes left of the device.
    """

    needed_bytes: _Bytes
    free_bytes: _Bytes


class GpuFacts(FrozenModel):
    """What the driver reports of a GPU that does not change while a trial runs; None if `missing` says why.

    Of several GPUs a limit is the lowest of any, a mode is on if it is on for all, and memory errors are their sum.

    Attributes:
        max_sm_clock_hertz: The highest clock of the streaming multiprocessors.
        power_limit_watts: The power limit in force.
        persistence_mode: Whether the driver stays loaded when no program uses the GPU.
        ecc_mode: Whether memory has error correction.
        ecc_errors: Memory errors that ECC could not correct, from the driver's loading to the trial's start.
        max_pcie_generation: The PCIe generation that GPU and slot can do.
        max_pcie_width: The number of PCIe lanes that GPU and slot can do.
        missing: Why a field is None, or not of all GPUs, by its name; "gpu" stands for all fields.
    """

    max_sm_clock_hertz: float | None = None
    power_limit_watts: float | None = None
    persistence_mode: bool | None = None
    ecc_mode: bool | None = None
    ecc_errors: int | None = None
    max_pcie_generation: int | None = None
    max_pcie_width: int | None = None
    missing: dict[str, str] = Field(default_factory=dict)


class TelemetrySummary(FrozenModel):
    """What GPU and host did while one block or epoch was timed, as the parent process saw it.

    Clocks and power are from the samples taken while it ran, or from those just before and just after if it was too
    short. Of several GPUs, clocks, PCIe and samples are those of the GPU with the lowest, the temperature is that of
    the hottest, and the rest is of all together. Power and energy are there only if they are known for each. Older
    records have one GPU, the first of several.

    Attributes:
        seconds: From the sample just before to the one just after, by the host's clock.
        num_gpus: GPUs that it covers: those that could be read; 0 if none could, and on a CPU.
        num_samples: Samples of the GPU; 0 on a CPU.
        sm_clock_hertz: Mean clock of the streaming multiprocessors.
        min_sm_clock_hertz: Their lowest clock.
        memory_clock_hertz: Mean clock of the memory.
        power_watts: Mean power of the board.
        max_temperature_celsius: The core's highest temperature.
        throttle_reasons: All reasons that held the clock down in any sample, by nvidia-smi's names.
        foreign_processes: The most processes at once that computed on the GPU and are not this program's.
        energy_joules: By how much the driver's energy counter rose; None also if it did not.
        pcie_generation: The highest generation that the PCIe link ran at.
        pcie_width: The most PCIe lanes in use.
        ecc_errors: Memory errors that ECC could not correct, from the driver's loading to the end.
        cpu_pressure: Share of the time in which a runnable task waited for a CPU (PSI's "some").
        cpu_steal: Share of the CPUs' time that the hypervisor gave to others.
        cpu_load: Runnable tasks over usable CPUs, averaged over a minute.
        missing: Why a field is None, or of a part of the time or of the GPUs only, by its name; "gpu" stands for all
            of the GPU's.
        affected_gpus: If only some of several GPUs were throttled, had others' processes or memory errors: their names
            in torch, by the throttle reason or by the field's name.
    """

    seconds: float
    num_gpus: int = 1
    num_samples: int = 0
    sm_clock_hertz: float | None = None
    min_sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    power_watts: float | None = None
    max_temperature_celsius: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    foreign_processes: int | None = None
    energy_joules: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    ecc_errors: int | None = None
    cpu_pressure: float | None = None
    cpu_steal: float | None = None
    cpu_load: float | None = None
    missing: dict[str, str] = Field(default_factory=dict)
    affected_gpus: dict[str, tuple[str, ...]] = renamed({}, "whose")

    @property
    def gpu_power_watts(self) -> float | None:
        """Return the mean power of one GPU."""
        return None if self.power_watts is None else self.power_watts / max(1, self.num_gpus)


class EnergyMeasurement(FrozenModel):
    """The driver's energy counter over sustained steps, after the timed blocks.

    The counter ticks ten times a second (H200), too seldom for a timed block. Here the time is taken from tick to tick,
    so that the mean power is that of running steps alone. Each GPU's counter ticks on its own: of several GPUs it is
    the sum of their powers, each from its own first tick to its last, over the shortest of these times.

    Attributes:
        num_gpus: GPUs whose energy it is; 1 in older records, the first of several.
        joules: By how much the counter rose from its first tick to its last.
        seconds: The time between the two, by the host's clock.
        num_ticks: Ticks without the first; the fewest of any GPU's.
        step_seconds: Seconds a step of the sustained steps; 0 if not known.
        late_seconds: How late the first and the last tick can have been seen, of any GPU.
        missing: Why joules are 0; empty if they are not.
    """

    num_gpus: int = 1
    joules: float = 0.0
    seconds: float = 0.0
    num_ticks: int = 0
    step_seconds: float = 0.0
    late_seconds: float = 0.02  # of older records: the counter was read every 20 ms
    missing: str = ""


class Trial(FrozenModel):
    """The result of a spec on a machine, with all raw samples.

    Attributes:
        spec: What was measured.
        status: How it ended; everything but `ok` has a message.
        message: What happened, in a line.
        facts: What actually ran; None if set-up did not get that far.
        ranks: The samples of each process; empty if nothing was timed.
        environment: The machine and software.
        started_at: UTC, ISO 8601.
        duration_seconds: The whole trial, set-up included; in an interleaved session with the others' blocks, too.
        session_id: Shared by trials whose processes were interleaved; None for one that ran by itself.
        log: The end of what the process printed, if it failed.
        readings: One for each timed block or epoch, in order; empty in records without telemetry.
        energy_measurement: Its energy; None if it was not measured over sustained steps.
        gpu_facts: What the driver says of the GPUs; None on a CPU and without telemetry.
        shortfall: By how much memory fell short; None if it did not, or if it is not known.
        telemetry_note: Which readings are "not available: why"; empty where all are.
        schema_version: The version of this format.
    """

    spec: TrialSpec
    status: Status
    message: str = ""
    facts: Facts | None = None
    ranks: tuple[RankSamples, ...] = ()
    environment: Environment
    started_at: str
    duration_seconds: float
    log: str = ""
    session_id: str | None = renamed(None, "sitting")
    readings: tuple[TelemetrySummary, ...] = ()
    energy_measurement: EnergyMeasurement | None = renamed(None, "metered")
    gpu_facts: GpuFacts | None = None
    shortfall: Shortfall | None = None
    telemetry_note: str = ""
    schema_version: int = SCHEMA_VERSION

    @field_validator("spec")
    @classmethod
    def _without_folders(cls, spec: TrialSpec) -> TrialSpec:
        return spec.redacted  # records older than `UserModel.folder_digest` have the folder
