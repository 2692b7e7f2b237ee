"""From a profiler's events to what a step spends its time on. Plain data: no profiler, no torch."""

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

from castwise.records.schema import (
    AttentionTime,
    Collectives,
    Communication,
    KernelTime,
    ModuleTime,
    ProductTime,
    RankStep,
    StepProfile,
)
from castwise.registry.kernel_classes import (
    OWN_NAMESPACES,
    PRODUCTS,
    Classified,
    Format,
    KernelClass,
    classify_operator,
    format_of,
)
from castwise.spec.types import FINDING_UNUSED, IN_PYTHON, STARTING_COLLECTIVES

# Ranges that the profiled step is run in. torch's own name a step of an optimizer.
MODULE_RANGE = "castwise module: "
SCALING_RANGE = "castwise loss scaling"
UPDATE_RANGE = "castwise update"
UNUSED_RANGE = f"castwise {FINDING_UNUSED}"  # by DistributedDataParallel, after forward
CLOSURE_RANGE = "castwise closure"  # forward and backward, which an optimizer's step calls
_RANGES = "castwise "  # what all of these begin with
_OPTIMIZER_RANGE = "Optimizer.step#"
_ZONES: dict[str, KernelClass | None] = {UPDATE_RANGE: "optimizer", SCALING_RANGE: "loss_scaling", CLOSURE_RANGE: None}

_NUM_LARGEST = 10
_LONGEST_NAME = 200
_MOST_SHAPES = 6
_NANO = 1e-9
_OUTRANKING = ("plain_product", "attention", "cast")  # classes of operators that count wherever they are called
_CONVERSIONS = ("aten::to", "aten::_to_copy")  # to another type, device or layout
_HOST_COPY = re.compile(r"^Memcpy (HtoD|DtoH) \((?:Device -> )?(\w+)")
_FUSED_ATTENTION = re.compile(r"^aten::_scaled_dot_product_(flash|efficient|cudnn)_attention(_backward)?$")
_MATH_ATTENTION = "aten::_scaled_dot_product_attention_math"
_BATCHED = ("aten::bmm", "aten::baddbmm")
_LOW = ("c10::Half", "c10::BFloat16", "c10::Float8")
_LOADING = "enumerate(DataLoader)#"  # torch's own range
_SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize")  # events are waited for to limit what runs ahead
_ALLOCATING = re.compile(r"^cuda(Malloc|Free|Host(Alloc|Register))|^cuMem(Create|Map|Unmap|Release)")
_LONG_OPERATOR = 50_000  # nanoseconds: what launches a kernel, or only looks at a tensor, takes less; chosen here
_LONG_GAP = 500_000  # nanoseconds: longer than what Python takes from one operator to the next; chosen here
_IMAGES = re.compile(r"^aten::\w*(conv(?!ert)|batch_norm|_pool\dd)")  # operators whose images may lie in NCHW or NHWC
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # as a part of a module's name
_BACKWARD_NODE = "autograd::engine::evaluate_function"
_AROUND = (_RANGES, _OPTIMIZER_RANGE, _BACKWARD_NODE)  # begins the names of what is no operator
# Names that process groups give to their collectives, and libraries to the kernels of them.
# Sources: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and ProcessGroupGloo.cpp; src/device/generate.py of NCCL.
_COLLECTIVE = re.compile(r"^(nccl|gloo|ucc|xccl|mpi):")
_COLLECTIVES = {
    "reduce-scatter": re.compile("reduce_?scatter", re.IGNORECASE),
    "all-reduce": re.compile("all_?reduce", re.IGNORECASE),
    "all-gather": re.compile("all_?gather", re.IGNORECASE),
    "broadcast": re.compile("broadcast", re.IGNORECASE),
}
_REDUCING = ("reduce-scatter", "all-reduce")
_ITEM_BYTES = {"float": 4, "c10::Half": 2, "c10::BFloat16": 2, "double": 8, "int": 4, "long int": 8}  # others have 1
_FORMATS: dict[str, Format] = {"double": "fp64", "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16"}


