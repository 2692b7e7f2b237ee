"""Techniques applied to a user's own model: its optimizer, its scheduler, its steps and its layers."""

import copy
import functools
import itertools
import types
from typing import Any

import pytest
import torch
from fake_graphs import FakeCaptures
from own_steps import as_dict, halving, in_groups, losses_of, step_of, train_on_dict
from small_step import CPU, cross_entropy, make_batch, make_net
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, lr_scheduler

from castwise.apply.pytree import tree_signature
from castwise.apply.techniques import cuda_graph
from castwise.apply.techniques.first_conv import find_stem, use_matmul_stem, use_space_to_depth
from castwise.apply.techniques.optimizer_options import set_as_wanted
from castwise.errors import TechniqueError
from castwise.registry.techniques import step_config_of
from castwise.trial.kernels.max_pool.module import KernelMaxPool, use_max_pool_kernel


def hooked(optimizer: Optimizer) -> Optimizer:
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Other(Optimizer):
    """An optimizer that torch does not have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> FakeCaptures:
    made = FakeCaptures()
    monkeypatch.setattr(cuda_graph, "CudaCaptures", lambda device: made)
    return made


# Optimizers


@pytest.mark.parametrize("technique", ["fused-optimizer", "foreach-optimizer", "no-step-sync"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("optimizer", [in_groups, lambda net: SGD(net.parameters(), lr=0.1, momentum=0.9), None])
def test_losses_of_20_steps_equal_the_plain_loop(technique: str, dynamic: bool, optimizer: Any) -> None:
    parts = {"optimizer": optimizer, "clip_grad_norm": 1.0}
    found, expected = (
        losses_of(step_of("fp32", *names, dynamic=dynamic, **parts), [make_batch()]) for names in ((technique,), ())
    )
    assert torch.allclose(found, expected, rtol=500 * torch.finfo(torch.float32).eps)
    assert expected[-1] < expected[0]


@pytest.mark.usefixtures("traced")
def test_compiled_update_with_parameter_groups() -> None:
    parts = {"optimizer": in_groups, "clip_grad_norm": 1.0, "accumulate": 2}
    images, labels = make_batch()
    halves = [((images[:8], labels[:8]), (images[8:], labels[8:]))]
    found = losses_of(step_of("bf16-master", "compiled-update", **parts), halves)
    expected = losses_of(step_of("bf16-master", **parts), halves)
    assert torch.allclose(found, expected, rtol=torch.finfo(torch.bfloat16).eps)


def test_settings_of_all_parameter_groups() -> None:
    optimizer = in_groups(make_net())
    set_as_wanted(optimizer, step_config_of(("fused-optimizer",)), torch.device("cuda"))
    for settings in (optimizer.defaults, *optimizer.param_groups):
        assert (settings["fused"], settings["foreach"], settings["capturable"]) == (True, False, True)
    plain = in_groups(make_net())
    before = copy.deepcopy(plain.state_dict())
    set_as_wanted(plain, step_config_of(("channels-last",)), torch.device("cuda"))
    assert plain.state_dict() == before


@pytest.mark.parametrize(
    ("make", "technique", "words"),
    [
        (lambda tensors: hooked(AdamW(tensors)), "compiled-update", "Hooks on the steps of AdamW"),
        (lambda tensors: hooked(AdamW(tensors)), "cuda-graph", "Hooks on the steps of AdamW"),
        (lambda tensors: AdamW(tensors, lr=torch.tensor(0.1)), "foreach-optimizer", "its learning rate is a tensor"),
        (Other, "fused-optimizer", "Other has no fused kernels"),
        (RMSprop, "fused-optimizer", "RMSprop has no fused kernels; torch's SGD, Adam and AdamW have"),
        (Other, "compiled-update", "Other has no foreach kernels"),
        (Other, "cuda-graph", "Other counts its steps on the host"),
        (Adagrad, "cuda-graph-8", "Adagrad counts its steps on the host"),
        (lambda tensors: AdamW(tensors, fused=True), "fused-optimizer", "AdamW is fused already"),
    ],
)
def test_unfit_optimizer_is_refused(make: Any, technique: str, words: str) -> None:
    with pytest.raises(TechniqueError, match=words):
        set_as_wanted(make(make_net().parameters()), step_config_of((technique,)), torch.device("cuda"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (NAdam, "cannot undo a step of NAdam"),
        (Other, "cannot undo a step of Other"),
        (lambda tensors: AdamW([{"params": list(tensors), "fused": True}]), "Some groups of AdamW are fused"),
    ],
)
def test_optimizer_without_device_skip_is_refused(make: Any, words: str) -> None:
    optimizer, loop = make(make_net().parameters()), step_config_of(("no-step-sync",))
    with pytest.raises(TechniqueError, match=words):
        set_as_wanted(optimizer, loop, CPU, may_skip=True)


def test_dampening_is_refused() -> None:
    with pytest.raises(TechniqueError, match="dampening weakens"):
        step_of("fp32", "no-step-sync", dynamic=True, optimizer=lambda net: SGD(net.parameters(), 0.1, 0.9, 0.5))


def test_existing_momentum_is_kept() -> None:
    def stepped(net: nn.Module) -> Optimizer:
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    found, expected = (
        losses_of(step_of("fp32", *names, dynamic=True, optimizer=stepped), [make_batch()])
        for names in (("no-step-sync",), ())
    )
    assert torch.allclose(found, expected, rtol=500 * torch.finfo(torch.float32).eps)


def test_compiled_update_refuses_a_weight_trained_later() -> None:
    def partly(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        model(batch[0])
        return model.conv(batch[0]).square().mean()

    step = step_of("fp32", "compiled-update", training_step=partly)
    step(make_batch())
    step._compute_loss = cross_entropy
    with pytest.raises(TechniqueError, match="trained in the first step"):
        step(make_batch())


def test_fused_optimizer_becomes_foreach() -> None:
    fused = lambda net: AdamW(net.parameters(), fused=True)  # noqa: E731
    step = step_of("fp32", "foreach-optimizer", dynamic=True, optimizer=fused)
    assert torch.isfinite(losses_of(step, [make_batch()])).all()


def test_scheduler_with_no_step_sync_is_refused() -> None:
    with pytest.raises(TechniqueError, match="waits in each step"):
        step_of("fp32", "no-step-sync", dynamic=True, scheduler=lr_scheduler.ConstantLR)


# Schedulers whose rates the device reads


def with_its_own(net: nn.Module) -> dict[str, Any]:
    """Return an optimizer and a scheduler that exist before castwise has the model."""
    optimizer = in_groups(net)
    return {"optimizer": optimizer, "scheduler": halving(optimizer)}


@pytest.mark.parametrize(
    ("names", "made", "dynamic"),
    [
        *itertools.product(
            (("cuda-graph",), ("fused-optimizer", "cuda-graph")), ("by functions", "before"), (False, True)
        ),
        (("compiled-update",), "by functions", True),
        (("compiled-update",), "before", False),
    ],
)
@pytest.mark.usefixtures("captures", "traced")
def test_rates_are_read_on_the_device(names: tuple[str, ...], made: str, dynamic: bool) -> None:
    parts = {"optimizer": in_groups, "scheduler": halving} if made == "by functions" else {"parts_of": with_its_own}
    step, plain = (step_of("fp32", *each, dynamic=dynamic, **parts) for each in (names, ()))
    places = [group["lr"] for group in step.optimizer.param_groups]
    assert all(isinstance(place, torch.Tensor) for place in places)
    found, expected = (losses_of(each, [make_batch()]) for each in (step, plain))
    assert torch.allclose(found, expected, rtol=500 * torch.finfo(torch.float32).eps)
    for place, group, wanted in zip(places, step.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert group["lr"] is place
        assert float(place) == pytest.approx(wanted["lr"], rel=1e-6)
        assert wanted["lr"] < 1e-6


def test_skipped_step_of_a_graph_does_not_move_the_schedule(captures: FakeCaptures) -> None:
    step = step_of("fp32", "cuda-graph", dynamic=True, optimizer=in_groups, scheduler=halving)
    images, labels = make_batch()
    for scale in (1.0, 1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0):
        step((images * scale, labels))
    assert captures.launches == [1] * 4
    assert float(step.optimizer.param_groups[0]["lr"]) == pytest.approx(1e-3, rel=1e-6)  # as after five steps
    assert step.scaling.skipped_steps == 2


@pytest.mark.parametrize("technique", ["cuda-graph", "compiled-update"])
@pytest.mark.usefixtures("captures")
def test_scheduler_of_momentum_is_refused(technique: str) -> None:
    def one_cycle(optimizer: Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)

    with pytest.raises(TechniqueError, match="more than the learning rate, such as momentum"):
        losses_of(step_of("fp32", technique, optimizer=in_groups, scheduler=one_cycle), [make_batch()])


class Hooking(lr_scheduler.ConstantLR):
    """A scheduler that hooks something to the optimizer's steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        hooked(optimizer)


