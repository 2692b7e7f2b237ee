"""What follows backward as one compiled function: unscale, clip, step or skip, round into the weights.

An optimizer's own kernels read and write every weight and state once. The operations around them (gradients of 16 bits
converted to float32, unscaled, clipped; masters rounded into the weights) read and write them again. Compiled together,
each is read once and written once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer
from torch.optim.adadelta import adadelta
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from castwise.apply.loss_scaling import NoScaling
from castwise.apply.precision import Weights
from castwise.errors import TechniqueError

_SMALL = 1e-6  # Source: torch.nn.utils.clip_grad_norm_

# By class: the optimizer's function over lists of tensors, the names of its states, and the settings of a group that
# the function takes. Source: torch.optim.
_FUNCTIONS: dict[type[Optimizer], tuple[Callable[..., None], tuple[str, ...], tuple[str, ...]]] = {
    SGD: (sgd, ("momentum_buffer",), ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")),
    Adam: (
        adam,
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
        ("lr", "weight_decay", "eps", "maximize", "capturable", "amsgrad", "decoupled_weight_decay"),
    ),
    AdamW: (
        adamw,
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
        ("lr", "weight_decay", "eps", "maximize", "capturable", "amsgrad"),
    ),
    Adadelta: (
        adadelta,
        ("square_avg", "acc_delta", "step"),
        ("lr", "rho", "weight_decay", "eps", "maximize", "capturable"),
    ),
}

States = list[list[Tensor | None]]


class CompiledUpdate:
    """The update of one optimizer's tensors, compiled.

    The first step is the optimizer's own, uncompiled: it creates its states.
    """

    def __init__(
        self, optimizer: Optimizer, weights: Weights, scaling: NoScaling, clip_grad_norm: float | None
    ) -> None:
        """Compile the update of an optimizer over `weights.stepped`; the scaling decides on the device to skip."""
        if type(optimizer) not in _FUNCTIONS:
            names = ", ".join(kind.__name__ for kind in _FUNCTIONS)
            raise TechniqueError(f"compiled-update fits {names}; this is {type(optimizer).__name__}.")
        self._optimizer, self._weights, self._scaling, self._clip = optimizer, weights, scaling, clip_grad_norm
        self._compiled = torch.compile(_update, dynamic=False, fullgraph=True)
        self._is_first = True

    @torch.no_grad()
    def __call__(self) -> None:
        if self._is_first:
            self._is_first = False
            self._first_step()
            return
        groups = [found for group in self._optimizer.param_groups if (found := self._group(group))[0]]
        inverse, overflowed, factor = self._scaling.inverse(), None, None
        gradients = [gradient for group in groups for gradient in group[0]]
        if self._scaling.may_skip:
            overflowed = (~_norms(gradients, torch.inf).isfinite().all()).float()
        if self._clip is not None:
            norm = torch.linalg.vector_norm(_norms(gradients, 2))
            norm = norm if inverse is None else norm * inverse  # a factor of 1 would be a kernel of its own
            factor = torch.clamp(self._clip / (norm + _SMALL), max=1.0)
        self._compiled(type(self._optimizer), groups, inverse, factor, overflowed)
        self._scaling.settle(overflowed)

    def _first_step(self) -> None:
        """Take the optimizer's own step. Without `capturable` its foreach kernels take only numbers as rates."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = float(group["lr"])
        self._weights.collect_gradients()
        self._scaling.step(self._optimizer, self._clip)
        self._weights.publish()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _group(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor | None], States, Any]:
        """Return a group's gradients, stepped tensors, weights that these are rounded into, states and settings."""
        pairs = [pair for tensor in group["params"] if (pair := self._weights.behind(tensor)).grad is not None]
        stepped = [self._weights.stepped_for(weight) for weight in pairs]
        low = [None if weight is tensor else weight for weight, tensor in zip(pairs, stepped, strict=True)]
        _, names, settings = _FUNCTIONS[type(self._optimizer)]
        states = [[self._optimizer.state[tensor].get(name) for tensor in stepped] for name in names]
        # Plain SGD has no states; the compiled function creates none.
        if group.get("momentum", 1) and any(all(state[i] is None for state in states) for i in range(len(stepped))):
            raise TechniqueError("compiled-update needs every weight that is trained to be trained in the first step.")
        chosen = {name: group[name] for name in settings if name in group}  # torch adds some from version to version
        if "betas" in group:
            chosen["beta1"], chosen["beta2"] = group["betas"]
        gradients = [weight.grad for weight in pairs if weight.grad is not None]
        return gradients, stepped, low, states, chosen


def _norms(gradients: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of each gradient, as float32, by one kernel of torch's for each dtype.

    They are computed outside the compiled function. The step needs all norms, and Inductor, which fuses the operations
    before the norms with as much of the step as it can, would store that and launch a kernel per tensor after them.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    found = [torch._foreach_norm(same, order, dtype=torch.float32) for same in by_dtype.values()]
    return torch.stack([norm for norms in found for norm in norms])


def _update(
    kind: type[Optimizer],
    groups: Sequence[tuple[list[Tensor], list[Tensor], list[Tensor | None], States, dict[str, Any]]],
    inverse: float | Tensor | None,
    factor: Tensor | None,
    overflowed: Tensor | None,
) -> None:
    """Update all groups by gradients times the scale's inverse and clipping's factor; not if a gradient overflowed."""
    for group_gradients, stepped, low, states, settings in groups:
        gradients = [gradient.to(tensor.dtype) for gradient, tensor in zip(group_gradients, stepped, strict=True)]
        for by in (inverse, factor):
            if by is not None:
                gradients = list(torch._foreach_mul(gradients, by))
        _step(kind, gradients, stepped, states, settings, overflowed)
        for weight, tensor in zip(low, stepped, strict=True):
            if weight is not None:  # one by one: a list of another length would need a separate kernel
                weight.copy_(tensor)


def _step(
    kind: type[Optimizer],
    gradients: list[Tensor],
    stepped: list[Tensor],
    states: States,
    settings: dict[str, Any],
    overflowed: Tensor | None,
) -> None:
    """Step a group; if a gradient overflowed, all tensors keep their values."""
    function = _FUNCTIONS[kind][0]
    if "capturable" in settings and torch.compiler.is_compiling():
        settings = settings | {"capturable": True}  # the compiler takes the count of steps as a tensor on any device
    touched = [*stepped, *(state for tensors in states for state in tensors if state is not None)]
    # Copies cost nothing: in compiled code they are values that are read anyway.
    before = [tensor.clone() for tensor in touched] if overflowed is not None else []
    # Without AMSGrad torch's functions take an empty list for its states.
    lists = [[] if len(states) > 1 and tensors and tensors[0] is None else tensors for tensors in states]
    function(stepped, gradients, *lists, foreach=True, **settings)
    if overflowed is not None:
        for tensor, old in zip(touched, before, strict=True):
            tensor.copy_(torch.where(overflowed > 0, old, tensor))
