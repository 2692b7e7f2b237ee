"""Trials without processes, torch or a GPU: an engine that makes its figures up, and fails as the test asks.

Every figure here is invented: the GPU does not exist, its times are a formula, and no test compares them with a
real machine's.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from programs import PATIENCE_SECONDS

from castwise.orchestrator.machine import FindMachine, detect_machine
from castwise.orchestrator.session import BackgroundCloser, OnNote, OnProgress, TrialFailedError
from castwise.records.schema import (
    Block,
    Environment,
    Epoch,
    Facts,
    GpuFacts,
    MemoryParts,
    RankSamples,
    Resumed,
    Shortfall,
    Status,
    StepFlops,
    StepProfile,
    TelemetrySummary,
    TracedMemory,
    Trial,
)
from castwise.registry.precisions import PRECISIONS, find_precision
from castwise.spec.recipe import Recipe
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.spec.user_model import UserModel, UserParts, UserWorkload

FAKE_GPU = "Fake GPU"
FAKE_CPU = "Fake CPU (2 cores)"
FAKE_DIGEST = "0123456789ab"
PRECISION_NAMES = tuple(row.name for row in PRECISIONS)


def step_time_of(precision: str) -> float:
    """Return the made-up step time in a precision, relative to fp32's, from what its row says."""
    row = find_precision(precision)
    if row.autocast_dtype is not None:
        return 0.41 if row.loss_scale != "none" else 0.4
    if row.param_dtype == "float32":
        return {"ieee": 1.0, None: 0.7, "tf32": 0.6}[row.float32_matmul]
    time = 0.45 if row.master_weights else 0.35
    return time + 0.01 if row.param_dtype == "bfloat16" else time


def memory_of(precision: str) -> float:
    """Return the made-up memory of a batch in a precision, relative to fp32's, from what its row says."""
    row = find_precision(precision)
    if row.param_dtype == "float32":
        return 1.0 if row.autocast_dtype is None else 0.6
    return 0.7 if row.master_weights else 0.5


# Made up: what a sample of a training trial takes, the samples of a data set, and what comes on top.
SAMPLE_BYTES = {"dpn92": 2**25}
OTHER_SAMPLE_BYTES = 2**23
FIXED_BYTES = 2**29
CONTEXT_BYTES = 2**28
DATA_SET_SAMPLES = 12_800
FIRST_STEP_SECONDS = 0.5

# Made up: what of the loader's time is left with techniques of data.
_LOADING = {"resident-data": 0.0, "loader-workers": 0.25}

_REPEATED = ("lead_in", "run_block", "run_epoch")
PHASES = ("open", "set_up", "warm_up", "run_block", "finish")

# What a fault of this kind makes of a trial, its message, and the phase in which it strikes by default.
_FAILURES: dict[str, tuple[Status, str, str]] = {
    "oom": ("oom", "CUDA out of memory. Tried to allocate 1.00 GiB (fake)", "set_up"),
    "crash": ("crashed", "RuntimeError: an illegal memory access was encountered (fake)", "run_block"),
    "timeout": ("timeout", "'warm up' took longer than 1 s (fake)", "warm_up"),
    "refused": ("unsupported", "The loss has shape (4,): it must be a scalar (fake)", "warm_up"),
    "unsupported": ("unsupported", "\"fake_kernel\" not implemented for 'Half'", "set_up"),
}


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a trial, and when."""

    kind: str  # oom, crash, timeout, unsupported or refused; nan or inf (the loss); interrupt (as Ctrl-C would); hang
    phase: str = ""  # one of PHASES; empty takes the kind's own
    block: int = 0  # the timed block or epoch in which it strikes

    @property
    def strikes_in(self) -> str:
        return self.phase or (_FAILURES[self.kind][2] if self.kind in _FAILURES else "run_block")


def parse_faults(text: str) -> dict[str, Fault]:
    """Return faults by precision or session from `fp16-true=nan,bf16-mixed=oom@warm_up,#1=hang@open`."""
    faults = {}
    for item in filter(None, text.split(",")):
        name, _, fault = item.partition("=")
        kind, _, phase = fault.partition("@")
        faults[name] = Fault(kind, phase)
    return faults


def fake_environment(capability: tuple[int, int] | None = (9, 0), **changes: object) -> Environment:
    """Return a made-up machine; without a capability it has no GPU."""
    gpu: dict[str, object] = {
        "gpu": FAKE_GPU,
        "capability": capability,
        "gpu_memory_bytes": 16 * 2**30,
        "num_gpus": 1,
        "driver": "0.0-fake",
        "cuda": "0.0-fake",
        "cudnn": "0",
    }
    machine: dict[str, object] = {
        "castwise": "0.0",
        "commit": "0123456789ab",
        "python": "3.11.0",
        "torch": "0.0-fake",
        "host": "fake-host",
        "system": "Linux 0.0-fake",
        "cpu": FAKE_CPU,
        "num_threads": 2,
    }
    return Environment.model_validate(machine | (gpu if capability is not None else {}) | changes)


def fake_spec(precision: str = "fp32", **changes: object) -> TrialSpec:
    """Return a question about the made-up GPU, with the precision's own loss scale."""
    spec: dict[str, object] = {
        "workload": "resnet50",
        "precision": precision,
        "loss_scale": find_precision(precision).loss_scale,
        "batch_size": 256,
        "device": "cuda:0",
    }
    return TrialSpec.model_validate(spec | changes)