class HostEvent(NamedTuple):
    """An operator or a range on the host; times in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int
    id: int = 0  # that device events refer to
    sequence: int = -1  # shared by an operator and its backward node; -1 without one
    forward_thread: int = 0  # of a backward node: the thread of its operator
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()  # of its arguments, as the profiler names them; empty if they are not known


class DeviceEvent(NamedTuple):
    """A kernel, a copy or a fill; times in nanoseconds."""

    name: str
    start: int
    end: int
    launched_by: int = 0  # the id of a host event; 0 if it is not known


@dataclass(slots=True)
class _Context:
    """What surrounds an event of the host."""

    operator: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    format: Format = ""  # of its first float
    module: str = ""
    is_backward: bool = False
    zone: KernelClass | None = None  # of all that is launched here: optimizer, loss scaling
    kind: KernelClass = "other"  # of the innermost operator whose class is known
    attention: "_Attention | None" = None  # of a fused operator
    node: "_Context | None" = None  # the innermost backward node
    is_recomputed: bool = False  # of forward, in backward
    is_loading: bool = False  # in the process that trains


class _Attention(NamedTuple):
    backend: str
    format: Format
    queries: int
    keys: int
    head_size: int


def busy_nanoseconds(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    total = reached = 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _busy(events: Iterable[DeviceEvent]) -> int:
    return busy_nanoseconds((event.start, event.end) for event in events)


def measure_idle(events: Sequence[DeviceEvent], num_steps: int) -> dict[str, Any]:
    """Return a step's time, and the parts of it in which the device was busy and idle, as fields of a profile."""
    if not events:
        return {}
    window = max(event.end for event in events) - min(event.start for event in events)
    busy, scale = _busy(events), _NANO / num_steps
    return {
        "seconds": window * scale,
        "busy_seconds": busy * scale,
        "idle_seconds": (window - busy) * scale,
        "num_kernels": len(events) / num_steps,
        "host_copy_seconds": {name: scale * nanos for name, nanos in _measure_copies(events).items()},
    }


def _measure_copies(events: Sequence[DeviceEvent]) -> dict[str, int]:
    """Return the nanoseconds of copies between host and device in which no kernel runs, by direction and memory.

    The host waits for copies of pageable memory: that no kernel runs until the next one is launched belongs to them.
    """
    copies, others = defaultdict[str, list[tuple[int, int]]](list), list[tuple[int, int]]()
    ordered, reached = sorted(events, key=lambda event: event.start), 0
    for event, following in zip(ordered, [*ordered[1:], *ordered[-1:]], strict=True):
        if (found := _HOST_COPY.match(event.name)) is None:
            others.append((event.start, event.end))
            reached = max(reached, event.end)
        else:
            is_waited_for = found.groups() == ("HtoD", "Pageable") and event.end > reached
            end = max(event.end, following.start) if is_waited_for else event.end
            copies[f"{found[1]} {found[2]}"].append((event.start, end))
    return _outside(others, copies)


def _outside(others: list[tuple[int, int]], found: Mapping[str, list[tuple[int, int]]]) -> dict[str, int]:
    """Return the nanoseconds of each name's intervals that the others leave."""
    busy = busy_nanoseconds(others)
    return {name: busy_nanoseconds([*others, *intervals]) - busy for name, intervals in found.items()}


