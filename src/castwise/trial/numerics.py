"""What a precision rounds away in a step: exponents of gradients, errors against float32, updates that change nothing.

The step is taken twice on one batch, from the same weights and random numbers: in float32, and in the precision.
"""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adafactor
from torch.overrides import TorchFunctionMode

from castwise.apply.float8 import as_before, sqnr_db
from castwise.apply.loss_scaling import NoScaling
from castwise.apply.precision import cast_floating, numeric_state, weights_in_float32
from castwise.apply.pytree import Batch, tree_tensors
from castwise.apply.techniques.cuda_graph import RecurrentState
from castwise.errors import UsageError
from castwise.records.schema import GradientHistogram, ModuleNumerics, PrecisionFall, StepNumerics
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import hiding_operators
from castwise.spec.grouping import grouped
from castwise.spec.trial import TrialSpec
from castwise.trial.data.sharding import seed_generators
from castwise.trial.step import TrainingStep

_MOST_MODULES = 32  # rows; deeper modules are merged, so that a record stays small
_SAMPLE = 2**18  # values of an output or of its gradient; a share of 0.1 % is 262 of them
# A parameter whose gradient is this part of its module's is one whose gradient is zero, but for float32's rounding: a
# bias before batch norm. Source: chosen here; float32 rounds at 6e-8.
_NOISE = 1e-6
_LONGEST_REASON = 200
_ON_ONE_GPU = "that is done on one GPU only"
# Of a user's model without its precision.
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, MemoryError)
# Of a forward pass, so many calls of modules are compared, so many tensors of each, and so many values of each one:
# at most 300 MB. Source: chosen here.
_MOST_CALLS, _MOST_TENSORS, _FEW_VALUES = 2_000, 4, 2**12
_MOST_FALLS = 32
_LEAST_FALL_DB = 3.0  # one more rounding like those before
_ROUNDED_DB = 60.0  # of exact values, one rounding to bfloat16 leaves 52 to 57
_EXACT_DB = 200.0  # what `sqnr_db` returns without an error
_NO_ACTIVATION = 1e15  # what masks have, whose value is that of the format
_HALVES = (torch.float16, torch.bfloat16)
_OPTIMIZERS = ("torch.optim.", "castwise.")  # whose updates do not depend on the weights, but for their decay
_DRAWS = (torch.rand, torch.randn, torch.rand_like, torch.randn_like)
_WIDENED = dict.fromkeys((Tensor.half, Tensor.bfloat16), Tensor.float)


@dataclass
class _Seen:
    """What was seen of a module in one step."""

    output: Tensor | None = None  # a sample, of the first call
    output_gradients: tuple[Tensor, ...] = ()  # a sample
    largest: float = 0.0  # of all gradients of that output
    gradients: tuple[Tensor, ...] = ()  # of its own weights, in float32 and without the loss scale

    @property
    def num_gradients(self) -> int:
        return sum(gradient.numel() for gradient in self.gradients)

    @property
    def flat_gradients(self) -> Tensor:
        return torch.cat([gradient.flatten() for gradient in self.gradients])

    def keep(self, _: nn.Module, __: Any, output: Any) -> None:
        """Keep a sample of the first tensor that a module returns, and later of its gradient."""
        tensor = next((part for part in tree_tensors(output) if part.is_floating_point()), None)
        if tensor is not None and self.output is None:
            self.output = _sample(tensor)
            if tensor.requires_grad:
                tensor.register_hook(self._keep_gradient)  # type: ignore[no-untyped-call]

    def _keep_gradient(self, gradient: Tensor) -> None:
        self.output_gradients, self.largest = (_sample(gradient),), float(gradient.abs().max())


class _AsFloat32(TorchFunctionMode):
    """Draws the same numbers in any format; if it is exact, lets code that names a 16-bit type compute in float32."""

    def __init__(self, *, is_exact: bool) -> None:
        super().__init__()
        self._is_exact = is_exact

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_exact:
            func = _WIDENED.get(func, func)
            args = tuple(torch.float32 if each in _HALVES else each for each in args)
            kwargs = {name: torch.float32 if each in _HALVES else each for name, each in kwargs.items()}
        elif func in _DRAWS:
            dtype = kwargs.get("dtype") or (args[0].dtype if isinstance(args[0], Tensor) else None)
            if dtype in _HALVES:
                return func(*args, **kwargs | {"dtype": torch.float32}).to(dtype)
        return func(*args, **kwargs)


