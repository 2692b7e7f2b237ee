"""A few steps under torch's profiler: what the device does in a step, and for which part of the model."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch
from torch import nn
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, record_function
from torch.utils.hooks import RemovableHandle

from castwise.records.schema import Communication, RankStep, StepProfile
from castwise.registry.kernel_classes import Classified, classify_kernel, classify_operator, classify_ptx
from castwise.registry.techniques import hiding_operators
from castwise.spec.trial import TrialSpec
from castwise.spec.types import DETERMINISTIC, NO_CACHE, PROFILER, WITHOUT_CUDNN
from castwise.trial.distributed import Peers
from castwise.trial.trace_summary import (
    MODULE_RANGE,
    UNUSED_RANGE,
    DeviceEvent,
    HostEvent,
    measure_idle,
    summarize_communication,
    summarize_kernels,
    summarize_operators,
)

# A profile of more events has fewer steps, and in the end only the first kernels of one step: reading an event takes
# some microseconds, and a kilobyte of memory. Source: chosen here.
_MOST_EVENTS = 300_000
# Of more operators, whose shapes take longest to read, fewer steps are recorded. Source: chosen here; 100,000 take 4 s
# on a busy core of a Xeon.
_MANY_EVENTS = 100_000
_EVENTS_A_KERNEL = 5  # the operators that call each other until one launches it, and ranges
_LEVELS = 2  # of modules within modules, lists of modules not counted
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# What the profiler itself does, which older versions of torch do not mark.
_OVERHEAD = ("Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource", "Command Buffer Full")
_SLOW_VARIABLES = ("CUDA_LAUNCH_BLOCKING=1", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "TORCH_DISTRIBUTED_DEBUG=DETAIL")
# Methods of a tensor that wait until the device has computed it.
_WAITING = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")

RunSteps = Callable[[int, AbstractContextManager[Any]], int]


class ProfiledStep(Protocol):
    """What takes the steps: castwise's own loop, or a script's hooks."""

    @property
    def model(self) -> nn.Module: ...

    def within_ranges(self) -> AbstractContextManager[object]:
        """Return a context in which the parts of a step run within ranges of the profiler."""


class _Record(NamedTuple):
    """What the profiler recorded of some steps."""

    num_steps: int
    host: list[HostEvent]
    device: list[DeviceEvent]
    calls: list[HostEvent]  # of the device's driver and runtime, each with the operator that made it; 0 for none
    missing: list[str]


def profile_step(
    spec: TrialSpec, step: ProfiledStep, run: RunSteps, num_steps: int, trace: Path | None, peers: Peers
) -> StepProfile:
    """Profile steps, and return what one takes and for what; write a trace for Perfetto if a path is given.

    `run` runs at least so many steps within a context, waits there until they are done, and returns their number.
    There are fewer than `num_steps` if those have more events than can be read; all ranks profile the same number.
    """
    hidden = hiding_operators(spec.techniques)
    missing = [f"modules are not told apart in a step with {hidden[0]}"] if hidden else []
    device, times, settings = torch.device(spec.device), dict[str, Any](), dict.fromkeys(_read_settings())
    settings |= {PROFILER: None} if _profiler_enabled() else {}
    on_cpu = device.type == "cpu"
    if device.type not in ("cpu", "cuda"):
        return StepProfile(device_type="cuda", missing=f"castwise does not read torch's profiler on {device.type}")
    activities = [ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA]
    found = _record(run, activities, 1, device)  # the first record of a GPU loads CUPTI
    num_events = (len(found.host) + _EVENTS_A_KERNEL * len(found.device)) / found.num_steps
    num_steps = max(1, min(num_steps, int(_MOST_EVENTS / max(1, num_events))))
    num_read = max(1, min(num_steps, int(_MANY_EVENTS / max(1, num_events))))
    num_steps, num_read = peers.broadcast_object((num_steps, num_read))
    if not on_cpu:
        # The device by itself: recording operators slows the host, which makes gaps.
        found = _record(run, activities, num_steps, device)
        if not peers.broadcast_object(bool(found.device)):
            why = "torch's profiler saw no kernel: it may lack the permission, or another profiler is attached"
            return StepProfile(device_type="cuda", missing=why)
        times, before = measure_idle(found.device, found.num_steps), _num_allocations(device)
        times["wait_seconds"] = _measure_waits(run, num_steps)
        times["allocates"] = _num_allocations(device) - before >= num_steps
        alone = found.device, found.num_steps
        activities.append(ProfilerActivity.CPU)
    try:
        with _annotated(step, settings, has_modules=not hidden):
            found = _record(run, activities, num_read, device, trace)
    except (RuntimeError, TypeError, AttributeError) as error:
        missing.append(f"no operators, shapes and modules: {str(error).partition(chr(10))[0]}")
    if on_cpu:
        profile = summarize_operators(found.host, found.num_steps)
        operators = [DeviceEvent(event.name, event.start, event.end) for event in found.host]
        alone, classify = (operators, found.num_steps), lambda name: Classified(classify_operator(name) or "other")
    else:
        profile = summarize_kernels(found.host, found.device, found.num_steps, _classify, found.calls)
        classify = _classify
    communication = summarize_communication(found.host, found.num_steps, *alone, classify)
    each = peers.gather_objects(rank_step(communication, device))
    if communication is not None:
        update = {"threads_per_rank": torch.get_num_threads(), **_largest_weight(step.model)}
        if len(each) > 1:
            update |= {"rank_seconds": tuple(own[0] for own in each), "rank_steps": tuple(own[1] for own in each)}
        communication = communication.model_copy(update=update)
    times["communication"] = communication
    said = {"settings": tuple(settings), "missing": "; ".join([*missing, *found.missing])}
    return profile.model_copy(update={**times, **said})


def _read_settings() -> list[str]:
    """Return what is on of the settings that slow steps, and that are often left on by mistake."""
    found = {
        "torch.autograd.set_detect_anomaly(True)": torch.is_anomaly_enabled(),
        DETERMINISTIC: torch.are_deterministic_algorithms_enabled(),
        WITHOUT_CUDNN: not torch.backends.cudnn.enabled,
        NO_CACHE: not torch.is_autocast_cache_enabled(),
    }
    variables = [each for each in _SLOW_VARIABLES if os.environ.get(each.partition("=")[0]) == each.partition("=")[2]]
    return [*variables, *(name for name, is_on in found.items() if is_on)]


def _record(
    run: RunSteps, activities: list[ProfilerActivity], num_steps: int, device: torch.device, trace: Path | None = None
) -> _Record:
    """Run steps under the profiler, and return its first events as plain data."""
    profiler = torch.profiler.profile(activities=activities, record_shapes=ProfilerActivity.CPU in activities)
    num_steps = run(num_steps, profiler)
    events = sorted(_events(profiler), key=lambda event: int(event.start_ns()))
    found = _Record(num_steps, host=[], device=[], calls=[], missing=[])
    if len(events) > _MOST_EVENTS:
        found.missing.append(f"{len(events) - _MOST_EVENTS:,} events of the profiler were not counted")
    for event in events[:_MOST_EVENTS]:
        kind = getattr(event, "activity_type", str)()  # "" in older versions of torch
        is_range = event.is_user_annotation() or kind.endswith("user_annotation")
        name, start, end, linked = event.name(), event.start_ns(), event.end_ns(), event.linked_correlation_id()
        if event.device_type() != DeviceType.CPU:
            if event.device_index() == (device.index or 0) and not is_range:
                found.device.append(DeviceEvent(name, start, end, linked))
        elif name in _OVERHEAD:
            continue
        elif linked or kind.startswith("cuda_"):
            found.calls.append(HostEvent(name, start, end, event.start_thread_id(), linked))
        elif (is_range or kind in ("cpu_op", "")) and event.start_thread_id() == event.end_thread_id():
            shapes = (tuple(shape) for shape in event.shapes() if shape and all(isinstance(n, int) for n in shape))
            numbers = event.start_thread_id(), event.correlation_id(), event.sequence_nr(), event.fwd_thread_id()
            found.host.append(HostEvent(name, start, end, *numbers, tuple(shapes), tuple(event.dtypes())))
    if trace is not None:
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            found.missing.append(f"no trace at '{trace}': {error}")
    return found


def _num_allocations(device: torch.device) -> int:
    """Return how often PyTorch's allocator has asked the driver for memory."""
    return int(torch.cuda.memory_stats(device).get("num_device_alloc", 0))


