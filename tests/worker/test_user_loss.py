from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.worker.user_model.contract import Contract
from castwise.worker.user_model.loop import loss_of_output, make_compute_loss

X, Y = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


class Recording(nn.Module):
    """Keeps how it was called, and returns its weight in a form the test wants."""

    def __init__(self, form: Any = lambda weight: weight) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), 2.0))
        self.form = form
        self.called: Any = None

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        self.called = (args, kwargs)
        return self.form(self.weight)


def compute(batch: Any, model: Recording | None = None, **parts: Any) -> tuple[Tensor, Recording]:
    model = model or Recording()
    return make_compute_loss(Contract(model, batch, **parts), "train_me.py:build")(model, batch), model


def test_the_last_part_of_a_tuple_is_the_target() -> None:
    seen: list[Any] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(target)
        return output.sum()

    value, model = compute((X, X + 1, Y), loss=loss)
    assert [arg is part for arg, part in zip(model.called[0], (X,), strict=False)] == [True]
    assert len(model.called[0]) == 2
    assert seen[0] is Y
    assert value.item() == 24


def test_a_dict_is_the_models_arguments_and_the_whole_is_the_target() -> None:
    batch = {"x": X, "y": Y}
    value, model = compute(batch, loss=lambda output, whole: output.sum() * (whole is batch))
    assert set(model.called[1]) == {"x", "y"}
    assert value.item() == 24


def test_a_tensor_has_no_target() -> None:
    value, model = compute(X, loss=lambda output: output.mean())
    assert model.called[0][0] is X
    assert value.item() == 2


def test_without_a_loss_all_of_the_batch_is_the_models() -> None:
    value, model = compute((X, Y))
    assert len(model.called[0]) == 2
    assert value.item() == 4  # the mean square


def test_a_training_step_calls_the_model_itself() -> None:
    value, model = compute((X, Y), training_step=lambda model, batch: {"loss": model(batch[0]).mean()})
    assert value.item() == 2
    assert len(model.called[0]) == 1


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        (lambda weight: weight, 4),
        (lambda weight: weight.sum(), 24),
        (lambda weight: {"out": weight, "aux": weight / 2}, 5),
        (lambda weight: (weight, torch.zeros(4, dtype=torch.int64)), 4),
        (lambda weight: SimpleNamespace(loss=weight.max(), logits=weight), 2),
        (lambda weight: {"loss": weight.max(), "logits": weight}, 2),
        (lambda weight: SimpleNamespace(loss=None), None),
    ],
)
def test_an_outputs_own_loss_or_its_mean_square(form: Any, loss: float | None) -> None:
    output = form(Recording().weight)
    if loss is None:
        with pytest.raises(UsageError, match="without a floating-point tensor"):
            loss_of_output(output, "train_me.py:build")
    else:
        assert loss_of_output(output, "train_me.py:build").item() == loss


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, _: output, r"has shape \(4, 3\): it must be a scalar"),
        (lambda output, _: 3.0, "is float, not a tensor"),
        (lambda output, _: None, "is NoneType, not a tensor"),
        (lambda output, _: torch.zeros(()), "does not depend on the model's weights"),
    ],
)
def test_a_loss_that_nothing_can_be_trained_by_is_refused(loss: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"The loss of train_me.py:build {words}"):
        compute((X, Y), loss=loss)


def test_a_loss_that_takes_the_model_is_told_what_it_is_called_with() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs), targets)

    with pytest.raises(UsageError, match="takes 'model' first, and is called with the model's output and the target"):
        compute((X, Y), loss=loss)
    value, _ = compute((X, Y), loss=lambda model, _: model.sum())
    assert value.item() == pytest.approx(24.0), "a name alone is no mistake"


def test_a_loss_is_a_float32_scalar() -> None:
    value, _ = compute((X, Y), loss=lambda output, _: output.mean().to(torch.bfloat16).reshape(1))
    assert (value.dtype, value.shape) == (torch.float32, ())


def test_a_losss_own_tensors_come_to_the_outputs() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    model = Recording(lambda weight: weight)
    model.to("meta")  # a device that any machine has
    compute((X, Y.to("meta")), model, loss=loss)
    assert loss.weight is not None
    assert loss.weight.device.type == "meta"
