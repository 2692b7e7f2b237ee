"""LightningModules with their own training_step and optimizer; Lightning itself is not imported here.

Source: Lightning 2.6, `lightning/pytorch/core/module.py` (training_step, configure_optimizers and their forms).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.errors import UsageError
from castwise.spec.user_model import LightningParts
from castwise.trial.user_model.contract import Contract
from castwise.trial.user_model.loop import step_of

# Steps of the training run that the measured steps represent; schedulers are planned for so many.
_NUM_STEPS = 100_000


class StepModule(nn.Module):
    """A LightningModule whose forward pass is its training step, so that casts and DDP wrap all of it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self._index = -1

    def forward(self, batch: Any) -> Tensor:
        self._index = min(self._index + 1, 1)  # each new number would be compiled again
        returned = self.module.training_step(batch, self._index)
        return returned["loss"] if isinstance(returned, Mapping) else returned  # type: ignore[no-any-return]

    def to(self, *arguments: Any, **keywords: Any) -> "StepModule":
        """Move by the module's own `to`, which keeps `self.device` up to date."""
        self.module.to(*arguments, **keywords)
        return self


def is_lightning_module(model: nn.Module) -> bool:
    """Return whether a model brings its own training step and optimizer, as a LightningModule does."""
    return callable(getattr(model, "training_step", None)) and callable(getattr(model, "configure_optimizers", None))


def adapt(contract: Contract, source: str) -> tuple[Contract, LightningParts | None]:
    """Return the contract of a LightningModule: what the user did not give is the module's own.

    With it comes where the module has that, None if the user's loss replaces its step.
    """
    module: Any = contract.model
    if not getattr(module, "automatic_optimization", True):
        raise UsageError(
            f"The LightningModule of {source} uses manual optimization; castwise needs automatic optimization."
        )
    module._trainer = _make_trainer(contract)
    for name in ("log", "log_dict"):
        object.__setattr__(module, name, lambda *_, **__: None)  # there is no trainer to keep what is logged
    if hasattr(module, "setup"):
        module.setup("fit")
    if hasattr(module, "configure_model"):
        module.configure_model()
    has_loader = contract.batch is None
    if has_loader:  # its example input will not do, since `training_step` needs targets
        loader = module.train_dataloader() if _has_own(module, "train_dataloader") else None
        if loader is None:
            raise UsageError(
                f"{source} gives no batch, and its LightningModule has no train_dataloader. Return (model, batch): "
                "an example batch, or a function of the batch size."
            )
        contract = replace(contract, batch=loader)
    if contract.loss is not None or contract.training_step is not None:
        return contract, None
    hooks = tuple(name for name in ("setup", "configure_model") if _has_own(module, name))
    parts = LightningParts(hooks=hooks, has_loader=has_loader)
    if contract.optimizer is None:
        optimizer, optimizer_at, schedulers = _find_configured(module.configure_optimizers(), source)
        steps = [step for each in schedulers.values() if (step := step_of(each)) is not None]

        def step_all() -> None:
            for step in steps:
                step()

        scheduler = contract.scheduler or (SimpleNamespace(step=step_all) if steps else None)
        contract = replace(contract, optimizer=optimizer, scheduler=scheduler)
        parts = parts.model_copy(update={"optimizer_at": optimizer_at, "schedulers_at": tuple(schedulers)})
    return replace(contract, model=StepModule(module), training_step=lambda model, batch: model(batch)), parts


def _make_trainer(contract: Contract) -> Any:
    """Return what modules read from their trainer, except for logging."""
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


def _has_own(module: nn.Module, name: str) -> bool:
    """Return whether the user's class has a method; Lightning's own has all, and its train_dataloader raises."""
    owner = next((each.__module__ for each in type(module).__mro__ if name in vars(each)), "lightning.")
    return not owner.startswith(("lightning.", "pytorch_lightning."))


def _find_configured(configured: Any, source: str) -> tuple[Optimizer, str, dict[str, Any]]:
    """Find the parts in what configure_optimizers returned, in any form that Lightning takes.

    Returns:
        The one optimizer; where it is, as an index: `["optimizer"]`; and by their places likewise the schedulers that
        are stepped after every step.
    """
    at, schedulers, schedulers_at = "", None, ""
    if isinstance(configured, tuple | list) and len(configured) == 2 and isinstance(configured[0], list | tuple):
        (configured, schedulers), at, schedulers_at = configured, "[0]", "[1]"
    if isinstance(configured, Sequence):
        if len(configured) != 1:
            raise UsageError(
                f"The LightningModule of {source} has {len(configured)} optimizers, and castwise steps one."
            )
        configured, at = configured[0], f"{at}[0]"
    if isinstance(configured, Mapping):
        if "lr_scheduler" in configured:
            schedulers, schedulers_at = configured["lr_scheduler"], f'{at}["lr_scheduler"]'
        configured, at = configured.get("optimizer"), f'{at}["optimizer"]'
    if not isinstance(configured, Optimizer):
        raise UsageError(
            f"The configure_optimizers of {source} returned {type(configured).__name__}, not an optimizer."
        )
    listed = {schedulers_at: schedulers}
    if isinstance(schedulers, list | tuple):
        listed = {f"{schedulers_at}[{index}]": each for index, each in enumerate(schedulers)}
    # Lightning's default interval is an epoch, and there are no epochs here.
    of_steps = {place: each for place, each in listed.items() if isinstance(each, Mapping)}
    of_steps = {place: each for place, each in of_steps.items() if each.get("interval") == "step"}
    return configured, at, {f'{place}["scheduler"]': each["scheduler"] for place, each in of_steps.items()}