# For every field of `fake_spec()` another value; tests/spec/test_plan.py fails if a field is missing.
OTHER_VALUES: dict[str, object] = {
    "workload": "resnet18",
    "precision": "bf16-true",
    "loss_scale": "128",
    "batch_size": 257,
    "device": "cuda:1",
    "data_set": "mnist",
    "techniques": ("compile",),
    "world_size": 2,
    "num_nodes": 2,
    "parallelism": "ddp",
    "kind": "training",
    "recipe": Recipe(epochs=1),
    "weights": "resnet18.pth",
    "user_model": UserModel(kind="file", path="/train_me.py", name="build", digest="0123456789ab"),
    "memory_limit_bytes": 2**30,
    "protocol": MeasurementProtocol(num_blocks=21),
    "seed": 1,
    "repeat": 1,
}


def fake_training(precision: str = "fp32", recipe: Mapping[str, object] | None = None, **changes: object) -> TrialSpec:
    """Return a question about a training run of two epochs, unless the recipe has other fields."""
    made = Recipe.model_validate({"epochs": 2, **(recipe or {})})
    return fake_spec(precision, kind="training", recipe=made, **changes)


def fake_facts(**changes: object) -> Facts:
    """Return what a made-up trial ran."""
    facts: dict[str, object] = {
        "num_parameters": 1000,
        "units_per_sample": 1,
        "param_dtypes": {"float32": 1000},
        "optimizer": "Fake(lr=1)",
        "fp32_precision": {"cuda.matmul": "ieee"},
        "warm_up_steps": 5,
    }
    return Facts.model_validate(facts | changes)


def fake_trial(
    spec: TrialSpec | None = None,
    *,
    status: Status = "ok",
    message: str = "",
    step_seconds: tuple[float, ...] = (0.1,),
    facts: Facts | None = None,
    environment: Environment | None = None,
    peak_bytes: int | None = 2**30,
    losses: tuple[float, ...] | None = None,
    skipped: int = 0,
    readings: tuple[TelemetrySummary, ...] = (),
    gpu_facts: GpuFacts | None = None,
) -> Trial:
    """Return an answer whose blocks have one step each; nothing was timed where `step_seconds` is empty."""
    losses = losses or (1.0,) * len(step_seconds)
    blocks = tuple(
        Block(seconds=seconds, num_steps=1, loss=loss, skipped_steps=skipped if index == 0 else 0)
        for index, (seconds, loss) in enumerate(zip(step_seconds, losses, strict=True))
    )
    return Trial(
        spec=spec or fake_spec(),
        status=status,
        message=message,
        facts=facts or (fake_facts() if blocks else None),
        ranks=(RankSamples(blocks=blocks, peak_allocated_bytes=peak_bytes),) if blocks else (),
        environment=environment or fake_environment(),
        started_at="2000-01-01T00:00:00.000+00:00",
        duration_seconds=1.0,
        readings=readings,
        gpu_facts=gpu_facts,
    )


