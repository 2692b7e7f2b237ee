"""What a precision rounds away in a step: exponents of gradients, errors against float32, updates that change nothing.

The step is taken twice on one batch, from the same weights and random numbers: in float32, and in the precision.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.records.schema import GradientHistogram, ModuleNumerics, StepNumerics
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import hiding_operators
from castwise.spec.trial import TrialSpec
from castwise.worker.float8 import sqnr_db
from castwise.worker.loss_scaling import NoScaling
from castwise.worker.models.task import Batch, RecurrentState
from castwise.worker.precision import numeric_state, weights_in_float32
from castwise.worker.pytree import tree_tensors
from castwise.worker.step import TrainingStep

_MOST_MODULES = 32  # rows; deeper modules are merged, so that a record stays small
_SAMPLE = 2**18  # values of an output or of its gradient; a share of 0.1 % is 262 of them
# A parameter whose gradient is this part of its module's is one whose gradient is zero, but for float32's rounding: a
# bias before batch norm. Source: chosen here; float32 rounds at 6e-8.
_NOISE = 1e-6
_LOWEST, _NUM_EXPONENTS = -149, 277  # of float32, subnormals included
_LONGEST_REASON = 200


@dataclass
class _Seen:
    """What was seen of a module in one step."""

    output: Tensor | None = None  # a sample, of the first call
    output_gradients: tuple[Tensor, ...] = ()  # a sample
    largest: float = 0.0  # of all gradients of that output
    gradients: tuple[Tensor, ...] = ()  # of its own weights, in float32 and without the loss scale

    def keep_output(self, _: nn.Module, __: Any, output: Any) -> None:
        """Keep a sample of the first tensor that a module returns, and later of its gradient."""
        tensor = next((each for each in tree_tensors(output) if each.is_floating_point()), None)
        if tensor is None or self.output is not None:
            return
        self.output = _sample(tensor)
        if tensor.requires_grad:
            tensor.register_hook(self.keep_gradient)  # type: ignore[no-untyped-call]

    def keep_gradient(self, gradient: Tensor) -> None:
        """Keep a sample of the gradient of the output."""
        self.output_gradients = (_sample(gradient),)
        self.largest = _largest([gradient])


def measure_numerics(
    spec: TrialSpec, step: TrainingStep, recurrent_state: RecurrentState | None, batch: Batch
) -> StepNumerics:
    """Compare a step in its precision with float32; all that the next step depends on is afterwards as before.

    Args:
        spec: What the step is of.
        step: The step.
        recurrent_state: What the task carries from step to step, if it carries anything.
        batch: Its batch.
    """
    if spec.world_size > 1:
        return StepNumerics(missing="a step is compared with float32 on one GPU only")
    if find_precision(spec.precision).float8_recipe:
        return StepNumerics(missing="layers in FP8 have no float32 twin; `castwise run` prints their lowest SQNR")
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            _keep_state(step, recurrent_state, stack)
            modules = tuple(_compare(spec, step, recurrent_state, batch))
    except (RuntimeError, TypeError, ValueError, AttributeError, MemoryError) as error:
        return StepNumerics(missing=f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST_REASON])
    hidden = hiding_operators(spec.techniques)
    note = f"the step was compared with float32 without {', '.join(hidden)}." if hidden else ""
    return StepNumerics(modules=modules, loss_scale=step.scaling.read_scale(), note=note)


def _keep_state(step: TrainingStep, recurrent_state: RecurrentState | None, stack: ExitStack) -> None:
    """Let a stack restore buffers, random numbers and what is carried, and drop gradients."""
    gpus = sorted({p.device.index for p in step.model.parameters() if p.device.type == "cuda"})
    stack.enter_context(torch.random.fork_rng(devices=gpus))
    carried = () if recurrent_state is None else tuple(each.clone() for each in recurrent_state.read())
    buffers = [(buffer, buffer.detach().clone()) for buffer in step.model.buffers()]

    @torch.no_grad()
    def restore() -> None:
        for buffer, before in buffers:
            buffer.copy_(before)
        if recurrent_state is not None:
            recurrent_state.write(carried)
        step.model.zero_grad(set_to_none=True)

    stack.callback(restore)


def _compare(
    spec: TrialSpec, step: TrainingStep, recurrent_state: RecurrentState | None, batch: Batch
) -> Iterator[ModuleNumerics]:
    row = find_precision(spec.precision)
    owners = {
        name: module
        for name, module in step.model.named_modules()
        if any(weight.requires_grad for weight in module.parameters(recurse=False))
    }
    carried = () if recurrent_state is None else recurrent_state.read()
    with _same_dropout(step.model):
        with ExitStack() as stack:
            for context in (
                numeric_state(find_precision("fp32")),
                patch.multiple(step, autocast=nullcontext, scaling=NoScaling()),
                weights_in_float32(step.model),
            ):
                stack.enter_context(context)
            if recurrent_state is not None:
                recurrent_state.write(tuple(each.float() for each in carried))
            exact = _observe(spec, step, owners, batch)
        if recurrent_state is not None:
            recurrent_state.write(carried)
        found = _observe(spec, step, owners, batch)
    has_updates = row.param_dtype != "float32" and not row.master_weights
    lost = _lost_updates(step, owners) if has_updates else {}
    rows: dict[str, list[str]] = {}
    for name, title in _row_titles(list(owners)).items():
        rows.setdefault(title, []).append(name)
    for title, names in rows.items():
        yield _summarize(title, {name: owners[name] for name in names}, exact, found, lost)


def _observe(spec: TrialSpec, step: TrainingStep, owners: Mapping[str, nn.Module], batch: Batch) -> dict[str, _Seen]:
    """Run forward and backward passes, and return what is seen of modules; the weights keep their gradients."""
    seen = {name: _Seen() for name in owners}
    torch.manual_seed(spec.seed)
    step.model.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        for name, module in owners.items():
            stack.callback(module.register_forward_hook(seen[name].keep_output).remove)
        step.run_backward(batch)
    scale = step.scaling.read_scale() or 1.0
    for name, module in owners.items():
        gradients = (weight.grad for weight in module.parameters(recurse=False) if weight.grad is not None)
        seen[name].gradients = tuple(each.detach().to(torch.float32, copy=True) / scale for each in gradients)
    return seen


@contextmanager
def _same_dropout(model: nn.Module) -> Iterator[None]:
    """Let dropout leave out the same values in any format; within attention and recurrent layers it is off."""

    def dropout(data: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        del inplace
        if not training or not p:
            return data
        kept = torch.rand(data.shape, device=data.device) >= p  # the kernels of two formats draw other numbers
        return data * kept / max(1 - p, _NOISE)

    attention = functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *given: Any, **options: Any) -> Tensor:
        options |= dict(zip(("attn_mask", "dropout_p", "is_causal"), given, strict=False)) | {"dropout_p": 0.0}
        return attention(query, key, value, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.multiple(functional, dropout=dropout, scaled_dot_product_attention=attend))
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                stack.enter_context(patch.object(module, "dropout", 0.0))
        yield


def _lost_updates(step: TrainingStep, owners: Mapping[str, nn.Module]) -> dict[str, float]:
    """Step by the gradients that are there; return of each module the share of weights that this leaves as they are.

    Weights without a gradient do not count. Empty if a gradient is not finite, because the step may be skipped then.
    """
    gradients = {weight: weight.grad for weight in step.model.parameters() if weight.grad is not None}
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values()):
        return {}
    state = copy.deepcopy(step.state_dict())
    moving = {weight: gradient.ne(0) for weight, gradient in gradients.items()}
    before = {weight: weight.detach().clone() for weight in moving}
    step.plain_update()
    shares = {}
    for name, module in owners.items():
        own = [weight for weight in module.parameters(recurse=False) if weight in moving]
        num_moving = sum(int(moving[weight].sum()) for weight in own)
        num_still = sum(int((weight.eq(before[weight]) & moving[weight]).sum()) for weight in own)
        shares[name] = num_still / max(1, num_moving)
    step.load_state_dict(state)
    return shares


def _row_titles(names: Sequence[str]) -> dict[str, str]:
    """Return the row of each module: its own, or if those are too many, that of the module around it."""
    titles = dict.fromkeys(names, "")
    for depth in range(max((name.count(".") + 1 for name in names), default=1), 0, -1):
        titles = {name: ".".join(name.split(".")[:depth]) or "(model)" for name in names}
        if len(set(titles.values())) <= _MOST_MODULES:
            return titles
    kept = list(dict.fromkeys(titles.values()))[: _MOST_MODULES - 1]
    return {name: title if title in kept else "(others)" for name, title in titles.items()}


def _summarize(
    title: str,
    owners: Mapping[str, nn.Module],
    exact: Mapping[str, _Seen],
    found: Mapping[str, _Seen],
    lost: Mapping[str, float],
) -> ModuleNumerics:
    """Return a row of one module or of several."""
    weights = {id(weight): weight for module in owners.values() for weight in module.parameters(recurse=False)}
    sizes = {name: sum(each.numel() for each in found[name].gradients) for name in owners}
    num_gradients = max(1, sum(sizes.values()))
    of_weights = [each for name in owners for each in _without_noise(exact[name].gradients)]
    of_outputs = [each for name in owners for each in exact[name].output_gradients]
    finite = [torch.isfinite(each).sum() for name in owners for each in found[name].gradients]
    overflowed = 1 - int(sum(finite)) / num_gradients if finite else 0.0
    pairs = [(exact[name].output, found[name].output) for name in owners]
    of_gradients = [(_flat(exact[name].gradients), _flat(found[name].gradients)) for name in owners if sizes[name]]
    return ModuleNumerics(
        name=title,
        num_weights=sum(each.numel() for each in weights.values()),
        weights=_histogram(of_weights, _largest(of_weights)),
        outputs=_histogram(of_outputs, max(exact[name].largest for name in owners)),
        output_sqnr_db=_lowest_sqnr((one, other) for one, other in pairs if one is not None and other is not None),
        gradient_sqnr_db=None if overflowed else _lowest_sqnr(of_gradients),
        overflow_share=overflowed,
        lost_update_share=sum(lost[name] * sizes[name] for name in owners) / num_gradients if lost else None,
    )


def _lowest_sqnr(pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """Return the lowest SQNR of pairs of a reference and what was found; a reference of zeros has none."""
    return min((float(sqnr_db(one, other)) for one, other in pairs if bool(one.any())), default=None)


def _without_noise(gradients: Sequence[Tensor]) -> list[Tensor]:
    norms = [float(torch.linalg.vector_norm(each)) for each in gradients]
    return [each for each, norm in zip(gradients, norms, strict=True) if norm > _NOISE * max(norms)]


def _histogram(gradients: Sequence[Tensor], largest: float) -> GradientHistogram:
    counts: Counter[int] = Counter()
    for each in gradients:
        exponents = torch.frexp(each[(each != 0) & torch.isfinite(each)]).exponent - 1  # of a mantissa from 1 to 2
        numbers = torch.bincount(exponents - _LOWEST, minlength=_NUM_EXPONENTS).tolist()
        counts.update({place + _LOWEST: number for place, number in enumerate(numbers) if number})
    if not counts:
        return GradientHistogram()
    first, last = min(counts), max(counts)
    text = " ".join(str(counts[exponent]) for exponent in range(first, last + 1))
    return GradientHistogram(first_exponent=first, counts=text, largest=largest)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in tensors])


def _largest(tensors: Sequence[Tensor]) -> float:
    return max((float(each.detach().abs().max()) for each in tensors if each.numel()), default=0.0)


def _sample(tensor: Tensor) -> Tensor:
    """Return a copy of evenly spaced values in float32, all of a small tensor."""
    flat = tensor.detach().flatten()
    every = -(-flat.numel() // _SAMPLE)
    every += every > 1 and every % 2 == 0  # an even distance would meet the same channels again
    return flat[:: max(1, every)].to(torch.float32, copy=True)
