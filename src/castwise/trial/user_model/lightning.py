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


def adapt(contract: Contract, source: str) -> Contract:
    """Return the contract of a LightningModule: what the user did not give is the module's own."""
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
    if contract.batch is None:
        contract = replace(contract, batch=_train_dataloader(module, source))
    if contract.loss is not None or contract.training_step is not None:
        return contract  # they replace the module's own
    if contract.optimizer is None:
        optimizer, scheduler = _configured(module.configure_optimizers(), source)
        contract = replace(contract, optimizer=optimizer, scheduler=contract.scheduler or scheduler)
    return replace(contract, model=StepModule(module), training_step=lambda model, batch: model(batch))


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


def _train_dataloader(module: Any, source: str) -> Any:
    """Return the module's own data loader; its example input will not do, since `training_step` needs targets."""
    # Lightning's own class has the hook too, and raises in it.
    owner = next((each for each in type(module).__mro__ if "train_dataloader" in vars(each)), None)
    is_own = owner is not None and not owner.__module__.startswith(("lightning.", "pytorch_lightning."))
    loader = module.train_dataloader() if is_own else None
    if loader is None:
        raise UsageError(
            f"{source} gives no batch, and its LightningModule has no train_dataloader. Return (model, batch): "
            "an example batch, or a function of the batch size."
        )
    return loader


def _configured(configured: Any, source: str) -> tuple[Any, Any]:
    """Return the one optimizer and what steps its scheduler after every step, from any form Lightning takes."""
    schedulers: Any = None
    if isinstance(configured, tuple | list) and len(configured) == 2 and isinstance(configured[0], list | tuple):
        configured, schedulers = configured
    if isinstance(configured, Sequence):
        if len(configured) != 1:
            raise UsageError(
                f"The LightningModule of {source} has {len(configured)} optimizers, and castwise steps one."
            )
        configured = configured[0]
    if isinstance(configured, Mapping):
        schedulers = configured.get("lr_scheduler", schedulers)
        configured = configured.get("optimizer")
    if not isinstance(configured, Optimizer):
        raise UsageError(
            f"The configure_optimizers of {source} returned {type(configured).__name__}, not an optimizer."
        )
    listed = schedulers if isinstance(schedulers, list | tuple) else [schedulers] if schedulers is not None else []
    # Lightning's default interval is an epoch, and there are no epochs here.
    per_step = [each for each in listed if isinstance(each, Mapping) and each.get("interval") == "step"]
    steps = [step for each in per_step if (step := step_of(each["scheduler"])) is not None]

    def step_all() -> None:
        for step in steps:
            step()

    return configured, SimpleNamespace(step=step_all) if steps else None