def summarize_communication(
    host: Sequence[HostEvent],
    num_host_steps: int,
    device: Iterable[DeviceEvent],
    num_steps: int,
    classify: Callable[[str], Classified],
) -> Communication | None:
    """Return what ranks exchange by the host's events, and how long by the device's, which may be of other steps.

    On a CPU operators take their place. None if nothing is exchanged.
    """
    own, others = list[DeviceEvent](), list[DeviceEvent]()
    for event in sorted(device, key=lambda each: each.start):
        if classify(event.name).kind == "communication":
            own.append(event)
        elif not event.name.startswith(_AROUND):
            others.append(event)
    collectives = _collectives(host, num_host_steps) or _collectives(own, num_steps)
    if not collectives:
        return None
    begin = min((each.start for each in (*own, *others)), default=0)
    per_step, rest = divmod(len(own), num_steps)
    if per_step and not rest and num_steps > 1:  # ranks do not begin the first step at the same moment
        begin, num_steps = max(each.end for each in own[:per_step]), num_steps - 1
        own, others = own[per_step:], [each for each in others if each.start >= begin]
    passes, late_share = _reductions(host, num_host_steps)
    alone, hiding, together = map(_busy, (own, others, own + others))
    window = max((each.end for each in (*own, *others)), default=begin) - begin
    return Communication(
        seconds=alone * _NANO / num_steps,
        exposed_seconds=(together - hiding) * _NANO / num_steps,
        collectives=collectives,
        reduced_passes=passes,
        late_share=late_share,
        rank_steps=(
            RankStep(
                compute_seconds=hiding * _NANO / num_steps,
                exposed_seconds=(together - hiding) * _NANO / num_steps,
                idle_seconds=max(0, window - together) * _NANO / num_steps,
            ),
        ),
    )


def _collectives(events: Iterable[HostEvent | DeviceEvent], num_steps: int) -> tuple[Collectives, ...]:
    """Return what kinds of collectives there are, by what process groups begin or, as in a CUDA graph, by kernels."""
    found = defaultdict[tuple[str, Format], list[int]](list)
    for event in events:
        if isinstance(event, DeviceEvent):
            its_format = format_of(event.name) or ("fp32" if "_f32" in event.name else "")
            found[_kind_of_collective(event.name), its_format].append(0)
        elif _COLLECTIVE.search(event.name):
            its_format = _format_of_event(event)
            found[_kind_of_collective(event.name), its_format].append(_bytes_of(event))
    return tuple(
        Collectives(
            kind=kind,
            format=its_format,
            launches=len(each) / num_steps,
            num_bytes=sum(each) / num_steps,
            largest_bytes=max(each),
        )
        for (kind, its_format), each in sorted(found.items(), key=lambda item: (-sum(item[1]), item[0]))
    )


def _kind_of_collective(name: str) -> str:
    return next((kind for kind, pattern in _COLLECTIVES.items() if pattern.search(name)), "other")


def _bytes_of(event: HostEvent) -> int:
    tensors = zip(event.shapes, event.dtypes, strict=False)
    return sum(math.prod(shape) * _ITEM_BYTES.get(dtype, 1) for shape, dtype in tensors)


def _reductions(host: Sequence[HostEvent], num_steps: int) -> tuple[float, float]:
    """Return after how many backward passes of an update gradients are reduced, and what share of them after backward.

    A pass counts if at least half as many bytes are reduced as after any other one.
    """
    reduced, late, is_backward, end, updates = list[int](), 0, False, 0, 0
    for event in sorted(host, key=lambda each: each.start):
        updates += event.name.startswith(_OPTIMIZER_RANGE)
        if event.name.startswith(_BACKWARD_NODE):
            if not is_backward:
                reduced.append(0)
            is_backward, end = True, max(end, event.end)
        elif event.sequence >= 0 and event.start >= end:  # an operator of a forward pass
            is_backward = False
        elif reduced and _COLLECTIVE.search(event.name) and _kind_of_collective(event.name) in _REDUCING:
            reduced[-1] += max(1, _bytes_of(event))
            late += (event.start >= end) * max(1, _bytes_of(event))
    most = max(reduced, default=0)
    if not most:
        return 0.0, 0.0
    passes = sum(2 * each >= most for each in reduced) / max(num_steps, updates)
    return passes, late / sum(reduced)


