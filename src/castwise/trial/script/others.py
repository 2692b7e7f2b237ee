"""Optimizers that are none of torch.optim's: fastai's, Keras' and a script's own."""

import functools
import gc
import inspect
from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.trial.script.replacing import on_import, replaces
from castwise.trial.script.scaling import ScriptScaling

_MOST_LEVELS = 8  # of containers in an optimizer, and objects there: fastai's has lists of its own in lists
_MOST_HELD = 100_000


class StandIn(Optimizer):
    """Has the weights of another kind of optimizer, so that torch's hooks run around that one's steps."""

    def step(self, call: Callable[[], Any]) -> Any:  # type: ignore[override]
        return call()


class OtherOptimizers:
    """Finds optimizers that are none of torch.optim's, and has one of these stand in for each.

    Such a one is any object, but for modules, whose class has a method `step`, and that itself holds a model's weights:
    in its attributes, or containers there. Its step is a call of that method; of Keras' it is one of `apply`.
    `on_skipped` is called for a step that Keras' own loss scaling has skipped.
    """

    def __init__(
        self, optimizers: Collection[Optimizer], scaling: ScriptScaling, on_skipped: Callable[[Optimizer], None]
    ) -> None:
        self._optimizers, self._scaling, self._on_skipped = optimizers, scaling, on_skipped
        self._num_steps = 0
        self._found: list[tuple[ref[Any], StandIn]] = []
        self._followed: set[type] = set()
        on_import("keras.src.optimizers.base_optimizer", self._follow_keras)
        on_import("keras.src.optimizers.loss_scale_optimizer", self._follow_scaled)

    def find(self, weights: Iterable[Tensor]) -> None:
        """Look for them among all objects, if the script has no optimizer of torch.optim."""
        if all(isinstance(optimizer, StandIn) for optimizer in self._optimizers):
            wanted = set(map(id, weights))
            for each in gc.get_objects():
                kind: Any = type(each)
                if (owner := _owner_of_step(kind)) and not wanted.isdisjoint(map(id, held := _held(each))):
                    self._take(each, held)
                    if owner not in self._followed:
                        self._followed.add(owner)
                        replaces(owner, "step")(self._step)

    def of(self, weights: Iterable[Tensor]) -> StandIn | None:
        """Return what stands in for an optimizer with some of these weights, if anything does."""
        wanted = set(map(id, weights))
        known = (stand_in for _, stand_in in self._found)
        return next((each for each in known if not wanted.isdisjoint(map(id, each.param_groups[0]["params"]))), None)

    def _known(self, other: Any) -> StandIn | None:
        return next((stand_in for found, stand_in in self._found if found() is other), None)

    def _take(self, other: Any, held: Iterable[Any]) -> StandIn | None:
        known = self._known(other)
        weights = list({id(each): each for each in held if isinstance(each, Tensor) and _is_weight(each)}.values())
        if known is None and weights:
            kind = type(type(other).__name__, (StandIn,), {"__module__": type(other).__module__})
            known = kind(weights, {})
            self._found = [*((found, each) for found, each in self._found if found() is not None), (ref(other), known)]
        return known

    def _step(self, step: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        self._num_steps += 1
        stand_in = self._known(other) or self._take(other, _held(other))
        call = functools.partial(step, other, *args, **kwargs)
        if stand_in is None:
            return call()
        # By hand a GradScaler would not call it.
        return stand_in.step(call=lambda: None if self._scaling.is_withholding else call())

    def _follow_keras(self, module: ModuleType) -> None:
        @replaces(module.BaseOptimizer, "build")
        def build(build_as_written: Any, other: Any, variables: Any) -> None:
            build_as_written(other, variables)
            self._take(other, (variable.value for variable in variables))

        replaces(module.BaseOptimizer, "apply")(self._step)

    def _follow_scaled(self, module: ModuleType) -> None:
        """Let Keras scale a loss by itself, as its `compile` does in float16."""

        @replaces(module.LossScaleOptimizer, "__init__")
        def make(make_as_written: Any, *args: Any, **kwargs: Any) -> None:
            make_as_written(*args, **kwargs)
            self._scaling.scaler = None

        @replaces(module.LossScaleOptimizer, "apply")
        def apply(apply_as_written: Any, other: Any, *args: Any, **kwargs: Any) -> None:
            before = self._num_steps
            apply_as_written(other, *args, **kwargs)
            stand_in = self._known(other.inner_optimizer)
            if stand_in is not None and self._num_steps == before:
                self._on_skipped(stand_in)


def _is_weight(tensor: Tensor) -> bool:
    return tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, nn.Parameter))


@functools.cache
def _owner_of_step(kind: type) -> type | None:
    """Return the class that gives another kind of optimizer its `step`; None for what is none."""
    if issubclass(kind, Optimizer | nn.Module | type) or not kind.__weakrefoffset__:
        return None
    return next((base for base in kind.__mro__ if inspect.isfunction(vars(base).get("step"))), None)


def _held(holder: Any) -> list[Tensor]:
    """Return the tensors in an object's attributes, and in containers there."""
    found, seen, level = list[Tensor](), {id(holder)}, [holder]
    for _ in range(_MOST_LEVELS):
        inner = {id(each): each for each in gc.get_referents(*level) if id(each) not in seen}
        seen.update(inner)
        found += [each for each in inner.values() if issubclass(type(each), Tensor)]
        kinds: list[Any] = list(map(type, inner.values()))
        level = [each for each, kind in zip(inner.values(), kinds, strict=True) if _is_container(kind)]
        if not level or len(seen) > _MOST_HELD:
            break
    return found


@functools.cache
def _is_container(kind: type) -> bool:
    return (
        hasattr(kind, "__len__") and hasattr(kind, "__iter__") and not issubclass(kind, nn.Module | Tensor | type | str)
    )
