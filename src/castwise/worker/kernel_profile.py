"""A few steps under torch's profiler: what the device does in a step, and for which part of the model."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from castwise.records.schema import StepProfile
from castwise.registry.kernel_classes import Classified, classify_kernel, classify_ptx
from castwise.registry.techniques import rows_of
from castwise.spec.trial import TrialSpec
from castwise.worker.distributed import Peers
from castwise.worker.step import TrainingStep
from castwise.worker.trace_summary import (
    MODULE_RANGE,
    SCALING_RANGE,
    UPDATE_RANGE,
    DeviceEvent,
    HostEvent,
    measure_idle,
    summarize_kernels,
    summarize_operators,
)

# A profile of more events has fewer steps, and in the end only the first kernels of one step: reading an event takes
# some microseconds, and a kilobyte of memory. Source: chosen here.
_MOST_EVENTS = 300_000
_EVENTS_A_KERNEL = 5  # the operators that call each other until one launches it, and ranges
_LEVELS = 2  # of modules within modules, lists of modules not counted
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)

RunSteps = Callable[[int], int]


def profile_step(
    spec: TrialSpec, step: TrainingStep, run: RunSteps, num_steps: int, trace: Path | None, peers: Peers
) -> StepProfile:
    """Profile steps, and return what one takes and for what; write a trace for Perfetto if a path is given.

    Args:
        spec: What the steps are of.
        step: One of them.
        run: Runs at least so many steps, waits until they are done, and returns how many there were.
        num_steps: How many to profile, unless that gives more events than can be read.
        trace: The file for the trace.
        peers: All ranks profile the same number of steps.
    """
    # The operators of a step that is compiled or captured are not called one by one.
    hidden = [row.name for row in rows_of(spec.techniques) if row.compile_cost or "cuda_graph" in row.settings]
    missing = [f"modules are not told apart in a step with {hidden[0]}"] if hidden else []
    device = torch.device(spec.device)
    if device.type == "cpu":
        run_all = _Recording(run, [ProfilerActivity.CPU], device)
        first = run_all.record(1)
        host, lost = run_all.host_events(first)
        num_steps = peers.broadcast_object(_fitting(num_steps, (len(host) + lost) / run_all.num_steps))
        with _annotated(step, has_modules=not hidden):
            detailed = run_all.record(num_steps)
        host, lost = run_all.host_events(detailed)
        profile = summarize_operators(host, run_all.num_steps)
        missing += _lost(lost, "operators")
        missing += _export(detailed, trace)
        return profile.model_copy(update={"missing": "; ".join(missing)})

    # The device by itself: recording operators slows the host, which makes gaps. The first record loads CUPTI.
    alone = _Recording(run, [ProfilerActivity.CUDA], device)
    kernels, lost = alone.device_events(alone.record(1))
    num_kernels = (len(kernels) + lost) / alone.num_steps
    num_steps = peers.broadcast_object(_fitting(num_steps, _EVENTS_A_KERNEL * num_kernels))
    kernels, lost = alone.device_events(alone.record(num_steps))
    if not peers.broadcast_object(bool(kernels)):
        why = "torch's profiler saw no kernel: it may lack the permission, or another profiler is attached"
        return StepProfile(device_type="cuda", missing=why)
    times = measure_idle(kernels, alone.num_steps)
    missing += _lost(lost, "kernels")
    both = _Recording(run, [ProfilerActivity.CPU, ProfilerActivity.CUDA], device)
    host, trace_missing = list[HostEvent](), list[str]()
    try:
        with _annotated(step, has_modules=not hidden):
            detailed = both.record(num_steps)
        host, host_lost = both.host_events(detailed)
        kernels, _ = both.device_events(detailed)
        trace_missing = [*_lost(host_lost, "operators"), *_export(detailed, trace)]
    except (RuntimeError, TypeError, AttributeError) as error:
        missing.append(f"no operators, shapes and modules: {str(error).partition(chr(10))[0]}")
    profile = summarize_kernels(host, kernels, both.num_steps or alone.num_steps, _classify)
    return profile.model_copy(update={**times, "missing": "; ".join([*missing, *trace_missing])})


def _fitting(num_steps: int, events_a_step: float) -> int:
    return max(1, min(num_steps, int(_MOST_EVENTS / max(1, events_a_step))))


def _lost(count: int, what: str) -> list[str]:
    return [f"{count:,} more {what} were recorded than are counted"] if count else []


class _Recording:
    """Steps under torch's profiler, and its events as plain data."""

    def __init__(self, run: RunSteps, activities: Sequence[ProfilerActivity], device: torch.device) -> None:
        self._run, self._activities, self._device = run, activities, device
        self.num_steps = 0  # of the last record

    def record(self, num_steps: int) -> torch.profiler.profile:
        """Run steps under the profiler."""
        has_host = ProfilerActivity.CPU in self._activities
        profiler = torch.profiler.profile(activities=self._activities, record_shapes=has_host)
        with profiler:
            self.num_steps = self._run(num_steps)
        return profiler

    def device_events(self, profiler: torch.profiler.profile) -> tuple[list[DeviceEvent], int]:
        """Return the device's first events, and how many more there are."""
        index = self._device.index or 0
        found = [
            event
            for event in _events(profiler)
            if event.device_type() != DeviceType.CPU and event.device_index() == index and _activity(event) != "range"
        ]
        found.sort(key=lambda event: int(event.start_ns()))
        kept = [
            DeviceEvent(event.name(), event.start_ns(), event.end_ns(), event.linked_correlation_id())
            for event in found[:_MOST_EVENTS]
        ]
        return kept, len(found) - len(kept)

    def host_events(self, profiler: torch.profiler.profile) -> tuple[list[HostEvent], int]:
        """Return the first operators and ranges on the host, and how many more there are."""
        found = [
            event
            for event in _events(profiler)
            if event.device_type() == DeviceType.CPU
            and _activity(event) in ("operator", "range")
            and event.start_thread_id() == event.end_thread_id()
        ]
        kept = [
            HostEvent(
                name=event.name(),
                start=event.start_ns(),
                end=event.end_ns(),
                thread=event.start_thread_id(),
                id=event.correlation_id(),
                sequence=event.sequence_nr(),
                forward_thread=event.fwd_thread_id(),
                shapes=tuple(
                    tuple(shape) for shape in event.shapes() if shape and all(isinstance(each, int) for each in shape)
                ),
            )
            for event in found[:_MOST_EVENTS]
        ]
        return kept, len(found) - len(kept)