def fake_run(
    spec: TrialSpec, *epochs: Epoch, status: Status = "ok", environment: Environment | None = None, **samples: object
) -> Trial:
    """Return the answer of a training trial that had these epochs, or as many made-up ones as its recipe asks for."""
    done = epochs or tuple(fake_epoch(spec, number) for number in range(recipe_of(spec).num_epochs))
    ranks = (RankSamples.model_validate({"epochs": done} | samples),)
    trial = fake_trial(spec, step_seconds=(), status=status, environment=environment, facts=fake_facts())
    return trial.model_copy(update={"ranks": ranks, "message": "" if status == "ok" else "it went wrong (fake)"})


@dataclass
class FakeEngine:
    """Starts made-up trials, one at a time, and keeps count of them."""

    environment: Environment = field(default_factory=fake_environment)
    # By precision, technique, spec key, or the session's number ("#1" is the first).
    faults: Mapping[str, Fault] = field(default_factory=dict)
    data_set: Callable[[str, Path], None] | None = None  # puts a data set into a folder; None: there is no network
    exclusive: bool = True  # two trials must not be open at once; False for rounds
    devices: tuple[str, ...] = ("cpu", "cuda", "cuda:0")  # what `open` accepts besides "auto"
    models: tuple[str, ...] = ("torchvision:alexnet", "timm:vit_tiny")  # of its zoos
    own: int | TrialFailedError | None = 16  # the batch size of users' own models; or why they cannot be run
    limits: list[float] = field(default_factory=list)  # in seconds, of looks at users' own models
    higher_is_better: bool | None = None  # a score of users' own models; None if they have none
    sources: Mapping[str, str] | None = None  # what users' own models were read from; None if not only from files
    on_hang: Callable[[], object] = lambda: None  # is called when a trial starts to hang
    usable: float = 0.94  # the share of memory that tensors can come to in a trial that is about memory
    load_seconds: float = 0.0  # of the loader, for a sample; a training trial waits if its steps take less
    gain: Callable[[TrialSpec], float] = lambda _: 1.0  # how much faster a loop is than its precision makes it
    learns: Callable[[TrialSpec], float] = lambda _: 0.0  # how much higher its accuracy is, and lower its loss
    holds: Callable[[TrialSpec], float] = lambda _: 1.0  # how much more memory it holds than its precision makes it
    refuses: Callable[[TrialSpec], str | None] = lambda _: None  # why the model allows no such loop
    fixed_bytes: int = 0  # what a loop holds whatever its batch
    layers: tuple[str, ...] | None = None  # the kinds of layers in its models; None as in older records
    flops: StepFlops | None = None  # of a step; None as in older records
    float8: Mapping[str, object] = field(default_factory=dict)  # what FP8 does to products
    # By what factor a traced step's memory is off; a text says why none can be traced.
    traces: float | str = "nothing can be traced (fake)"
    traced: list[TrialSpec] = field(default_factory=list)  # the specs whose step was traced, in order
    disk_is_full: bool = False
    profiles: Mapping[str, StepProfile] = field(default_factory=dict)  # by precision; others have `fake_profile`'s
    measured: list[TrialSpec] = field(default_factory=list)  # the specs that were set up, in order
    session_class: "Callable[..., FakeSession] | None" = None  # makes its sessions; None takes FakeSession
    sessions: list["FakeSession"] = field(default_factory=list)
    checkpoints: dict[str, list[Epoch]] = field(default_factory=dict)  # the epochs done, by spec key

    def start(self, timeout_seconds: float, num_processes: int = 1) -> "FakeSession":
        assert timeout_seconds > 0
        assert num_processes >= 1
        self.sessions.append((self.session_class or FakeSession)(self, num_processes))
        return self.sessions[-1]

    @property
    def num_open(self) -> int:
        """Return how many sessions were started and not closed: processes that would be left over."""
        for thread in threading.enumerate():
            # Nobody waits for a process whose device was looked at.
            if thread.name == BackgroundCloser.THREAD_NAME and thread.ident is not None:
                thread.join(PATIENCE_SECONDS)
        return sum(not session.closed for session in self.sessions)

    @property
    def measured_precisions(self) -> list[str]:
        return [spec.precision for spec in self.measured]