class Growing(lr_scheduler.ConstantLR):
    """A scheduler that thaws weights as it goes."""

    def step(self, *_: Any) -> None:
        super().step()
        if self.last_epoch == 2:
            self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            self.base_lrs.append(1e-3)


def patched_before(net: nn.Module) -> dict[str, Any]:
    optimizer = in_groups(net)
    optimizer.step = types.MethodType(lambda self, *a: type(self).step(self, *a), optimizer)  # type: ignore[method-assign]
    return {"optimizer": optimizer, "scheduler": halving(optimizer)}


def patched_after(net: nn.Module) -> dict[str, Any]:
    parts = with_its_own(net)
    optimizer = parts["optimizer"]
    stepped = optimizer.step
    optimizer.step = functools.update_wrapper(functools.partial(stepped), stepped)
    return parts


@pytest.mark.parametrize("technique", ["cuda-graph", "compiled-update"])
@pytest.mark.parametrize(
    "parts",
    [{"optimizer": in_groups, "scheduler": Hooking}, {"parts_of": patched_before}, {"parts_of": patched_after}],
    ids=["hooks", "patched before", "patched after"],
)
@pytest.mark.usefixtures("captures")
def test_hooked_step_with_a_scheduler_is_refused(technique: str, parts: dict[str, Any]) -> None:
    with pytest.raises(TechniqueError, match="Hooks on the steps of AdamW"):
        step_of("fp32", technique, **parts)