def _events(profiler: torch.profiler.profile) -> list[Any]:
    results = getattr(profiler.profiler, "kineto_results", None)
    return [] if results is None else results.events()


def _activity(event: Any) -> str:
    """Return "operator", "range" or what else the profiler calls an event."""
    if event.is_user_annotation():
        return "range"
    if not hasattr(event, "activity_type"):  # older versions of torch: calls of the driver are linked to operators
        return "operator" if event.linked_correlation_id() == 0 else "other"
    kind = str(event.activity_type())
    return {"cpu_op": "operator", "user_annotation": "range", "gpu_user_annotation": "range"}.get(kind, kind)


@contextmanager
def _annotated(step: TrainingStep, *, has_modules: bool) -> Iterator[None]:
    """Run the parts of a step, and the modules of its model, within ranges that the profiler records."""
    with ExitStack() as stack:
        stack.enter_context(
            step.within_ranges(lambda: record_function(UPDATE_RANGE), lambda: record_function(SCALING_RANGE))
        )
        for name, module in _outer_modules(step.model) if has_modules else ():
            _mark_module(name, module, stack)
        yield


def _outer_modules(model: nn.Module, prefix: str = "", level: int = 1) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_children():
        is_container = isinstance(module, _CONTAINERS)
        if not is_container:
            yield f"{prefix}{name}", module
        if is_container or level < _LEVELS:
            yield from _outer_modules(module, f"{prefix}{name}.", level + (not is_container))


def _mark_module(name: str, module: nn.Module, stack: ExitStack) -> None:
    """Let a module's forward pass run within a range; one that takes no hooks is left as it is."""
    ranges: list[Any] = []

    def enter(*_: object) -> None:
        ranges.append(record_function(f"{MODULE_RANGE}{name}"))
        ranges[-1].__enter__()

    def leave(*_: object) -> None:
        if ranges:
            ranges.pop().__exit__(None, None, None)

    try:
        handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    except RuntimeError:  # a module of TorchScript
        return
    for handle in handles:
        stack.callback(handle.remove)


def _export(profiler: torch.profiler.profile, trace: Path | None) -> list[str]:
    """Write the trace if it is wanted; return why it could not be written."""
    if trace is None:
        return []
    try:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    except (OSError, RuntimeError) as error:
        return [f"no trace at '{trace}': {error}"]
    return []


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
    roots = [Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")]
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        roots += [folder for folder in (Path(cache_dir()) / "triton").glob("*") if folder.is_dir()]
    except ImportError:  # a version of torch that keeps them elsewhere
        pass
    texts = []
    for path in (found for root in dict.fromkeys(roots) for found in root.glob(f"*/{name}.ptx")):
        try:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
    return tuple(texts)