class _Trail:
    """What modules get and return in a forward pass: in float32 first, then compared with it, in the same order."""

    def __init__(self, *models: nn.Module) -> None:
        self.names: dict[nn.Module, str] = {}
        for model in models:
            prefix = f"{type(model).__name__}." if len(models) > 1 else ""
            for name, module in model.named_modules():
                self.names[module] = f"{prefix}{name}".replace("_orig_mod.", "").rstrip(".")
        self._exact: dict[tuple[nn.Module, bool, int], list[Tensor]] = {}
        # Of each point: the module, whether its call ends there, the lowest SQNR if one is known, the first dtype.
        self._points: list[tuple[nn.Module, bool, Tensor | None, str]] = []
        self._counts, self._open = Counter[tuple[nn.Module, bool]](), list[nn.Module]()
        self._num_calls, self._is_exact = 0, True

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Follow forward passes within this context."""
        with ExitStack() as stack:
            for module in self.names:
                with suppress(RuntimeError):  # a module of TorchScript takes no hooks
                    stack.callback(module.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self.leave).remove)
            yield

    @contextmanager
    def compute(self, *, is_exact: bool) -> Iterator[None]:
        """Let a forward pass be the exact one, or one that is compared with it."""
        self._num_calls, self._is_exact = 0, is_exact
        self._counts.clear()
        with _AsFloat32(is_exact=is_exact):
            yield

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint computes it again
        self._num_calls += 1
        if self._num_calls <= _MOST_CALLS:
            self._open.append(module)
            self._note(module, (args, kwargs), is_end=False)

    def leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._open[-1:] != [module] or torch._C._current_graph_task_id() != -1:
            return
        self._open.pop()
        if self._num_calls <= _MOST_CALLS:  # else it has called what was not seen
            self._note(module, output, is_end=True)

    def _note(self, module: nn.Module, values: Any, *, is_end: bool) -> None:
        self._counts[module, is_end] += 1
        key = (module, is_end, self._counts[module, is_end])
        tensors = [part for part in tree_tensors(values) if part.is_floating_point() and part.numel()][:_MOST_TENSORS]
        samples = [_sample(part, _FEW_VALUES) for part in tensors]
        if self._is_exact:
            self._exact[key] = samples
            return
        pairs = zip(self._exact.get(key, ()), samples, strict=False)
        ratios = [_activation_sqnr(one, other) for one, other in pairs if one.shape == other.shape]
        lowest = torch.stack(ratios).nan_to_num(nan=_EXACT_DB).min() if ratios else None
        self._points.append((module, is_end, lowest, str(tensors[0].dtype).removeprefix("torch.") if tensors else ""))

    def lowest_output(self, *modules: nn.Module) -> float | None:
        """Return the lowest SQNR of what these modules returned; None if none is known."""
        found = (ratio for module, is_end, ratio, _ in self._points if is_end and module in modules)
        return min((float(ratio) for ratio in found if ratio is not None), default=None)

    def largest_falls(self) -> tuple[PrecisionFall, ...]:
        """Return where the SQNR falls most, in forward order."""
        falls = list(self._falls())
        largest = sorted(falls, key=lambda fall: fall.after_db - min(fall.before_db, _ROUNDED_DB))[:_MOST_FALLS]
        return tuple(fall for fall in falls if fall in largest)

    def _falls(self) -> Iterator[PrecisionFall]:
        under_way: list[tuple[str, list[float]]] = []  # modules, and the SQNR of what each has got and computed so far
        for module, is_end, ratio, dtype in self._points:
            name, decibels = self.names[module], _EXACT_DB if ratio is None else float(ratio)
            # A call is compared with what it got, and what is given to one with what its surroundings have so far.
            around = under_way.pop() if is_end else under_way[-1] if under_way else (name, [decibels])
            least = min(around[1])
            if min(least, _ROUNDED_DB) - decibels >= _LEAST_FALL_DB:
                before = "" if is_end else name
                yield PrecisionFall(module=around[0], before=before, before_db=least, after_db=decibels, dtype=dtype)
            known = least if ratio is None else decibels
            if not is_end:
                around[1].append(known)  # so that no later call reports the same fall
                under_way.append((name, [known]))
            elif under_way:
                under_way[-1][1].append(known)


def _activation_sqnr(exact: Tensor, found: Tensor) -> Tensor:
    """Return the SQNR of a sample; NaN if the reference has zeros alone, masks not counted."""
    is_value = exact.abs() < _NO_ACTIVATION
    exact, found = (torch.where(is_value, each, 0.0) for each in (exact, found))
    return torch.where(exact.any(), sqnr_db(exact, found), math.nan)


def measure_numerics(
    spec: TrialSpec, step: TrainingStep, recurrent_state: RecurrentState | None, batch: Batch
) -> StepNumerics:
    """Compare a step on a batch with float32; all that the next step depends on is afterwards as before."""
    if spec.world_size > 1:
        return _missing(_ON_ONE_GPU)
    if find_precision(spec.precision).float8_recipe:
        return _missing("castwise cannot compute layers in FP8 without it")
    carried = () if recurrent_state is None else tuple(state.clone() for state in recurrent_state.read())
    if not all(tensor.isfinite().all() for tensor in (*step.model.parameters(), *carried)):
        return _missing("weights or carried states are not finite after the timed steps")
    write = (lambda _: None) if recurrent_state is None else recurrent_state.write
    try:
        with as_before(step.model):
            trail = _Trail(step.model)
            modules, kept = _compare(spec, step, batch, carried, write, trail)
    except _FAILURES as error:
        return _missing(f"{type(error).__name__}: {error}")
    finally:
        write(carried)
    hidden = hiding_operators(spec.techniques)
    notes = [f"the step was compared with float32 without {', '.join(hidden)}"] if hidden else []
    # Float32 computes with what they were rounded to.
    notes += [f"{note}, before what is compared here" for note in step.notes]
    return StepNumerics(
        modules=modules,
        falls=trail.largest_falls(),
        loss_scale=step.scaling.read_scale(),
        kept_update_share=kept,
        note="; ".join(notes),
    )


def compare_script(
    spec: TrialSpec, run: Callable[[int, AbstractContextManager[Any]], int], models: Sequence[nn.Module]
) -> StepNumerics:
    """Compare the outputs of a script's forward passes with float32, in one more step, which must be its last.

    `run` is that of `profile_step`. Each model's first call of the step is computed in float32 first, without
    gradients: the script's own code computes the loss, so nothing is known of gradients.
    """
    is_spread = any(isinstance(model, nn.DataParallel) and len(model.device_ids) > 1 for model in models)
    if is_spread or (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
        return _missing(_ON_ONE_GPU)
    trail, done, errors = _Trail(*models), list[nn.Module](), list[Exception]()
    device_type, stack = torch.device(spec.device).type, ExitStack()

    def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module in done or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        done.append(module)
        was_on = torch.is_autocast_enabled(device_type)
        stack.enter_context(_same_dropout(module))
        try:
            torch.set_autocast_enabled(device_type, False)
            with (
                as_before(module),
                weights_in_float32(module),
                numeric_state(find_precision("fp32")),
                patch.object(torch, "set_autocast_enabled", lambda *_: None),  # of regions within the model
                torch.no_grad(),
                trail.compute(is_exact=True),
            ):
                seed_generators(spec.seed)
                args, kwargs = cast_floating((args, kwargs), torch.float32)
                trail.enter(module, args, kwargs)
                trail.leave(module, args, module.forward(*args, **kwargs))
        except _FAILURES as error:
            errors.append(error)
        finally:
            torch.set_autocast_enabled(device_type, was_on)
        seed_generators(spec.seed)
        stack.enter_context(trail.compute(is_exact=False))

    @contextmanager
    def compared() -> Iterator[None]:
        with ExitStack() as hooks, torch.compiler.set_stance("force_eager"):
            for model in models:
                hooks.callback(model.register_forward_pre_hook(compare, with_kwargs=True).remove)
            hooks.enter_context(trail.follow())
            for model in models:
                hooks.callback(model.register_forward_hook(lambda *_: stack.close(), always_call=True).remove)
            yield

    try:
        run(1, compared())
    except (*_FAILURES, UsageError) as error:
        errors.append(error)
    if errors or not done:
        why = f"{type(errors[0]).__name__}: {errors[0]}" if errors else "no call of a model with gradients was seen"
        return _missing(why)
    owners = {trail.names[module]: module for model in models for module in _owners(model).values()}
    rows = (
        ModuleNumerics(
            name=title,
            num_weights=sum(weight.numel() for name in names for weight in owners[name].parameters(recurse=False)),
            output_sqnr_db=trail.lowest_output(*(owners[name] for name in names)),
        )
        for title, names in _rows_of(owners).items()
    )
    return StepNumerics(modules=tuple(rows), falls=trail.largest_falls())


def _missing(why: str) -> StepNumerics:
    return StepNumerics(missing=f"not compared with float32: {why}".partition("\n")[0][:_LONGEST_REASON])


def _compare(
    spec: TrialSpec,
    step: TrainingStep,
    batch: Batch,
    carried: tuple[Tensor, ...],
    write: Callable[..., None],
    trail: _Trail,
) -> tuple[tuple[ModuleNumerics, ...], float | None]:
    """Return the rows of modules, and how much of an update the weights keep; None if that is not known."""
    row, owners = find_precision(spec.precision), _owners(step.model)
    with _same_dropout(step.model), trail.follow():
        with (
            numeric_state(find_precision("fp32")),
            patch.multiple(step, _autocast=nullcontext, scaling=NoScaling()),
            weights_in_float32(step.model),
        ):
            write(tuple(state.float() for state in carried))
            with trail.compute(is_exact=True):
                exact = _observe(spec, step, owners, batch)
        write(carried)
        with trail.compute(is_exact=False):
            found = _observe(spec, step, owners, batch)
    has_updates = row.autocast_dtype is None and not row.master_weights
    lost, kept = _lost_updates(step, owners) if has_updates else ({}, None)
    rows = []
    for title, names in _rows_of(owners).items():
        weights = (weight for name in names for weight in owners[name].parameters(recurse=False))
        rows.append(_summarize(title, names, weights, exact, found, lost))
    return tuple(rows), kept


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have trained weights themselves, by name."""
    modules = model.named_modules()
    return {name: each for name, each in modules if any(own.requires_grad for own in each.parameters(recurse=False))}


