from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.trial.user_model.contract import Contract
from castwise.trial.user_model.loop import check_batch, loss_of_output, make_compute_loss

X, X2, Y = torch.ones(4, 3), torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


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


DICT = {"x": X, "y": Y}


@pytest.mark.parametrize(
    ("batch", "parts", "called", "expected"),
    [
        ((X, X2, Y), {"loss": lambda output, target: output.sum() + (target is Y)}, ((X, X2), {}), 25),
        (DICT, {"loss": lambda output, whole: output.sum() + (whole is DICT)}, ((), DICT), 25),
        (X, {"loss": lambda output: output.mean()}, ((X,), {}), 2),
        ((X, Y), {}, ((X, Y), {}), 4),  # the mean square
        ((X, Y), {"training_step": lambda model, batch: {"loss": model(batch[0]).mean()}}, ((X,), {}), 2),
    ],
    ids=["tuple", "dict", "tensor", "no loss", "training step"],
)
def test_inputs_and_target(batch: Any, parts: dict[str, Any], called: Any, expected: float) -> None:
    value, model = compute(batch, **parts)
    (arguments, keywords), (expected_arguments, expected_keywords) = model.called, called
    assert list(map(id, arguments)) == list(map(id, expected_arguments))
    assert keywords.keys() == expected_keywords.keys()
    assert value.item() == expected


@pytest.mark.parametrize(
    ("form", "loss", "is_chosen"),
    [
        (lambda weight: weight, 4, True),
        (lambda weight: weight.sum(), 24, False),
        (lambda weight: (weight, weight.sum()), 24, True),
        (lambda weight: (weight, torch.zeros(4, dtype=torch.int64)), 4, True),
        (lambda weight: SimpleNamespace(loss=weight.max(), logits=weight), 2, False),
        (lambda weight: {"loss": weight.max(), "logits": weight}, 2, False),
    ],
)
def test_a_loss_that_castwise_chooses_has_a_note(form: Any, loss: float, is_chosen: bool) -> None:
    found, note = loss_of_output(form(Recording().weight), "train_me.py:build")
    assert found.item() == loss
    assert bool(note) == is_chosen


@pytest.mark.parametrize(
    "form",
    [
        lambda weight: SimpleNamespace(loss=None),
        lambda weight: {"out": weight, "aux": weight / 2},
        lambda weight: (weight.sum(), weight.mean()),
    ],
)
def test_an_output_without_one_loss_is_refused(form: Any) -> None:
    with pytest.raises(UsageError, match="which loss is meant"):
        loss_of_output(form(Recording().weight), "train_me.py:build")


def test_a_training_step_that_runs_backward_is_refused() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = model(batch[0]).mean()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(UsageError, match="runs backward itself"):
        compute((X, Y), training_step=step)


def test_a_training_step_past_the_models_forward_is_refused() -> None:
    with pytest.raises(UsageError, match=r"does not call model\(...\)"):
        compute((X, Y), training_step=lambda model, batch: model.weight.mean())

    def step(model: nn.Module, batch: Any) -> Tensor:
        return (model.weight.bfloat16() @ torch.ones(3)).mean()

    with pytest.raises(UsageError, match=r"does not call model\(...\).* It ended with: .*(dtype|scalar type)"):
        compute((X, Y), training_step=step)
    with pytest.raises(RuntimeError, match="size mismatch"):
        compute((X, Y), training_step=lambda model, batch: model.weight @ torch.ones(99))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, _: output, r"has shape \(4, 3\): it must be a scalar"),
        (lambda output, _: 3.0, "is float, not a tensor"),
        (lambda output, _: None, "is NoneType, not a tensor"),
        (lambda output, _: torch.zeros(()), "does not depend on the model's weights"),
    ],
)
def test_bad_loss_is_refused(loss: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"The loss of train_me.py:build {words}"):
        compute((X, Y), loss=loss)


def test_loss_that_takes_the_model_is_refused() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs), targets)

    with pytest.raises(UsageError, match="takes 'model' first, and is called with the model's output and the target"):
        compute((X, Y), loss=loss)
    value, _ = compute((X, Y), loss=lambda model, _: model.sum())
    assert value.item() == pytest.approx(24.0), "a name alone is no mistake"


def test_loss_becomes_a_float32_scalar() -> None:
    value, _ = compute((X, Y), loss=lambda output, _: output.mean().to(torch.bfloat16).reshape(1))
    assert (value.dtype, value.shape) == (torch.float32, ())


def test_loss_module_moves_to_the_output_device() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    model = Recording(lambda weight: weight)
    model.to("meta")  # a device that any machine has
    compute((X, Y.to("meta")), model, loss=loss)
    assert loss.weight is not None
    assert loss.weight.device.type == "meta"


class Lenient(nn.Linear):
    """Takes any key in silence, as transformers' models do."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Tensor:
        return super().forward(input_ids)


class TwoTower(nn.Linear):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return super().forward(user) * item


def test_a_label_in_a_dict_that_the_model_does_not_take_is_refused_with_the_way_out() -> None:
    batch = {"user": X, "item": X, "click": Y}
    with pytest.raises(UsageError, match=r"has 'click', which TwoTower does not take.*training_step\(model, batch\)"):
        check_batch(Contract(TwoTower(3, 3), batch, nn.MSELoss()), "train_me.py:build", batch)
    hooked = TwoTower(3, 3)
    hooked.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    check_batch(Contract(hooked, batch), "train_me.py:build", batch)  # a hook may take the label out


def test_a_batch_that_the_model_does_not_take_whole_is_refused_if_no_loss_is_given() -> None:
    with pytest.raises(UsageError, match=r"build gives no loss, so its whole batch goes into Linear.*batch, loss\)\."):
        check_batch(Contract(nn.Linear(3, 3), (X, Y)), "train_me.py:build", (X, Y))
    check_batch(Contract(nn.Linear(3, 3), (X, Y), nn.CrossEntropyLoss()), "train_me.py:build", (X, Y))
    check_batch(Contract(Recording(), (X, Y)), "train_me.py:build", (X, Y))


def test_a_key_that_is_nearly_an_argument_of_the_model_is_refused() -> None:
    def check(batch: Any, **parts: Any) -> None:
        check_batch(Contract(Lenient(3, 3), batch, **parts), "train_me.py:build", batch)

    with pytest.raises(UsageError, match="has 'label', which Lenient does not take: it takes 'labels'"):
        check({"input_ids": X, "label": Y})
    check({"input_ids": X, "labels": Y})
    check({"input_ids": X, "label": X, "labels": Y})  # what is meant is there
    check({"input_ids": X, "weights": Y})
    check({"input_ids": X, "label": Y}, training_step=lambda model, batch: model(**batch))
    check((X, Y))
