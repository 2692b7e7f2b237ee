"""fastai's ResNets: what is frozen, the head, the layer groups, and steps in every precision that matters there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_step import make_step, stepped_tensors
from torch import nn
from torchvision import models

from castwise.apply.pytree import Batch
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import find_workload
from castwise.trial.models import build_task
from castwise.trial.models.fastai_resnet import AdaptiveConcatPool2d, group_of, make_model
from castwise.trial.models.task import Task


def make_batch(count: int = 4, side: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, side, side, generator=generator)
    return images, torch.randint(100, (count,), generator=generator)


@pytest.fixture(scope="module")
def make_task() -> Callable[[], Task]:
    """Return a maker of the ResNet-18's task; its model is built once and copied by its state."""
    torch.manual_seed(0)
    state = make_model("resnet18").state_dict()

    def make() -> Task:
        task = build_task(find_workload("fastai-resnet18"))
        task.model.load_state_dict(state)
        return task

    return make


# torchvision's published parameters (Weights.meta["num_params"]), and channels in front of its classifier
@pytest.mark.parametrize(("name", "total", "width"), [("resnet18", 11_689_512, 512), ("resnet50", 25_557_032, 2048)])
def test_number_of_parameters(name: str, total: int, width: int) -> None:
    with torch.device("meta"):
        model = make_model(name)
    head = 2 * (2 * width) + (2 * width + 1) * 512 + 2 * 512 + (512 + 1) * 100
    assert sum(p.numel() for p in model.parameters()) == total - (width + 1) * 1000 + head


# Body and head


def test_body_equals_torchvision() -> None:
    torch.manual_seed(0)
    resnet = models.resnet18(weights=None).eval()
    body = make_model("resnet18").get_submodule("body").eval()
    body.load_state_dict({name: value for name, value in resnet.state_dict().items() if not name.startswith("fc.")})
    images, _ = make_batch(2)
    features = body(images)
    assert features.shape == (2, 512, 2, 2)
    torch.testing.assert_close(resnet.fc(features.mean((2, 3))), resnet(images))


def test_pooling_puts_maxima_before_means() -> None:
    pooled = AdaptiveConcatPool2d()(torch.arange(16.0).view(1, 2, 2, 4))
    assert pooled.flatten().tolist() == [7, 15, 3.5, 11.5]


def test_head_equals_create_head() -> None:
    head = list(make_model("resnet18").get_submodule("head"))  # type: ignore[call-overload]
    kinds = ["AdaptiveConcatPool2d", "Flatten", "BatchNorm1d", "Dropout", "Linear", "ReLU", "BatchNorm1d", "Dropout"]
    assert [type(module).__name__ for module in head] == [*kinds, "Linear"]
    assert (head[3].p, head[7].p) == (0.25, 0.5)
    assert (head[4].in_features, head[4].out_features, head[8].out_features) == (1024, 512, 100)
    for linear in (head[4], head[8]):
        # He's initialisation: variance 2 / inputs.
        assert linear.weight.std().item() == pytest.approx((2 / linear.in_features) ** 0.5, rel=0.02)
        assert not linear.bias.any()


def test_frozen_parameters() -> None:
    model = make_model("resnet18")
    norms = {id(p) for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (id(parameter) in norms or name.startswith("head.")), name


def test_layer_groups() -> None:
    names = [name for name, _ in make_model("resnet18").named_parameters()]
    groups: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    for name in names:
        groups[group_of(name)].add(".".join(name.split(".")[:2]))
    assert groups[0] == {"body.conv1", "body.bn1", "body.layer1", "body.layer2"}
    assert groups[1] == {"body.layer3", "body.layer4"}
    assert {name.split(".")[0] for name in groups[2]} == {"head"}
    assert sorted(names, key=group_of) == names, "groups are in the model's order"


# Steps


@pytest.mark.parametrize(("precision", "scale"), [("fp32", "none"), ("bf16-mixed", "none"), ("fp16-master", "512")])
def test_step_changes_only_what_learns(precision: str, scale: str, make_task: Callable[[], Task]) -> None:
    task, row = make_task(), find_precision(precision)
    learning = {name for name, parameter in task.model.named_parameters() if parameter.requires_grad}
    step = make_step(row, task, find_workload("fastai-resnet18").optimizer, loss_scale=scale)
    before = {name: value.detach().clone() for name, value in task.model.named_parameters()}
    assert step(make_batch(side=32)).isfinite()
    assert len(stepped_tensors(step)) == len(learning)
    still = set()
    for name, parameter in task.model.named_parameters():
        assert parameter.isfinite().all(), name
        assert (parameter.grad is not None) == (name in learning), name
        if torch.equal(parameter, before[name]):
            still.add(name)
    assert not still & learning
    assert still == set(before) - learning
    assert task.model.get_buffer("body.bn1.running_mean").any(), "the frozen body's statistics move on"


def test_pretrained_weights_reach_the_body(make_task: Callable[[], Task], tmp_path: Path) -> None:
    torch.manual_seed(5)
    resnet = models.resnet18(weights=None)
    torch.save(resnet.state_dict(), tmp_path / "resnet18.pth")
    task = make_task()
    head = task.model.get_parameter("head.4.weight").clone()
    assert task.load_weights is not None
    task.load_weights(tmp_path / "resnet18.pth")
    assert torch.equal(task.model.get_parameter("body.layer4.1.conv2.weight"), resnet.layer4[1].conv2.weight)
    assert torch.equal(task.model.get_parameter("head.4.weight"), head)
    assert not task.model.get_parameter("body.conv1.weight").requires_grad