def _rows_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of modules by the row that they are in, deeper ones merged so that there are not too many."""
    names = list(names)
    depth = max((name.count(".") + 1 for name in names), default=1)
    while depth > 1 and len({_cut(name, depth) for name in names}) > _MOST_MODULES:
        depth -= 1
    return dict(itertools.islice(grouped(names, lambda name: _cut(name, depth)).items(), _MOST_MODULES))


def _cut(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth]) or "(model)"


def _observe(spec: TrialSpec, step: TrainingStep, owners: Mapping[str, nn.Module], batch: Batch) -> dict[str, _Seen]:
    """Run forward and backward passes, and return what is seen of modules; the weights keep their gradients."""
    seen = {name: _Seen() for name in owners}
    seed_generators(spec.seed)
    step.model.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        for name, module in owners.items():
            stack.callback(module.register_forward_hook(seen[name].keep).remove)
        step.run_backward(batch)
    scale = step.scaling.read_scale() or 1.0
    for name, module in owners.items():
        gradients = (weight.grad for weight in module.parameters(recurse=False) if weight.grad is not None)
        seen[name].gradients = tuple(gradient.detach().to(torch.float32, copy=True) / scale for gradient in gradients)
    return seen


@contextmanager
def _same_dropout(model: nn.Module) -> Iterator[None]:
    """Let dropout leave out the same values in any format; within attention and recurrent layers it is off."""

    def dropout(data: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        del inplace
        # torch's own kernels draw other numbers for another format.
        return data * (torch.rand(data.shape, device=data.device) >= p) / max(1 - p, _NOISE) if training else data

    def attend(*given: Any, **options: Any) -> Tensor:
        is_causal = dict(zip(("is_causal",), given[5:], strict=False))
        return attention(*given[:4], **options | is_causal | {"dropout_p": 0.0})

    attention = functional.scaled_dot_product_attention
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(functional, dropout=dropout, scaled_dot_product_attention=attend))
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                stack.enter_context(patch.object(module, "dropout", 0.0))
        yield


class Updates:
    """What a step is to move: samples of weights with gradients, before the step."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        """Keep the weights; those without a gradient do not count, and no step may come if one is not finite."""
        gradients = [(weight, weight.grad) for weight in weights if weight.grad is not None]
        self.are_finite = all(bool(torch.isfinite(gradient).all()) for _, gradient in gradients)
        self._before = {weight: (_sample(weight), _sample(gradient).ne(0)) for weight, gradient in gradients}

    def moved(self) -> list[Tensor]:
        """Return by how much the step has moved each sample."""
        return [_sample(weight) - before for weight, (before, _) in self._before.items()]

    def lost_share(self, weights: Iterable[Tensor] | None = None) -> float:
        """Return the share of weights, else of all, that the step has left as they were."""
        num_still = num_moving = 0.0
        for weight in self._before if weights is None else weights:
            if weight in self._before:
                before, moving = self._before[weight]
                times = weight.numel() / max(1, before.numel())
                num_still += times * int((_sample(weight).eq(before) & moving).sum())
                num_moving += times * int(moving.sum())
        return num_still / max(1.0, num_moving)


def _lost_updates(step: TrainingStep, owners: Mapping[str, nn.Module]) -> tuple[dict[str, float], float | None]:
    """Step by the gradients that are there; return of each module the share of weights that this leaves as they are.

    It is empty if a gradient is not finite, because the step may be skipped then. With it comes the share of the update
    that is kept, by a second step, of weights of zero: next to zero no format loses an update. It lacks weight decay.
    """
    weights = [weight for weight in step.model.parameters() if weight.grad is not None]
    updates = Updates(weights)
    if not updates.are_finite:
        return {}, None
    state = copy.deepcopy(step.state_dict())
    gradients = [weight.grad.clone() for weight in weights if weight.grad is not None]
    kept = None
    step.plain_update()
    shares = {name: updates.lost_share(module.parameters(recurse=False)) for name, module in owners.items()}
    if type(step.optimizer).__module__.startswith(_OPTIMIZERS) and not isinstance(step.optimizer, Adafactor):
        moved = updates.moved()
        step.load_state_dict(copy.deepcopy(state))  # whose tensors an optimizer takes over
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.zero_()
                weight.grad = gradient  # clipping and unscaling change it in place
        whole = Updates(weights)
        step.plain_update()
        pairs = list(zip(moved, whole.moved(), strict=True))
        size = sum(float(full.abs().sum()) for _, full in pairs)
        kept = sum(float((own * full.sign()).sum()) for own, full in pairs) / size if size else None
    step.load_state_dict(state)
    return shares, kept


def _summarize(
    title: str,
    names: Sequence[str],
    weights: Iterable[Tensor],
    exact: Mapping[str, _Seen],
    found: Mapping[str, _Seen],
    lost: Mapping[str, float],
) -> ModuleNumerics:
    """Return a row of one module or of several."""
    pairs = [(exact[name], found[name]) for name in names]
    num_gradients = max(1, sum(seen.num_gradients for _, seen in pairs))
    num_infinite = sum(int((~torch.isfinite(gradient)).sum()) for _, seen in pairs for gradient in seen.gradients)
    gradients = ((one.flat_gradients, other.flat_gradients) for one, other in pairs if other.num_gradients)
    kept = [gradient for seen, _ in pairs for gradient in _without_noise(seen.gradients)]
    num_lost = sum(lost[name] * found[name].num_gradients for name in names) if lost else 0.0
    return ModuleNumerics(
        name=title,
        num_weights=sum(weight.numel() for weight in set(weights)),
        weights=_histogram(kept, max((float(gradient.abs().max()) for gradient in kept), default=0.0)),
        outputs=_histogram(
            [gradient for seen, _ in pairs for gradient in seen.output_gradients],
            max(seen.largest for seen, _ in pairs),
        ),
        output_sqnr_db=_lowest_sqnr((one.output, other.output) for one, other in pairs),
        gradient_sqnr_db=None if num_infinite else _lowest_sqnr(gradients),
        overflow_share=num_infinite / num_gradients,
        lost_update_share=num_lost / num_gradients if lost else None,
    )


def _lowest_sqnr(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> float | None:
    """Return the lowest SQNR of pairs of a reference and what was found; a reference of zeros has none."""
    known = [(one, other) for one, other in pairs if one is not None and other is not None]
    return min((float(sqnr_db(one, other)) for one, other in known if bool(one.any())), default=None)


def _without_noise(gradients: Sequence[Tensor]) -> list[Tensor]:
    norms = [float(torch.linalg.vector_norm(gradient)) for gradient in gradients]
    return [gradient for gradient, norm in zip(gradients, norms, strict=True) if norm > _NOISE * max(norms)]


def _histogram(gradients: Sequence[Tensor], largest: float) -> GradientHistogram:
    counts = Counter[int]()
    for gradient in gradients:
        nonzero = gradient[(gradient != 0) & torch.isfinite(gradient)]
        exponents = torch.frexp(nonzero).exponent - 1  # of mantissas from 1 to 2
        numbers, times = torch.unique(exponents, return_counts=True)
        counts.update(dict(zip(numbers.tolist(), times.tolist(), strict=True)))
    seen = range(min(counts), max(counts) + 1) if counts else range(0)
    return GradientHistogram(
        first_exponent=seen.start, counts=" ".join(str(counts[exponent]) for exponent in seen), largest=largest
    )


def _sample(tensor: Tensor, most: int = _SAMPLE) -> Tensor:
    """Return a copy of evenly spaced values in float32, all of a small tensor."""
    flat = tensor.detach().flatten()
    every = -(-flat.numel() // most)
    every += every > 1 and every % 2 == 0  # an even distance would meet the same channels again
    return flat[:: max(1, every)].to(torch.float32, copy=True)
