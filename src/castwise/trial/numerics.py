"""What a precision rounds away in a step: exponents of gradients, errors against float32, updates that change nothing.

The step is taken twice on one batch, from the same weights and random numbers: in float32, and in the precision.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.apply.float8 import as_before, sqnr_db
from castwise.apply.loss_scaling import NoScaling
from castwise.apply.precision import numeric_state, weights_in_float32
from castwise.apply.pytree import Batch, tree_tensors
from castwise.apply.techniques.cuda_graph import RecurrentState
from castwise.records.schema import GradientHistogram, ModuleNumerics, StepNumerics
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import hiding_operators
from castwise.spec.trial import TrialSpec
from castwise.trial.data.sharding import seed_generators
from castwise.trial.step import TrainingStep

_MOST_MODULES = 32  # rows; deeper modules are merged, so that a record stays small
_SAMPLE = 2**18  # values of an output or of its gradient; a share of 0.1 % is 262 of them
# A parameter whose gradient is this part of its module's is one whose gradient is zero, but for float32's rounding: a
# bias before batch norm. Source: chosen here; float32 rounds at 6e-8.
_NOISE = 1e-6
_LONGEST_REASON = 200


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
    def num_infinite(self) -> int:
        return sum(int((~torch.isfinite(gradient)).sum()) for gradient in self.gradients)

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


def measure_numerics(
    spec: TrialSpec, step: TrainingStep, recurrent_state: RecurrentState | None, batch: Batch
) -> StepNumerics:
    """Compare a step on a batch with float32; all that the next step depends on is afterwards as before."""

    def missing(why: str) -> StepNumerics:
        return StepNumerics(missing=f"not compared with float32: {why}".partition("\n")[0][:_LONGEST_REASON])

    if spec.world_size > 1:
        return missing("that is done on one GPU only")
    if find_precision(spec.precision).float8_recipe:
        return missing("castwise cannot compute layers in FP8 without it")
    carried = () if recurrent_state is None else tuple(state.clone() for state in recurrent_state.read())
    if not all(tensor.isfinite().all() for tensor in (*step.model.parameters(), *carried)):
        return missing("weights or carried states are not finite after the timed steps")
    write = (lambda _: None) if recurrent_state is None else recurrent_state.write
    try:
        with as_before(step.model):
            modules = tuple(_compare(spec, step, batch, carried, write))
    except (RuntimeError, TypeError, ValueError, AttributeError, MemoryError) as error:
        return missing(f"{type(error).__name__}: {error}")
    finally:
        write(carried)
    hidden = hiding_operators(spec.techniques)
    notes = [f"the step was compared with float32 without {', '.join(hidden)}"] if hidden else []
    # Float32 computes with what they were rounded to.
    notes += [f"{note}, before what is compared here" for note in step.notes]
    return StepNumerics(modules=modules, loss_scale=step.scaling.read_scale(), note="; ".join(notes))


def _compare(
    spec: TrialSpec, step: TrainingStep, batch: Batch, carried: tuple[Tensor, ...], write: Callable[..., None]
) -> Iterator[ModuleNumerics]:
    row, owners = find_precision(spec.precision), dict[str, nn.Module]()
    for name, module in step.model.named_modules():
        if any(weight.requires_grad for weight in module.parameters(recurse=False)):
            owners[name] = module
    with _same_dropout(step.model):
        with (
            numeric_state(find_precision("fp32")),
            patch.multiple(step, _autocast=nullcontext, scaling=NoScaling()),
            weights_in_float32(step.model),
        ):
            write(tuple(state.float() for state in carried))
            exact = _observe(spec, step, owners, batch)
        write(carried)
        found = _observe(spec, step, owners, batch)
    has_updates = row.param_dtype != "float32" and not row.master_weights
    lost = _lost_updates(step, owners) if has_updates else {}
    depth = max((name.count(".") + 1 for name in owners), default=1)
    while depth > 1 and len({_cut(name, depth) for name in owners}) > _MOST_MODULES:
        depth -= 1
    rows: dict[str, list[str]] = {}
    for name in owners:
        rows.setdefault(_cut(name, depth), []).append(name)
    for title, names in itertools.islice(rows.items(), _MOST_MODULES):
        weights = (weight for name in names for weight in owners[name].parameters(recurse=False))
        yield _summarize(title, names, weights, exact, found, lost)


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
        return attention(
            *given[:4], **options | dict(zip(("is_causal",), given[5:], strict=False)) | {"dropout_p": 0.0}
        )

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
        self.are_finite = all(
            bool(torch.isfinite(gradient).all()) for _, gradient in gradients
        )  # else no step may come
        self._before = {weight: (_sample(weight), _sample(gradient).ne(0)) for weight, gradient in gradients}

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


def _lost_updates(step: TrainingStep, owners: Mapping[str, nn.Module]) -> dict[str, float]:
    """Step by the gradients that are there; return of each module the share of weights that this leaves as they are.

    Empty if a gradient is not finite, because the step may be skipped then.
    """
    updates = Updates(step.model.parameters())
    if not updates.are_finite:
        return {}
    state = copy.deepcopy(step.state_dict())
    step.plain_update()
    shares = {name: updates.lost_share(module.parameters(recurse=False)) for name, module in owners.items()}
    step.load_state_dict(state)
    return shares


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
    num_infinite = sum(seen.num_infinite for _, seen in pairs)
    gradients = ((one.flat_gradients, other.flat_gradients) for one, other in pairs if other.num_gradients)
    kept = [gradient for seen, _ in pairs for gradient in _without_noise(seen.gradients)]
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
        lost_update_share=(
            sum(lost[name] * found[name].num_gradients for name in names) / num_gradients if lost else None
        ),
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


def _sample(tensor: Tensor) -> Tensor:
    """Return a copy of evenly spaced values in float32, all of a small tensor."""
    flat = tensor.detach().flatten()
    every = -(-flat.numel() // _SAMPLE)
    every += every > 1 and every % 2 == 0  # an even distance would meet the same channels again
    return flat[:: max(1, every)].to(torch.float32, copy=True)