def summarize_kernels(
    host: Sequence[HostEvent],
    device: Iterable[DeviceEvent],
    num_steps: int,
    classify: Callable[[str], Classified],
    calls: Sequence[HostEvent] = (),
) -> StepProfile:
    """Return what kernels of the device took, by class, format, module and kernel; without busy and idle time.

    `calls` are those of the device's driver and runtime, with the number of the host event around each.
    """
    device, nested = list(device), list(_nested(host))
    contexts = {event.id: context for event, context, _ in nested if event.id}
    if not any(_IMAGES.match(event.name) for event in host):
        for context in contexts.values():
            context.kind = "copy" if context.kind == "layout_conversion" else context.kind
    placed = ((event, contexts.get(event.launched_by) or _Context()) for event in device)
    spent = [
        (event.name, _placed(event.name, classify(event.name), context), context, event.end - event.start)
        for event, context in placed
    ]
    waits = [call.id for call in calls if call.name in _SYNCHRONISING]
    around = Counter(contexts[each].operator if each in contexts else "" for each in waits)
    host_times = _summarize_host(nested, device, calls)
    found = {
        "attention": _summarize_attention(host, spent, num_steps),
        "waits": {operator: times / num_steps for operator, times in around.items()},
        "host_seconds": {name: each * _NANO / num_steps for name, each in host_times.items()},
        "loader_kernels": sum(context.is_loading for _, _, context, _ in spent) / num_steps,
    }
    return _summarize("cuda", spent, num_steps).model_copy(update=found)


def _summarize_host(
    nested: Sequence[tuple[HostEvent, _Context, int]], device: Sequence[DeviceEvent], calls: Sequence[HostEvent]
) -> dict[str, int]:
    """Return the nanoseconds in which no kernel runs and the host allocates the device's memory or computes, by name.

    What makes no call of the driver's, and takes longer than a launch, computes on the host. So does what runs from
    one operator to the next, if it takes long: Python, or a library that it calls.
    """
    launching, found = {event.launched_by for event in device}, defaultdict[str, list[tuple[int, int]]](list)
    threads = {event.thread for event, _, _ in nested if event.id in launching}  # the others prepare batches
    launching.update(call.id for call in calls)
    called = sorted((event.thread, event.start) for event, _, _ in nested if event.id in launching)
    for event, context, own in nested:
        if work := _work_for_ranks(event.name):
            found[work].append((event.start, event.end))
        is_operator = "::" in event.name and not event.name.startswith(_BACKWARD_NODE) and not context.is_loading
        if own >= _LONG_OPERATOR and is_operator and event.thread in threads:
            first, after = (bisect_left(called, (event.thread, time)) for time in (event.start, event.end))
            if first == after:
                found[f"{event.name} on the CPU"].append((event.start, event.end))
    if gaps := _long_gaps(nested, calls, threads):
        found[IN_PYTHON] = gaps
    for call in calls:
        if _ALLOCATING.match(call.name):
            found[call.name].append((call.start, call.end))
    return _outside([(event.start, event.end) for event in device], found)


def _work_for_ranks(name: str) -> str:
    if name == UNUSED_RANGE:
        return FINDING_UNUSED
    # Where nothing else is in the way, it launches a kernel.
    return STARTING_COLLECTIVES if name.startswith("c10d::") else ""


def _long_gaps(
    nested: Sequence[tuple[HostEvent, _Context, int]], calls: Sequence[HostEvent], threads: set[int]
) -> list[tuple[int, int]]:
    """Return the long times in which some threads are in no operator, call or loader."""
    seen = [event for event, context, _ in nested if "::" in event.name or context.is_loading]
    times = sorted((event.start, event.end) for event in (*seen, *calls) if event.thread in threads)
    spans = accumulate(times, lambda last, each: (each[0], max(last[1], each[1])))
    return [(end, start) for (_, end), (start, _) in pairwise(spans) if start - end >= _LONG_GAP]


def summarize_operators(host: Sequence[HostEvent], num_steps: int) -> StepProfile:
    """Return what operators of a CPU took, each without those that it called."""
    nested = [each for each in _nested(host) if not each[0].name.startswith(_RANGES)]
    spent = ((context.operator, Classified(context.zone or context.kind), context, own) for _, context, own in nested)
    profile = _summarize("cpu", spent, num_steps)
    times = measure_idle([DeviceEvent(event.name, event.start, event.end) for event, _, _ in nested], num_steps)
    return profile.model_copy(update=times | {"idle_seconds": None})


