"""Adam and AdamW that keep their state in fewer bits than their weights have, by torchao."""

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from castwise.errors import TechniqueError
from castwise.registry.precisions import TORCHAO
from castwise.registry.techniques import STATE

# By what the state is kept in: torchao's optimizer. Source: torchao 0.18, torchao/optim/adam.py.
_KINDS = {"8-bit": "Adam8bit", "4-bit": "Adam4bit", "fp8": "AdamFp8", "bf16": "_AdamBase"}
# Of what torch's groups hold, by torchao's step: numbers, and all.
_NUMBERS = ("lr", "weight_decay", "eps", "betas")
_READ = (*_NUMBERS, "amsgrad")
_BITS = re.compile(r"(8bit|4bit|fp8)", re.IGNORECASE)  # in the names of classes


def keep_state_in(optimizer: Optimizer, kind: str) -> None:
    """Let an Adam or AdamW of torch keep its state in fewer bits: in place, and before its first step.

    Tensors of fewer than 4,096 values, or of no multiple of the block's size, keep the state of their weights' type. A
    state in bf16 is rounded stochastically: to the nearest a second moment never falls, which loses 0.1 % in a step.

    Args:
        optimizer: What is changed; its class becomes one of torchao's.
        kind: "bf16", "8-bit", "4-bit" or "fp8".

    Raises:
        TechniqueError: It is another optimizer, it has stepped, torchao is missing, or it does what torchao's cannot.
    """
    replaced, groups = type(optimizer), optimizer.param_groups
    name = replaced.__name__
    if replaced not in (Adam, AdamW):
        raise TechniqueError(f"{STATE}{kind} is for torch's Adam and AdamW; this is {name}")
    are_decoupled = {replaced is AdamW or bool(group.get("decoupled_weight_decay")) for group in groups}
    block_size = 128 if kind == "4-bit" else 256
    weights = [weight.numel() for group in groups for weight in group["params"]]
    for why, is_so in (
        ("it has stepped", bool(optimizer.state)),
        ("it maximizes", any(group.get("maximize") for group in groups)),
        ("its steps are differentiable", any(group.get("differentiable") for group in groups)),
        ("its groups decay weights in two ways", len(are_decoupled) > 1),
        ("its step was replaced", "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")),
        (
            f"none of its weights has 4,096 values or more, and a multiple of {block_size}",
            not any(n >= 4096 and n % block_size == 0 for n in weights),
        ),
    ):
        if is_so:
            raise TechniqueError(f"{STATE}{kind} cannot change this {name}: {why}")
    vars(optimizer).pop("step", None)  # that of the former class, which a scheduler wrapped
    dropped = optimizer.defaults.keys() - {*_READ}
    made: Any = _class_of(kind, replaced)
    # Of the class, as copies of an optimizer have none of its attributes.
    made.block_size, made.bf16_stochastic_round, made.is_adamw = block_size, False, are_decoupled.pop()
    optimizer.__class__ = made
    optimizer._patch_step_function()  # torch's hooks around steps
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    for settings in (optimizer.defaults, *groups):
        for other in dropped & settings.keys():
            del settings[other]


def keeps_narrow_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torchao's, as `keep_state_in` makes them."""
    return hasattr(optimizer, "bf16_stochastic_round")


def state_written(optimizer: Optimizer) -> str:
    """Return in what a user's optimizer keeps its state, if that is narrower than the weights; empty otherwise.

    The names of classes tell, such as bitsandbytes' PagedAdamW8bit and torchao's AdamFp8, and after a step the state:
    transformers makes one of both by `optim="adamw_8bit"` and `"adamw_torch_8bit"`.
    """
    if type(optimizer).__module__ == __name__:  # it is castwise's choice
        return ""
    kinds: list[type] = (
        [type(optimizer)] if type(optimizer).__module__.startswith(("bitsandbytes.", "torchao.")) else []
    )
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    kinds += [type(value) for value in values if type(value) not in (Tensor, nn.Parameter)]
    named = (bits[1].lower() for kind in kinds if (bits := _BITS.search(kind.__name__)))
    if (found := next(named, "")) or any(value.dtype == torch.uint8 and value.dim() for value in values):
        return {"4bit": "4-bit", "fp8": "fp8"}.get(found, "8-bit")
    weights = {weight.dtype for group in optimizer.param_groups for weight in group["params"]}
    dtypes = {value.dtype for value in values if value.dim()}
    return "bf16" if torch.bfloat16 in dtypes and weights == {torch.float32} else ""


