"""The lines for Lightning, Accelerate and transformers train as castwise measured it, on the versions installed."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_step import SmallNet, make_batch, make_net, trained_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from castwise.analysis.code_snippets import framework_snippets
from castwise.apply.precision import numeric_state
from castwise.records.schema import Facts
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import step_config_of

LR, NORM, STEPS = 0.125, 0.5, 3
CLIPPED = Facts(num_parameters=1, units_per_sample=1, param_dtypes={}, optimizer="", fp32_precision={})
CLIPPED = CLIPPED.model_copy(update={"clip_grad_norm": NORM})


def line_for(framework: str, precision: str, techniques: tuple[str, ...]) -> str:
    found = framework_snippets(find_precision(precision), "cpu", CLIPPED, techniques)
    return next(each.code for each in found if each.framework == framework)


def sgd(parameters: Any, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LR, **settings)


def with_lightning(line: str, net: SmallNet, optimizer: dict[str, Any], techniques: tuple[str, ...]) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(net) if "compile" in techniques else net

        def training_step(self, batch: Any) -> Tensor:
            images, labels = batch
            return nn.functional.cross_entropy(self.net(images).float(), labels)

        def configure_optimizers(self) -> Any:
            return sgd(self.parameters(), **optimizer)

    made: list[Any] = []
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": STEPS}
    exec(line, {"torch": torch, "Trainer": lambda **words: made.append(lightning.Trainer(**words, **quiet))})
    made[0].fit(Module(), DataLoader(TensorDataset(*make_batch()), batch_size=16))
    made[0].strategy.teardown()


def with_accelerate(line: str, net: SmallNet, optimizer: dict[str, Any], techniques: tuple[str, ...]) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    names: dict[str, Any] = {"torch": torch, "model": net, "Accelerator": accelerate.Accelerator}
    before, _, clipping = line.partition("  # after backward: ")
    exec(before, names)
    accelerator = names["accelerator"]
    names["model"], stepped = accelerator.prepare(net, sgd(net.parameters(), **optimizer))
    images, labels = make_batch()
    for _ in range(STEPS):
        stepped.zero_grad()
        inputs = images.to(next(net.parameters()).dtype)  # of a model that was cast
        loss = nn.functional.cross_entropy(names["model"](inputs).float(), labels)
        accelerator.backward(loss)
        exec(clipping, names)
        stepped.step()


def with_transformers(line: str, net: SmallNet, optimizer: dict[str, Any], techniques: tuple[str, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            inputs = images.to(self.net.linear.weight.dtype)
            return {"loss": nn.functional.cross_entropy(self.net(inputs).float(), labels)}

    images, labels = make_batch()
    samples = [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    model, made = WithLoss(), list[Any]()
    fixed = {
        "per_device_train_batch_size": 16,
        "max_steps": STEPS,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }
    arguments = lambda **words: made.append(transformers.TrainingArguments(**words, **fixed))  # noqa: E731
    exec(line, {"torch": torch, "model": model, "TrainingArguments": arguments})
    given = (sgd(model.parameters(), **optimizer), None)
    transformers.Trainer(model, made[0], train_dataset=samples, optimizers=given).train()


WITH: dict[str, Callable[[str, SmallNet, dict[str, Any], tuple[str, ...]], None]] = {
    "Lightning": with_lightning,
    "Accelerate": with_accelerate,
    "transformers": with_transformers,
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("precision", "techniques"),
    [
        *itertools.product(("bf16-mixed", "bf16-true", "fp32"), ((), ("channels-last", "fused-optimizer"))),
        ("bf16-mixed", ("compile",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("framework", WITH)
def test_a_framework_trains_as_castwise_measured(
    framework: str, precision: str, techniques: tuple[str, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = line_for(framework, precision, techniques)
    net = make_net().train()
    if "channels-last" in techniques:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = {"fused": True} if "fused-optimizer" in techniques and "without fused=True" not in line else {}
    seen: set[torch.dtype] = set()
    if "compile" not in techniques:
        net.linear.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    row = find_precision(precision)
    with numeric_state(row):
        WITH[framework](line, net, optimizer, techniques)
        batches = [make_batch()] * STEPS
        expected = trained_weights(row, batches, clip=NORM, loop=step_config_of(techniques))
    assert seen == ({getattr(torch, row.autocast_dtype or row.param_dtype)} if "compile" not in techniques else set())
    assert net.linear.weight.dtype == getattr(torch, row.param_dtype)
    for own, other in zip(expected, net.parameters(), strict=True):
        torch.testing.assert_close(other.float(), own, rtol=2e-2, atol=2e-3)