def _placed(name: str, found: Classified, context: _Context) -> Classified:
    """Return the class of a kernel by its name and by where it was launched."""
    if context.zone is not None and found.kind != "communication":
        return Classified(context.zone)
    if found.kind == "other" and context.kind != "other":  # a name that is not in the table
        return Classified("unknown_product" if context.kind == "plain_product" else context.kind)
    if found.kind == "elementwise" and "copy_kernel" in name and context.kind in ("cast", "layout_conversion"):
        return Classified(context.kind)
    return found


def _nested(host: Sequence[HostEvent]) -> Iterator[tuple[HostEvent, _Context, int]]:
    """Yield each event with what surrounds it, itself included, and its time without the events within it."""
    threads: dict[int, list[HostEvent]] = defaultdict(list)
    for event in host:
        threads[event.thread].append(event)
    found: list[tuple[HostEvent, _Context, _Context | None, list[int]]] = []
    forward: dict[tuple[int, int], _Context] = {}  # by thread and sequence number: the last operator that began
    for thread, events in threads.items():
        open_events: list[tuple[HostEvent, _Context, list[int]]] = []
        for event in sorted(events, key=lambda each: (each.start, -each.end)):
            while open_events and open_events[-1][0].end <= event.start:
                open_events.pop()
            around = open_events[-1][1] if open_events else None
            if open_events:
                open_events[-1][2][0] -= event.end - event.start
            context, own = _enter(event, around), [event.end - event.start]
            if event.name == "aten::copy_" and _is_cast(event.dtypes):  # which the conversions around it are, too
                for each in (context, *(one for _, one, _ in open_events if one.operator in _CONVERSIONS)):
                    each.kind = "cast"
            if event.sequence >= 0 and not event.forward_thread:
                forward[thread, event.sequence] = context
            open_events.append((event, context, own))
            found.append((event, context, around, own))
    _mark_recomputed(found)
    # Now that all operators are known, backward nodes take their modules, and what is within them follows.
    for event, context, around, own in found:
        if around is not None and around.is_backward:
            context.module, context.is_backward = around.module, True
        if event.forward_thread:
            origin = forward.get((event.forward_thread, event.sequence))
            context.module, context.is_backward = "" if origin is None else origin.module, True
        yield event, context, max(0, own[0])


def _mark_recomputed(found: Sequence[tuple[HostEvent, _Context, _Context | None, list[int]]]) -> None:
    """Mark operators that a backward node calls and that have a backward node of their own, unless gradients have, too.

    With `create_graph` all that backward computes has one.
    """
    called: list[tuple[HostEvent, _Context, _Context]] = []
    computes_gradients = set[int]()  # of the nodes' contexts
    for event, context, around, _ in found:
        context.node = context if event.forward_thread else around and around.node
        if around is not None and around.node is not None and event.name.startswith(_BACKWARD_NODE):
            computes_gradients.add(id(around.node))  # of what it has computed again, by a backward pass of its own
        if around is not None and context.node is around.node is not None and around.operator == around.node.operator:
            called.append((event, context, around.node))
            if event.sequence < 0 and event.shapes:
                computes_gradients.add(id(around.node))
    for event, context, node in called:
        context.is_recomputed = event.sequence >= 0 and id(node) in computes_gradients
    for event, context, around, _ in found:
        context.is_recomputed |= around is not None and around.is_recomputed and not event.forward_thread


def _is_cast(dtypes: tuple[str, ...]) -> bool:
    """Return whether a copy changes the type, from or to a float of 16 bits or fewer."""
    return dtypes[:1] != dtypes[1:2] and any(each.startswith(_LOW) for each in dtypes[:2])


