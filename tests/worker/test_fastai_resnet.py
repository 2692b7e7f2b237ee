"""fastai's ResNets: what is frozen, the head, the layer groups, and steps in every precision that matters there."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_step import CPU, make_step, stepped_tensors
from torch import nn
from torchvision import models

from castwise.registry.precisions import find_precision
from castwise.registry.workloads import WORKLOADS, find_workload
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.worker.models import build_task
from castwise.worker.models.fastai_resnet import AdaptiveConcatPool2d, group_of, make_model
from castwise.worker.models.task import Batch, Task
from castwise.worker.precision import MasterWeights, convert_weights
from castwise.worker.steady_run import SteadyRun

ROWS = [row for row in WORKLOADS if row.family == "fastai_resnet"]
# torchvision's published parameters (Weights.meta["num_params"]), and channels in front of its classifier.
TORCHVISION = {
    "resnet18": (11_689_512, 512),
    "resnet34": (21_797_672, 512),
    "resnet50": (25_557_032, 2048),
    "resnet101": (44_549_160, 2048),
    "resnet152": (60_192_808, 2048),
}


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


# The rows


def test_the_rows_are_the_source_s() -> None:
    batch_sizes = {row.name: row.batch_size for row in ROWS}
    assert batch_sizes == {
        "fastai-resnet18": 408,
        "fastai-resnet34": 248,
        "fastai-resnet50": 98,
        "fastai-resnet101": 64,
        "fastai-resnet152": 48,
    }
    for row in ROWS:
        assert row.optimizer.name == "AdamW"
        assert dict(row.optimizer.arguments) == {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 1e-2}
        assert row.data_sets == ("cifar100",)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_parameters_are_torchvision_s_body_and_fastai_s_head(row: object) -> None:
    name = row.name.removeprefix("fastai-")  # type: ignore[attr-defined]
    total, width = TORCHVISION[name]
    with torch.device("meta"):
        model = make_model(name)
    head = 2 * (2 * width) + (2 * width + 1) * 512 + 2 * 512 + (512 + 1) * 100
    assert sum(p.numel() for p in model.parameters()) == total - (width + 1) * 1000 + head


def test_a_hundred_classes_and_no_more(make_task: Callable[[], Task]) -> None:
    task = make_task()
    assert task.num_classes == 100
    assert task.model(make_batch()[0]).shape == (4, 100)
    with torch.device("meta"):
        _, labels = build_task(find_workload("fastai-resnet18")).make_batches(2, 300, CPU, torch.Generator())[0]
    assert 0 <= labels.min() < labels.max() <= 99


# Body and head


def test_the_body_is_torchvision_s_up_to_its_pooling() -> None:
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


def test_the_head_is_create_head_s() -> None:
    head = list(make_model("resnet18").get_submodule("head"))  # type: ignore[call-overload]
    kinds = ["AdaptiveConcatPool2d", "Flatten", "BatchNorm1d", "Dropout", "Linear", "ReLU", "BatchNorm1d", "Dropout"]
    assert [type(module).__name__ for module in head] == [*kinds, "Linear"]
    assert (head[3].p, head[7].p) == (0.25, 0.5)
    assert (head[4].in_features, head[4].out_features, head[8].out_features) == (1024, 512, 100)
    for linear in (head[4], head[8]):
        # He's initialisation: variance 2 / inputs.
        assert linear.weight.std().item() == pytest.approx((2 / linear.in_features) ** 0.5, rel=0.02)
        assert not linear.bias.any()


def test_all_but_batch_norm_is_frozen_in_the_body_and_nothing_in_the_head() -> None:
    model = make_model("resnet18")
    norms = {id(p) for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (id(parameter) in norms or name.startswith("head.")), name


def test_layer_groups_are_split_before_the_third_stage_and_before_the_head() -> None:
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
def test_a_step_moves_what_learns_and_nothing_else(precision: str, scale: str, make_task: Callable[[], Task]) -> None:
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


def test_masters_are_the_head_s_alone(make_task: Callable[[], Task]) -> None:
    model = make_task().model
    convert_weights(model, find_precision("fp16-master"))
    weights = MasterWeights(model)
    low = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    assert low == ["head.4.weight", "head.4.bias", "head.8.weight", "head.8.bias"]
    assert len(weights._masters) == len(low)
    assert model.get_parameter("body.conv1.weight").dtype == torch.float16
    assert {tensor.dtype for tensor in weights.stepped} == {torch.float32}


@pytest.mark.parametrize(("precision", "scale"), [("fp32", "none"), ("fp16-master", "512")])
def test_a_steady_trial_runs(
    precision: str, scale: str, make_task: Callable[[], Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task()
    task.make_batches = lambda count, batch_size, *_: [make_batch(batch_size, 32)] * count
    monkeypatch.setattr("castwise.worker.build.build_task", lambda *_, **__: task)
    protocol = MeasurementProtocol(
        warm_up_steps=1, warm_up_seconds=0.01, block_seconds=0.01, num_blocks=1, min_blocks=1
    )
    cell = SteadyRun(
        TrialSpec(
            workload="fastai-resnet18",
            precision=precision,
            loss_scale=scale,
            batch_size=8,
            device="cpu",
            protocol=protocol,
        ),
        None,
    )
    facts = cell.warm_up()
    block = cell.run_block()
    cell.finish()
    assert facts.num_parameters == 11_755_684
    assert block.loss is not None
    assert math.isfinite(block.loss)


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
