"""LightningModules as they are: their own training_step and optimizer, without Lightning being imported here.

Source: Lightning 2.6, `lightning/pytorch/core/module.py` (training_step, configure_optimizers and their forms).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.worker.user_model.contract import Contract, is_optimizer
from castwise.worker.user_model.optimizer import step_of

# What a training run has that a few hundred steps stand for; schedulers are laid out for it.
_NUM_STEPS = 100_000


class StepModule(nn.Module):
    """A LightningModule whose forward pass is its training step, so that casts and DDP go round all of it."""

    def __init__(self, module: Any) -> None:
        """Wrap a LightningModule.

        Args:
            module: The module.
        """
        super().__init__()
        self.module = module
        self._index = -1

    def forward(self, batch: Any) -> Tensor:
        """Return the loss of a batch, as `training_step` has it."""
        self._index = min(self._index + 1, 1)  # a number that always changes would be compiled ever again
        returned = self.module.training_step(batch, self._index)
        return returned["loss"] if isinstance(returned, Mapping) else returned  # type: ignore[no-any-return]

    def to(self, *arguments: Any, **keywords: Any) -> "StepModule":
        """Move by the module's own `to`, which notes where it is under `self.device`."""
        self.module.to(*arguments, **keywords)
        return self


def is_lightning_module(model: nn.Module) -> bool:
    """Return whether a model brings its own training step and optimizer, as a LightningModule does."""
    return callable(getattr(model, "training_step", None)) and callable(getattr(model, "configure_optimizers", None))


def adapt(contract: Contract, whose: str) -> Contract:
    """Return the contract of a LightningModule: what the user did not give is the module's own.

    Raises:
        UsageError: It optimizes by hand, has several optimizers, or no batch is to be had.
    """
    module: Any = contract.model
    if not getattr(module, "automatic_optimization", True):
        raise UsageError(f"The LightningModule of {whose} optimizes by hand, and castwise steps one optimizer itself.")
    module._trainer = _make_trainer(contract)
    for name in ("log", "log_dict"):
        object.__setattr__(module, name, _log_nothing)
    for hook in ("setup", "configure_model"):
        if hasattr(module, hook):
            getattr(module, hook)(*(("fit",) if hook == "setup" else ()))
    batch = contract.batch if contract.batch is not None else _own_batch(module, whose)
    contract = replace(contract, batch=batch, model=module)
    if contract.loss is not None or contract.training_step is not None:
        return contract  # the user would rather have those
    if contract.optimizer is None:
        optimizer, scheduler = _configured(module.configure_optimizers(), whose)
        contract = replace(contract, optimizer=optimizer, scheduler=contract.scheduler or scheduler)
    return replace(contract, model=StepModule(module), training_step=_call_it)


def _call_it(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def _log_nothing(*_: Any, **__: Any) -> None:
    """Take what would be logged; there is no trainer that would keep it."""


def _make_trainer(contract: Contract) -> Any:
    """Return what modules ask of their trainer outside of logging."""
    return SimpleNamespace(
        accumulate_grad_batches=contract.accumulate,
        current_epoch=0,
        estimated_stepping_batches=_NUM_STEPS,
        global_step=0,
        is_global_zero=True,
        logger=None,
        loggers=[],
        max_epochs=1,
        max_steps=_NUM_STEPS,
        num_training_batches=_NUM_STEPS,
        sanity_checking=False,
        training=True,
        validating=False,
        world_size=1,
    )


def _own_batch(module: Any, whose: str) -> Any:
    """Return the module's own data loader; its example input is none: `training_step` wants targets too."""
    loader = module.train_dataloader() if _overrides(module, "train_dataloader") else None
    if loader is None:
        raise UsageError(
            f"{whose} gives no batch, and its LightningModule has no train_dataloader. Return (model, batch): "
            "an example batch, or a function of the batch size."
        )
    return loader


def _overrides(module: Any, name: str) -> bool:
    """Return whether the module defines a hook, which Lightning's own class defines to raise."""
    for each in type(module).__mro__:
        if name in vars(each):
            return not each.__module__.startswith(("lightning.", "pytorch_lightning."))
    return False


def _configured(configured: Any, whose: str) -> tuple[Any, Any]:
    """Return the one optimizer and what steps its scheduler after every step, from any form Lightning takes."""
    schedulers: Any = None
    if isinstance(configured, tuple | list) and len(configured) == 2 and isinstance(configured[0], list | tuple):
        configured, schedulers = configured
    if isinstance(configured, Sequence):
        if len(configured) != 1:
            raise UsageError(
                f"The LightningModule of {whose} has {len(configured)} optimizers, and castwise steps one."
            )
        configured = configured[0]
    if isinstance(configured, Mapping):
        schedulers = configured.get("lr_scheduler", schedulers)
        configured = configured.get("optimizer")
    if not is_optimizer(configured):
        raise UsageError(f"The configure_optimizers of {whose} returned {type(configured).__name__}, not an optimizer.")
    listed = schedulers if isinstance(schedulers, list | tuple) else [schedulers] if schedulers is not None else []
    steps = [step_of(each["scheduler"]) for each in map(_by_name, listed) if _is_per_step(each)]
    stepped = [step for step in steps if step is not None]
    return configured, _PerStep(stepped) if stepped else None


def _by_name(scheduler: Any) -> dict[str, Any]:
    return dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}


def _is_per_step(scheduler: Mapping[str, Any]) -> bool:
    """Return whether a scheduler goes by steps; without a word Lightning's go by epochs, of which there are none."""
    return bool(scheduler.get("interval", "epoch") == "step")


class _PerStep:
    """Schedulers as one."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self._steps = steps
        self.last_epoch = 0

    def step(self) -> None:
        """Step all."""
        for step in self._steps:
            step()
