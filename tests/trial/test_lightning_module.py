"""LightningModules: every form of them without Lightning, and Lightning's own class if it is installed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from castwise.apply.precision import convert_weights
from castwise.errors import UsageError
from castwise.registry.precisions import find_precision
from castwise.trial.user_model.contract import Contract
from castwise.trial.user_model.lightning import StepModule, adapt, is_lightning_module
from castwise.trial.user_model.loop import make_compute_loss, make_loop

BATCH = (torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))


class Module(nn.Module):
    """A LightningModule without Lightning."""

    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.indices: list[int] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.indices.append(index)
        inputs, targets = batch
        return {"loss": nn.functional.cross_entropy(self.net(inputs), targets)}

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.5)


def adapted(module: nn.Module, batch: Any = BATCH, **parts: Any) -> Contract:
    return adapt(Contract(module, batch, **parts), "x.py:build")[0]


def configured(returned: Any) -> Module:
    module = Module()
    module.configure_optimizers = lambda: returned(*_stepwise(module))  # type: ignore[method-assign]
    return module


def test_is_lightning_module() -> None:
    assert is_lightning_module(Module())
    assert not is_lightning_module(nn.Linear(1, 1))


def test_own_loss_and_optimizer() -> None:
    module = Module()
    contract = adapted(module)
    loss = make_compute_loss(contract, "x.py:build")(contract.model, BATCH)
    assert loss.item() == pytest.approx(nn.functional.cross_entropy(module.net(BATCH[0]), BATCH[1]).item())
    make_compute_loss(contract, "x.py:build")(contract.model, BATCH)
    assert module.indices == [0, 1]
    assert isinstance(contract.optimizer, SGD)
    assert contract.optimizer.param_groups[0]["lr"] == 0.5


def test_user_parts_replace_the_modules_own() -> None:
    contract = adapted(Module(), optimizer=torch.optim.Adam)
    assert contract.optimizer is torch.optim.Adam
    module = Module()
    assert adapted(module, loss=nn.CrossEntropyLoss()).model is module


@pytest.mark.parametrize("precision", ["fp16-master", "bf16-true"])
def test_batch_is_cast_and_loss_is_float32(precision: str) -> None:
    contract = adapted(Module())
    convert_weights(contract.model, find_precision(precision))
    loss = make_compute_loss(contract, "x.py:build")(contract.model, BATCH)
    assert loss.dtype == torch.float32
    loss.backward()


def _stepwise(module: Module) -> tuple[SGD, Any]:
    optimizer = SGD(module.parameters(), lr=1.0)
    return optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5)


FORMS: list[tuple[Any, float]] = [
    (lambda o, s: o, 1.0),
    (lambda o, s: [o], 1.0),
    (lambda o, s: {"optimizer": o}, 1.0),
    # By default schedulers go by epochs, and there are none here.
    (lambda o, s: ([o], [s]), 1.0),
    (lambda o, s: {"optimizer": o, "lr_scheduler": s}, 1.0),
    (lambda o, s: ([o], [{"scheduler": s, "interval": "step"}]), 0.25),
    (lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}}, 0.25),
]


@pytest.mark.parametrize(("returned", "rate"), FORMS)
def test_configure_optimizers(returned: Any, rate: float) -> None:
    contract = adapted(configured(returned))
    assert isinstance(contract.optimizer, SGD)
    make_scheduler = make_loop(contract, "x.py:build").make_scheduler
    assert (make_scheduler is None) is (rate == 1.0), "without one a step may be a graph"
    step = (lambda: None) if make_scheduler is None else make_scheduler(contract.optimizer)
    contract.optimizer.step()
    for _ in range(2):
        step()
    assert contract.optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda o, s: [o, o], "has 2 optimizers, and castwise steps one"),
        (lambda o, s: None, "configure_optimizers of x.py:build returned NoneType"),
        (lambda o, s: ([], []), "has 0 optimizers"),
    ],
)
def test_configure_optimizers_is_refused(returned: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        adapted(configured(returned))


def test_manual_optimization_is_refused() -> None:
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(UsageError, match="uses manual optimization"):
        adapted(module)


def test_own_train_dataloader() -> None:
    module: Any = Module()
    loader = DataLoader(TensorDataset(*BATCH), batch_size=2)
    with pytest.raises(UsageError, match="gives no batch, and its LightningModule has no train_dataloader"):
        adapted(module, None)
    type(module).train_dataloader = lambda self: loader
    try:
        assert adapted(module, None).batch is loader
    finally:
        del type(module).train_dataloader


def test_step_module_moves_by_the_modules_to() -> None:
    moved: list[Any] = []

    class Moved(Module):
        def to(self, *arguments: Any, **keywords: Any) -> Any:
            moved.append(arguments)
            return super().to(*arguments, **keywords)

    step = StepModule(Moved())
    assert step.to(torch.bfloat16) is step
    assert moved == [(torch.bfloat16,)]
    assert step.module.net.weight.dtype == torch.bfloat16


def test_real_lightning_module() -> None:
    lightning = pytest.importorskip("lightning")

    class Real(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)

        def setup(self, stage: str) -> None:
            self.stage = stage

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True)
            self.log_dict({"twice": 2 * loss})
            return loss * (1 + 0 * self.trainer.max_steps + 0 * self.global_step + 0 * self.current_epoch)

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.5)
            total = self.trainer.estimated_stepping_batches
            scheduler = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=int(total))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Real()
    contract = adapted(module)
    loss = make_compute_loss(contract, "x.py:build")(contract.model, BATCH)
    assert loss.requires_grad
    assert module.stage == "fit"
    contract.model.to(torch.bfloat16)
    assert module.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="has no train_dataloader"):
        adapted(Real(), None)