class FakeSession:
    """One made-up trial; insists on the order of calls that real processes need, and on a process a rank."""

    def __init__(self, engine: FakeEngine, num_processes: int = 1) -> None:
        self.closed = False
        self.num_processes = num_processes
        self.calls: list[str] = []
        self.ready_seconds = 0.25
        self.timeout_seconds = math.inf
        self._engine = engine
        self._spec: TrialSpec | None = None
        self._blocks: list[Block] = []
        self._leads = False
        self._epochs: list[Epoch] = []
        self.checkpoint: Path | None = None

    def open(self, device: str) -> Environment:
        # Not again of a script that goes on: it may have changed what the environment is read from.
        self._enter("open", after="")
        if device != "auto" and device not in self._engine.devices:
            raise TrialFailedError("crashed", f"there is no {device} (fake)")
        if device == "cpu":
            machine = self._engine.environment
            return fake_environment(None, host=machine.host, num_threads=machine.num_threads)
        return self._engine.environment

    def check(self, workloads: Sequence[str]) -> None:
        self._enter("check", after="open")
        for name in workloads:
            if name not in self._engine.models:
                raise TrialFailedError("unsupported", f"No model '{name}' (fake).", refused=True)

    def inspect(
        self, model: UserModel, limit_seconds: float, on_note: Callable[[str], None] | None = None
    ) -> UserWorkload:
        self._enter("inspect", after="open")
        self._engine.limits.append(limit_seconds)
        if isinstance(self._engine.own, TrialFailedError):
            raise self._engine.own
        found, sources = model.model_copy(update={"digest": FAKE_DIGEST}), self._engine.sources
        return UserWorkload(
            model=found,
            batch_size=self._engine.own,
            parts=UserParts(form="tuple", names=("model", "batch"), batch_form="tensor", optimizer_name="AdamW"),
            sources=None if sources is None else dict(sources),
        )

    def fetch(self, data_set: str, data_dir: Path) -> None:
        self._enter("fetch", after="")
        if self._engine.data_set is None:
            raise TrialFailedError("crashed", "URLError: no network (fake)")
        self._engine.data_set(data_set, data_dir)

    def find_weights(self, models: Sequence[str], where: Path | None) -> dict[str, str | None]:
        self._enter("find_weights", after="")
        return {model: str(where / f"{model}.pth") if where else None for model in models}

    weights: Path | None = None  # that were to be kept

    def trace_memory(
        self,
        spec: TrialSpec,
        batch_sizes: tuple[int, ...],
        rooms: tuple[int, ...],
        may_compute: bool = True,
        on_note: OnNote | None = None,
    ) -> TracedMemory:
        del may_compute
        if on_note is not None and spec.is_script:
            on_note("waiting for step 1 (fake)")
        self._spec = spec
        self._engine.traced.append(spec)
        self._enter("trace_memory", after="open")
        if isinstance(self._engine.traces, str):
            raise TrialFailedError("unsupported", self._engine.traces)
        of_sample = (self._line_bytes() - FIXED_BYTES) / spec.batch_size
        lines = {
            size: round(self._engine.traces * (FIXED_BYTES + of_sample * size))
            for size in (*batch_sizes, *(int((room - FIXED_BYTES) / of_sample) for room in rooms))
        }
        half = FIXED_BYTES // 2
        return TracedMemory(
            batches={size: MemoryParts(weights_bytes=half, saved_bytes=line - half) for size, line in lines.items()}
        )

    def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
        assert self.num_processes == spec.num_processes
        if self._engine.exclusive and self._engine.num_open > 1:  # others may trace a step on the CPU
            training = [each for each in self._engine.sessions if "set_up" in each.calls and not each.closed]
            assert not training, "trials must not share the machine"
        self._spec = spec
        self.checkpoint = checkpoint
        self._engine.measured.append(spec)
        self._enter("set_up", after="inspect" if "inspect" in self.calls else "open")
        if (reason := self._engine.refuses(spec)) is not None:
            raise TrialFailedError("unsupported", reason)
        if spec.protocol.memory_parts:
            self._insist_on_memory()

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        self._enter("warm_up", after="set_up")
        tokens, recipe = 35 if "-lm" in self.spec.workload else 1, find_precision(self.spec.precision).float8_recipe
        known = {"recipe": recipe, "num_converted": 1, "left": {}, **self._engine.float8}
        float8 = known if recipe else None
        known_of_model = {"layers": self._engine.layers, "higher_is_better": self._engine.higher_is_better}
        return fake_facts(units_per_sample=tokens, float8=float8, **known_of_model)

    def lead_in(self) -> None:
        assert self.calls[-1] in ("warm_up", "run_block"), f"lead after {self.calls[-1]}"
        self._enter("lead_in", after="run_block" if self._blocks else "warm_up")
        assert self.spec.protocol.lead_in_seconds
        assert not self._leads, "one block has one lead"
        self._leads = True

    def run_block(self, length: int = 1) -> Block:
        self._enter("run_block", after="warm_up")
        assert self._leads or not self.spec.protocol.lead_in_seconds, "steps lead to each block"
        led, self._leads = int(self._leads), False
        index, step = len(self._blocks), step_seconds(self.spec) / self._engine.gain(self.spec)
        num_steps = length * max(1, round(self.spec.protocol.block_seconds / step))
        noise = 1 + (37 * index % 11 - 5) / 1000
        fault = self._fault()
        broken = fault is not None and fault.kind in ("nan", "inf") and index >= fault.block
        dynamic = self.spec.loss_scale.startswith("dynamic")
        block = Block(
            seconds=num_steps * step * noise,
            num_steps=num_steps,
            lead_in_steps=led,
            loss=float(fault.kind) if fault is not None and broken else 2.3 * 0.9**index,
            loss_scale=65536.0 if dynamic else None,
            skipped_steps=int(dynamic and index == 0),
        )
        self._blocks.append(block)
        return block

    def run_stretch(self, lead_in_seconds: float, num_blocks: int, block_seconds: float) -> tuple[Block, ...]:
        self._enter("run_stretch", after="warm_up")
        step = step_seconds(self.spec) / self._engine.gain(self.spec)
        num_steps, lead_in_steps = max(1, round(block_seconds / step)), round(lead_in_seconds / step)
        self._blocks += [
            Block(
                seconds=num_steps * step * (1 + (37 * index % 11 - 5) / 1000),
                num_steps=num_steps,
                lead_in_steps=0 if index else lead_in_steps,
                in_stretch=True,
                loss=2.3,
            )
            for index in range(num_blocks)
        ]
        return tuple(self._blocks)

    def run_sustained(self, seconds: float) -> Block:
        assert seconds > 0
        self._enter("run_sustained", after="run_block")
        step = step_seconds(self.spec)
        num_steps = max(1, round(seconds / step))
        return Block(seconds=num_steps * step, num_steps=num_steps, loss=1.0)

    def resume(self) -> Resumed:
        self._enter("resume", after="set_up")
        self._epochs += self._engine.checkpoints.get(self.spec.key, [])
        facts = fake_facts(units_per_sample=35 if "-lm" in self.spec.workload else 1)
        return Resumed(facts=facts, epochs=tuple(self._epochs))

    def run_epoch(self, on_progress: OnProgress | None = None) -> Epoch:
        self._enter("run_epoch", after="resume")
        if self._line_bytes() > (self._engine.environment.gpu_memory_bytes or 2**63):
            raise TrialFailedError("oom", "CUDA out of memory. Tried to allocate 1.00 GiB (fake)", log="(fake)")
        if on_progress is not None:
            on_progress(0.5)
        number, fault = len(self._epochs), self._fault()
        broken = fault is not None and fault.kind == "nan" and number >= fault.block
        gain = self._engine.gain(self.spec)
        load_seconds = self._engine.load_seconds * _LOADING.get((self.spec.techniques or ("",))[0], 1.0)
        learns = self._engine.learns(self.spec)
        epoch = fake_epoch(self.spec, number, broken=broken, load_seconds=load_seconds, gain=gain, learns=learns)
        self._epochs.append(epoch)
        if len(self._epochs) < recipe_of(self.spec).num_epochs:
            self._engine.checkpoints[self.spec.key] = list(self._epochs)
        return epoch

    def finish(self, weights: Path | None = None) -> tuple[RankSamples, ...]:
        timed = "run_stretch" if "run_stretch" in self.calls else "run_block"
        self._enter("finish", after="run_epoch" if self._epochs else timed)
        self.weights = weights
        if weights is not None and not self._engine.disk_is_full:
            weights.parent.mkdir(parents=True, exist_ok=True)
            weights.write_bytes(b"state")
        self._engine.checkpoints.pop(self.spec.key, None)
        return (self._samples(),) * self.num_processes

    def _samples(self) -> RankSamples:
        on_cpu = self.spec.device == "cpu"
        if self._epochs:
            reserved = self._line_bytes()
            return RankSamples(
                epochs=tuple(self._epochs),
                peak_allocated_bytes=reserved - 2**21,
                peak_reserved_bytes=None if on_cpu else reserved,
                driver_used_bytes=None if on_cpu else reserved + CONTEXT_BYTES,
            )
        if self.spec.protocol.memory_parts:
            return self._of_fit()
        of_loop = self._engine.holds(self.spec)
        of_batch = 2**23 * self.spec.batch_size * memory_of(self.spec.precision) * of_loop
        peak = self._engine.fixed_bytes + round(of_batch)
        reserved = None if on_cpu else peak + 2**21
        return RankSamples(
            blocks=tuple(self._blocks),
            peak_allocated_bytes=peak,
            peak_reserved_bytes=reserved,
            flops=self._engine.flops,
        )

    def _insist_on_memory(self) -> None:
        needed, room = round(self._line_bytes() / self._engine.usable), self._room()
        if needed > room:
            shortfall = Shortfall(needed_bytes=needed, free_bytes=room)
            raise TrialFailedError("oom", "CUDA out of memory. Tried to allocate 1.00 GiB (fake)", shortfall=shortfall)

    def _room(self) -> int:
        limit, whole = self.spec.memory_limit_bytes, self._engine.environment.gpu_memory_bytes
        rooms = [limit, None if whole is None or self.spec.device == "cpu" else whole - CONTEXT_BYTES]
        return min((room for room in rooms if room is not None), default=2**63)

    def _line_bytes(self) -> int:
        of_sample = SAMPLE_BYTES.get(self.spec.workload, OTHER_SAMPLE_BYTES)
        return FIXED_BYTES + round(of_sample * self.spec.batch_size * memory_of(self.spec.precision))

    def _of_fit(self) -> RankSamples:
        """Return samples whose memory is a line over the batch, which fragmentation keeps from using all of it."""
        line, on_cpu = self._line_bytes(), self.spec.device == "cpu"
        parts = MemoryParts(
            weights_bytes=FIXED_BYTES // 4,
            optimizer_bytes=FIXED_BYTES // 4,
            saved_bytes=line - FIXED_BYTES,
            workspace_bytes=None if on_cpu else FIXED_BYTES // 2,
            outside_bytes=None if on_cpu else CONTEXT_BYTES,
        )
        return RankSamples(
            blocks=tuple(self._blocks),
            peak_allocated_bytes=line,
            peak_reserved_bytes=None if on_cpu else min(round(1.2 * line), self._room()),
            memory_parts=parts,
        )

    def profile(self, num_steps: int, trace: Path | None = None) -> StepProfile:
        self._enter("profile", after="finish")
        assert num_steps == self.spec.protocol.profile_steps > 0
        self.trace = trace
        return self._engine.profiles.get(self.spec.precision, fake_profile(num_steps))

    trace: Path | None = None  # where the profile's trace was to be written

    def close(self) -> None:
        self.closed = True

    @property
    def spec(self) -> TrialSpec:
        assert self._spec is not None
        return self._spec

    def _fault(self) -> Fault | None:
        faults = self._engine.faults
        keys = [f"#{self._engine.sessions.index(self) + 1}"]
        keys += [] if self._spec is None else [self._spec.key, self._spec.precision, *self._spec.techniques]
        return next((faults[key] for key in keys if key in faults), None)

    @property
    def _done(self) -> int:
        """Return the blocks or epochs done."""
        return len(self._blocks) + len(self._epochs)

    def _enter(self, phase: str, after: str) -> None:
        assert not self.closed, f"{phase} after close"
        before = next((call for call in reversed(self.calls) if call not in ("lead_in", "run_sustained")), "")
        assert before in (after, phase if phase in _REPEATED else after), f"{phase} after {before or 'nothing'}"
        self.calls.append(phase)
        fault = self._fault()
        if fault is None or fault.strikes_in != phase or (phase in _REPEATED and fault.block != self._done):
            return
        if fault.kind == "interrupt":
            raise KeyboardInterrupt
        if fault.kind == "hang":
            self._engine.on_hang()
            time.sleep(3600)
        if fault.kind in _FAILURES:
            status, message, _ = _FAILURES[fault.kind]
            raise TrialFailedError(status, message, log="Traceback (fake)\n", refused=fault.kind == "refused")