def _measure_waits(run: RunSteps, num_steps: int) -> float:
    """Return the seconds of a step in which the host waits for values from the device.

    The profiler does not run: it slows the host, which then has nothing to wait for.
    """
    waited = 0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            nonlocal waited
            started = time.perf_counter_ns()
            try:
                return method(tensor, *arguments, **options)
            finally:
                waited += time.perf_counter_ns() - started

        return call

    with ExitStack() as stack:
        for name in _WAITING:
            stack.enter_context(patch.object(torch.Tensor, name, timed(getattr(torch.Tensor, name))))
        num_steps = run(num_steps, nullcontext())
    return 1e-9 * waited / num_steps


def rank_step(communication: Communication | None, device: torch.device) -> tuple[float, RankStep]:
    """Return for how long this rank's collectives run in a step, and what else it does."""
    if communication is None:
        return 0.0, RankStep()
    clock = None
    with suppress(Exception):  # of a library that may be missing, or not know the GPU
        clock = 1e6 * torch.cuda.clock_rate(device) if device.type == "cuda" else None
    return communication.seconds, communication.rank_steps[0].model_copy(update={"clock_hertz": clock})


def _largest_weight(model: nn.Module) -> dict[str, Any]:
    """Return the fields of `Communication` about the weight whose gradient is most of what ranks reduce, if any is."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    name, weight = max(trained, key=lambda each: each[1].nbytes, default=("", torch.empty(0)))
    if 2 * weight.nbytes < sum(each.nbytes for _, each in trained) or len(trained) < 2:
        return {}
    layer = type(model.get_submodule(name.rpartition(".")[0])).__name__
    shown = name.removeprefix("module.")  # DistributedDataParallel's
    return {"largest_weight": shown, "largest_weight_layer": layer, "largest_weight_bytes": weight.nbytes}


def communication_of(profiler: torch.profiler.profile, num_steps: int) -> Communication | None:
    """Return what this rank exchanges with others in a step, by a profiler of one device."""
    kernels = (each for each in _events(profiler) if each.device_type() != DeviceType.CPU)
    device = [
        DeviceEvent(each.name(), each.start_ns(), each.end_ns()) for each in kernels if not each.is_user_annotation()
    ]
    return summarize_communication((), num_steps, device, num_steps, _classify)


def _events(profiler: torch.profiler.profile) -> list[Any]:
    results = getattr(profiler.profiler, "kineto_results", None)
    return [] if results is None else results.events()


@contextmanager
def _annotated(step: ProfiledStep, settings: dict[str, None], *, has_modules: bool) -> Iterator[None]:
    """Run the parts of a step, and the modules of its model, within ranges that the profiler records."""

    def note(*_: object) -> None:  # within the regions of autocast and of anomaly detection
        if not torch.compiler.is_compiling():
            settings.update(dict.fromkeys(_read_settings()))

    with ExitStack() as stack:
        stack.enter_context(step.within_ranges())
        if any(isinstance(part, DistributedDataParallel) and _looks(part) for part in step.model.modules()):
            looking = record_function(UNUSED_RANGE)(DistributedDataParallel._post_forward)
            stack.enter_context(patch.object(DistributedDataParallel, "_post_forward", looking))
        for name, module in _outer_modules(step.model) if has_modules else ():
            with suppress(RuntimeError):  # a module of TorchScript takes no hooks
                stack.callback(module.register_forward_pre_hook(note).remove)
                hooks = module.register_forward_pre_hook, module.register_forward_hook
                for handle in mark(f"{MODULE_RANGE}{name}", *hooks):
                    stack.callback(handle.remove)
        yield


def _looks(wrapper: DistributedDataParallel) -> bool:
    return bool(wrapper.find_unused_parameters) and not wrapper.static_graph


def _outer_modules(model: nn.Module, prefix: str = "", level: int = 1) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_children():
        is_container = isinstance(module, _CONTAINERS)
        if not is_container:
            yield f"{prefix}{name}", module
        if is_container or level < _LEVELS:
            yield from _outer_modules(module, f"{prefix}{name}.", level + (not is_container))


def mark(
    name: str, register_before: Callable[..., RemovableHandle], register_after: Callable[..., RemovableHandle]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Let what takes hooks run within a range of the profiler; return the hooks."""
    ranges: list[Any] = []

    def enter(*_: object) -> None:
        ranges.append(record_function(name))
        ranges[-1].__enter__()

    def leave(*_: object) -> None:
        if ranges:
            ranges.pop().__exit__(None, None, None)

    return register_before(enter), register_after(leave)


def _classify(name: str) -> Classified:
    """Return a kernel's class by its name, and by its PTX if it is Triton's and that can be found."""
    by_name = classify_kernel(name)
    if by_name.kind not in ("unknown_product", "attention", "other") or not name.isidentifier():
        return by_name
    found = {classify_ptx(name, ptx) for ptx in _find_ptx(name)}
    return found.pop() if len(found) == 1 else by_name  # kernels of one name that differ: it is not known which ran


@cache
def _find_ptx(name: str) -> tuple[str, ...]:
    """Return the PTX of all Triton kernels of this name in the caches of Triton and of Inductor."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes a while to import

    roots = [Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")]
    roots += (Path(cache_dir()) / "triton").glob("*")
    paths = [path for root in dict.fromkeys(roots) for path in root.glob(f"*/{name}.ptx")]
    return tuple(path.read_text(encoding="utf-8", errors="replace") for path in paths)