@pytest.mark.usefixtures("captures")
def test_scheduler_that_adds_weights_is_refused() -> None:
    with pytest.raises(TechniqueError, match="gives the optimizer more weights"):
        losses_of(step_of("fp32", "cuda-graph", optimizer=in_groups, scheduler=Growing), [make_batch()])


@pytest.mark.usefixtures("captures")
def test_graph_of_8_steps_with_reduce_lr_on_plateau() -> None:
    step = step_of("fp32", "cuda-graph-8", optimizer=in_groups, scheduler=lr_scheduler.ReduceLROnPlateau)
    assert losses_of(step, [make_batch()]).isfinite().all()


@pytest.mark.parametrize(
    ("techniques", "optimizer", "reason"),
    [
        (("cuda-graph-8",), in_groups, "stepped each step: take cuda-graph"),
        (("cuda-graph",), lambda net: SGD(net.parameters(), lr=0.1), "fused-optimizer or compiled-update"),
        (("cuda-graph",), lambda net: Adam(net.parameters(), foreach=False), "fused-optimizer or compiled-update"),
    ],
)
def test_scheduler_of_a_graph_is_refused(
    techniques: tuple[str, ...], optimizer: Any, reason: str, captures: FakeCaptures
) -> None:
    with pytest.raises(TechniqueError, match=reason):
        step_of("fp32", *techniques, optimizer=optimizer, scheduler=lr_scheduler.ConstantLR)
    assert captures.num_captured == 0


# Graphs


@pytest.mark.parametrize(("technique", "launches"), [("cuda-graph", [1] * 17), ("cuda-graph-8", [8, 8, 1])])
def test_graph_of_nested_batches(technique: str, launches: list[int], captures: FakeCaptures) -> None:
    images, labels = make_batch()
    batches = [as_dict((images + number, labels)) for number in range(3)]
    parts = {"optimizer": in_groups, "training_step": train_on_dict}
    found = losses_of(step_of("fp32", technique, **parts), batches)
    assert captures.launches == launches
    assert torch.equal(found, losses_of(step_of("fp32", **parts), batches))


@pytest.mark.usefixtures("captures")
def test_graph_refuses_batches_of_numbers() -> None:
    images, labels = make_batch()
    step = step_of("fp32", "cuda-graph", training_step=train_on_dict)
    with pytest.raises(TechniqueError, match="batches of tensors alone"):
        losses_of(step, [as_dict((images, labels)) | {"weight": 0.5}])


def test_tree_signature() -> None:
    one, two = torch.ones(1), torch.ones(2)
    nests = [
        (one, one),
        [one, one],
        (one, two),
        (one, one.int()),
        (one, None, one),
        (None, one, one),
        {"a": one, "b": one},
        {"b": one, "a": one},
        {"a": one, "c": one},
        (one, [one, {"a": one}]),
    ]
    assert len({tree_signature(nest) for nest in nests}) == len(nests)
    assert tree_signature((one, {"a": [two]})) == tree_signature((one + 1, {"a": [two + 1]}))
    with pytest.raises(TypeError, match="float is neither a tensor nor"):
        tree_signature((one, [one, {"a": 0.5}]))


def test_graph_of_two_signatures(captures: FakeCaptures) -> None:
    images, labels = make_batch()
    batches = [{"images": images, "targets": [labels]}, {"targets": [labels], "images": images + 1}]
    parts = {"optimizer": in_groups, "training_step": train_on_dict}
    found = losses_of(step_of("fp32", "cuda-graph", **parts), batches)
    assert torch.equal(found, losses_of(step_of("fp32", **parts), batches))
    assert captures.num_captured == 2


# Layers


def test_pooling_with_hooks_is_kept() -> None:
    model = nn.Sequential(nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2))
    model[0].register_forward_hook(lambda *_: None)
    use_max_pool_kernel(model)
    assert [type(module) for module in model] == [nn.MaxPool2d, KernelMaxPool]


@pytest.mark.parametrize("stride", [1, 2])
def test_stem_takes_a_single_image(stride: int) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, stride))
    model = copy.deepcopy(plain)
    (use_matmul_stem if stride == 1 else use_space_to_depth)(model)
    image = torch.randn(3, 8, 8)
    assert torch.equal(model(image), plain(image))


def test_convolution_with_hooks_is_no_stem() -> None:
    net = make_net()
    assert find_stem(net) == ("conv", net.conv)
    net.conv.register_forward_hook(lambda *_: None)
    assert find_stem(net) == ("conv", None)