def step_seconds(spec: TrialSpec) -> float:
    """Return the made-up time of one step; a fifth longer on two GPUs than on one, and so on."""
    return (0.001 + 0.0001 * spec.batch_size) * step_time_of(spec.precision) * (0.8 + 0.2 * spec.world_size)


def recipe_of(spec: TrialSpec) -> Recipe:
    """Return the recipe of a training trial."""
    assert spec.recipe is not None
    return spec.recipe


def fake_epoch(
    spec: TrialSpec,
    number: int = 0,
    *,
    broken: bool = False,
    load_seconds: float = 0.0,
    gain: float = 1.0,
    learns: float = 0.0,
) -> Epoch:
    """Return an epoch of a made-up training trial after `number` others; it counts what a real one counts."""
    recipe, step, batch_size = recipe_of(spec), step_seconds(spec) / gain, spec.process_batch_size
    whole = max(1, (recipe.samples_per_epoch or DATA_SET_SAMPLES) // batch_size)
    steps = min(whole, recipe.max_steps or whole)
    wait = 0.01 * step + max(0.0, load_seconds * batch_size - step)
    first = step + FIRST_STEP_SECONDS if number == 0 else None
    seconds = steps * (step + wait) + (FIRST_STEP_SECONDS if first else 0.0)
    skipped = min(recipe.skip_batches, steps)
    before_counted = skipped * (step + wait) + (FIRST_STEP_SECONDS if first and skipped else 0.0)
    is_last = number + 1 == recipe.num_epochs
    judged = (recipe.validate_each_epoch or (recipe.validate_at_end and is_last)) and not broken
    return Epoch(
        seconds=seconds,
        data_seconds=steps * wait,
        placing_seconds=0.0,
        first_step_seconds=first,
        validation_seconds=0.2 * steps * step if judged and recipe.validate_each_epoch else 0.0,
        num_steps=steps,
        num_samples=steps * batch_size,
        counted_seconds=seconds - (before_counted if skipped < steps else 0.0),
        counted_samples=(steps - skipped) * batch_size,
        losses=((steps - 1, math.nan if broken else 2.3 * 0.5**number),),
        learning_rate=0.1,
        accuracy=1 - 0.5 * 0.9**number + learns if judged and "-lm" not in spec.workload else None,
        validation_loss=5.0 * 0.9**number - learns if judged else None,
        shortened=steps < whole,
        diverged="the loss was nan (fake)" if broken else None,
    )


def fake_profile(num_steps: int = 3, **changes: object) -> StepProfile:
    """Return a made-up profile: half of a step is products on Tensor Cores, a tenth is idle."""
    fields: dict[str, object] = {
        "device_type": "cuda",
        "num_steps": num_steps,
        "seconds": 0.1,
        "busy_seconds": 0.09,
        "idle_seconds": 0.01,
        "num_kernels": 3.0,
        "class_seconds": {"tensor_core_product": 0.05, "normalisation": 0.03, "elementwise": 0.01},
        "format_seconds": {"bf16": 0.05},
        "module_seconds": {
            "layer1": {"forward_seconds": 0.03, "backward_seconds": 0.05},
            "": {"forward_seconds": 0.01},
        },
        "kernels": [
            {"name": "fake_gemm", "kind": "tensor_core_product", "format": "bf16", "launches": 1, "seconds": 0.05}
        ],
    }
    return StepProfile.model_validate(fields | changes)


def announce_on(descriptor: int) -> Callable[[], object]:
    """Return a function that writes to a pipe, so that another process knows that a trial hangs now."""
    return lambda: os.write(descriptor, b"!")


def machine_with(engine: FakeEngine) -> FindMachine:
    """Return what finds the machine that an engine stands for."""
    return partial(detect_machine, make_engine=lambda *_: engine)