def _enter(event: HostEvent, around: _Context | None) -> _Context:
    before = around or _Context()
    kind = classify_operator(event.name)
    if kind == "cast" and event.dtypes:
        kind = "copy"  # until a copy within it shows that it is a cast
    # What a product calls (copies, fills) is part of it, but autocast's casts; within a cast a copy is one.
    is_inside = before.kind in ("plain_product", "attention", "normalisation", "cast", "layout_conversion")
    is_module, is_named = event.name.startswith(MODULE_RANGE), not event.name.startswith(_RANGES)
    is_update = event.name.startswith(_OPTIMIZER_RANGE)
    return _Context(
        operator=event.name if is_named else before.operator,
        shapes=(event.shapes or before.shapes) if is_named else before.shapes,
        format=_format_of_event(event) or before.format,
        module=event.name.removeprefix(MODULE_RANGE) if is_module else before.module,
        is_backward=before.is_backward,
        zone="optimizer" if is_update else _ZONES.get(event.name, before.zone),
        kind=before.kind if kind is None or (is_inside and kind not in _OUTRANKING) else kind,
        attention=_fused_attention(event) or before.attention,
        is_loading=before.is_loading or event.name.startswith(_LOADING),
    )


def _fused_attention(event: HostEvent) -> _Attention | None:
    name = _FUSED_ATTENTION.match(event.name)
    if name is None or len(event.shapes) < 3:
        return None
    query, key = event.shapes[1:3] if name[2] else event.shapes[:2]
    return _Attention(name[1], _format_of_event(event), query[-2], key[-2], query[-1])


def _find_scores(
    host: Sequence[HostEvent], products: Sequence[HostEvent]
) -> Callable[[str, Sequence[tuple[int, ...]]], _Attention | None]:
    """Return what finds the attention whose scores, or their transpose, an operator reads or writes.

    Scores are what a batched product writes and a softmax reads.
    """
    softmaxed = {_size(event.shapes[0]) for event in host if event.name == "aten::_softmax" and event.shapes}
    written = "math" if any(event.name == _MATH_ATTENTION for event in host) else "written"
    scores: dict[tuple[int, int, int], _Attention] = {}
    for event in products:
        (*_, inner), (*_, keys) = event.shapes[-2:]
        # Linear attention has a softmax of what it multiplies, but no scores.
        if (size := _size(_product_shape(event.shapes))) in softmaxed and inner != keys:
            scores.setdefault(size, _Attention(written, _format_of_event(event), size[1], keys, inner))

    def find(operator: str, shapes: Sequence[tuple[int, ...]]) -> _Attention | None:
        outputs = (_product_shape(shapes),) if operator in _BATCHED and len(shapes) > 1 else ()
        sizes = map(_size, (*shapes, *outputs) if scores else ())
        return next(filter(None, (scores.get((n, a, b)) or scores.get((n, b, a)) for n, a, b in sizes)), None)

    return find


def _summarize_attention(
    host: Sequence[HostEvent], spent: Iterable[tuple[str, Classified, _Context, int]], num_steps: int
) -> tuple[AttentionTime, ...]:
    """Return what attention took, in kernels of its own or written out."""
    products = [event for event in host if event.name in _BATCHED and len(event.shapes) > 1]
    find = _find_scores(host, products)
    flops, masked = Counter[_Attention | None](), set[_Attention]()
    for event in products:
        flops[find(event.name, event.shapes)] += 2 * math.prod(event.shapes[-2]) * event.shapes[-1][-1]
    for event in host:
        if (found := _fused_attention(event)) is not None:
            is_backward = event.name.endswith("_backward")
            # Two products forward, and five backward, one of which computes the scores again.
            flops[found] += (10 if is_backward else 4) * math.prod(event.shapes[is_backward]) * found.keys
            masked |= {found} if len(event.shapes) > 3 and not is_backward else set()
    seconds = defaultdict[_Attention, list[float]](lambda: [0.0, 0.0])
    for _, classified, context, duration in spent:
        if (found := context.attention or find(context.operator, context.shapes)) is not None:
            seconds[found][0] += duration * _NANO / num_steps
            seconds[found][1] += duration * _NANO / num_steps * (classified.kind in PRODUCTS)
    return tuple(
        AttentionTime(
            **each._asdict(),
            is_masked=each in masked,
            seconds=total,
            product_seconds=of_products,
            flops=flops[each] // num_steps,
        )
        for each, (total, of_products) in sorted(seconds.items(), key=lambda item: -item[1][0])
    )