def _class_of(kind: str, replaced: type[Optimizer]) -> type[Optimizer]:
    """Return the class of torchao's that keeps such a state; for `isinstance` it is also the one that it replaces."""
    try:
        from torchao.optim import adam  # takes a second, may be missing, and may be another version

        base: Any = getattr(adam, _KINDS[kind])
    except (ImportError, AttributeError):
        raise TechniqueError(f"{STATE}{kind} needs torchao {TORCHAO}: pip install 'castwise[fp8]'") from None
    for narrow in (adam.OptimState4bit, adam.OptimState8bit, adam.OptimStateFp8):
        _make_readable(narrow)

    single = adam.single_param_adam

    def rounding(weight: Tensor, gradient: Tensor, step: Tensor, *rest: Any) -> None:
        """Step with a state in float32, and round that."""
        wide = [None if kept is None else kept.float() for kept in rest[:3]]
        single(weight, gradient, step, *wide, *rest[3:])
        for kept, exact in zip(rest[:3], wide, strict=True):
            if kept is not None:
                kept.copy_(adam._fp32_to_bf16_sr(exact) if kept.dtype == torch.bfloat16 else exact)

    update = torch.compile(rounding if kind == "bf16" else single, fullgraph=True, dynamic=False)

    class AdamWithState(base, replaced):  # type: ignore[misc, valid-type]
        add_param_group = Optimizer.add_param_group  # torchao's makes a tensor of the rate
        __setstate__ = Optimizer.__setstate__

        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            self._opt_called = True
            with torch.enable_grad():
                loss = None if closure is None else closure()
            first = self.__dict__.setdefault("_first_numbers", {})
            written = [{name: group[name] for name in _NUMBERS} for group in self.param_groups]
            for index, group in enumerate(self.param_groups):
                _keep_compiled(group, first.setdefault(index, []))
            try:
                with patch.object(torch, "compile", lambda *_, **__: update):  # torchao calls it anew for each weight
                    super().step()
            finally:
                for group, numbers in zip(self.param_groups, written, strict=True):
                    group.update(numbers)
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # with _opt_called, all that schedulers ask for

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for weight, values in self.state.items():
                for name in values.keys() - {"step"}:  # those of a plain Adam, or what torch made of the weights' type
                    made = self._new_buffer(weight, name == "exp_avg")
                    if (type(made), made.dtype) != (type(values[name]), values[name].dtype):
                        values[name] = made.copy_(values[name])

    if kind == "bf16":
        AdamWithState._subclass_zeros = staticmethod(_bfloat16_zeros)
    AdamWithState.__name__ = f"{replaced.__name__} with a state in {kind}"
    return AdamWithState


def _keep_compiled(group: dict[str, Any], first: list[float]) -> None:
    """Make tensors of the rate and of numbers that change: torchao compiles the update anew for each other number.

    OneCycleLR and CyclicLR write another beta in each step, and tell by `max_momentum`.
    """
    first[:] = first or (group["weight_decay"], group["eps"], *group["betas"])
    named = {"lr": None, "weight_decay": first[0], "eps": first[1]}
    constants = (None if "max_momentum" in group else first[2], first[3])
    group.update({name: _as_tensor(group[name], constant) for name, constant in named.items()})
    group["betas"] = tuple(map(_as_tensor, group["betas"], constants))


def _as_tensor(number: Any, constant: float | None) -> Any:
    return number if number == constant or isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float32)


def _make_readable(narrow: Any) -> None:
    """Let a state be copied, and read and written in float32 by all that torchao has not, as users' logs do."""
    if hasattr(narrow, "is_readable"):
        return
    known = narrow.__torch_dispatch__

    def dispatch(cls: Any, function: Any, kinds: Any, values: Any = (), named: Any = None) -> Any:
        try:
            return known(function, kinds, values, named or {})
        except NotImplementedError:
            if function is torch.ops.aten.clone.default:
                names, rest = values[0].__tensor_flatten__()
                return cls.__tensor_unflatten__({name: getattr(values[0], name).clone() for name in names}, rest)
            plain = _read(values, narrow)
            found = function(*plain, **(named or {}))
            if not function._schema.is_mutable:
                return found
            if not isinstance(values[0], narrow):
                raise
            return values[0].copy_(plain[0])  # as zero_ and mul_ write

    narrow.__torch_dispatch__, narrow.is_readable = classmethod(dispatch), True


def _read(value: Any, narrow: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_read(each, narrow) for each in value]
    return value.dequantize() if isinstance(value, narrow) else value


def _bfloat16_zeros(weight: Tensor, _signed: bool, _block_size: int) -> Tensor:
    return torch.zeros_like(weight, dtype=torch.bfloat16)