def _product_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return *shapes[-2][:-1], shapes[-1][-1]


def _size(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the values of batches of matrices, and the two sides of one matrix; of less than a batch, zeros."""
    return (math.prod(shape), shape[-2], shape[-1]) if len(shape) > 2 else (0, 0, 0)


def _format_of_event(event: HostEvent) -> Format:
    """Return the format of an operator's first float, "" without one."""
    found = ("fp8" if dtype.startswith("c10::Float8") else _FORMATS.get(dtype, "") for dtype in event.dtypes)
    return next(filter(None, found), "")


def _format_of_product(name: str, found: Classified, context: _Context) -> Format:
    """Return the format of a product by its kernel's name and its operator's types, "" if they do not tell."""
    if found.format:
        return found.format
    if found.kind == "plain_product":  # float32's, unless its name says another one
        return context.format or format_of(name) or "fp32"
    if context.format == "fp32":  # by name it may be either
        return "tf32" if found.kind == "tensor_core_product" else ""
    return context.format


def _summarize(
    device_type: Literal["cuda", "cpu"], spent: Iterable[tuple[str, Classified, _Context, int]], num_steps: int
) -> StepProfile:
    """Return the profile of nanoseconds that were spent, each with a kernel's name, its class and its surroundings."""
    scale, num, recomputed = _NANO / num_steps, 0, 0.0
    classes, formats = defaultdict[KernelClass, float](float), defaultdict[Format, float](float)
    modules = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    kernels = defaultdict[tuple[Any, ...], list[float]](lambda: [0.0, 0.0])
    products, unlisted = defaultdict[tuple[Any, ...], float](float), defaultdict[str, float](float)
    for name, by_name, context, duration in spent:
        is_product, seconds = by_name.kind in PRODUCTS, duration * scale
        found = Classified(by_name.kind, _format_of_product(name, by_name, context)) if is_product else by_name
        num += 1
        classes[found.kind] += seconds
        recomputed += seconds if context.is_recomputed else 0.0
        if is_product:
            products[found.kind, found.format, _NUMBER.sub("*", context.module)] += seconds
        is_listed = context.operator.partition("::")[0] in OWN_NAMESPACES or name.startswith("triton_")
        if found.kind in (*PRODUCTS, "other") and not is_listed:  # what is compiled is counted operator by operator
            unlisted[context.operator] += seconds
        if found.kind == "tensor_core_product":
            formats[found.format] += seconds
        modules[context.module][context.is_backward] += seconds
        of_kernel = kernels[name, found, context.operator, context.shapes]
        of_kernel[0] += 1 / num_steps
        of_kernel[1] += seconds
    largest = sorted(kernels.items(), key=lambda item: -item[1][1])[:_NUM_LARGEST]
    has_operators = device_type == "cuda" and any(operator for _, _, operator, _ in kernels)
    times = {name: ModuleTime(forward_seconds=each[0], backward_seconds=each[1]) for name, each in modules.items()}
    return StepProfile(
        device_type=device_type,
        num_steps=num_steps,
        num_kernels=num / num_steps,
        recomputed_seconds=recomputed,
        class_seconds=classes,
        format_seconds=formats,
        module_seconds={} if set(times) == {""} else times,
        kernels=tuple(
            KernelTime(
                name=name[:_LONGEST_NAME],
                kind=found.kind,
                format=found.format,
                operator=operator,
                shapes=shapes[:_MOST_SHAPES],
                launches=launches,
                seconds=seconds,
            )
            for (name, found, operator, shapes), (launches, seconds) in largest
        ),
        products=tuple(
            ProductTime(kind=kind, format=name, module=module, seconds=seconds)
            for (kind, name, module), seconds in sorted(products.items(), key=lambda item: -item[1])
        ),
        unlisted_seconds=unlisted if has_operators else {},
    )
