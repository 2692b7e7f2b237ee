"""A user's own model, with what techniques do to its optimizer, its layers and its steps."""

import copy
from typing import Any

import pytest
import torch
from fake_graphs import FakeCaptures
from own_steps import as_dict, in_groups, losses_of, step_of, train_on_dict
from small_step import make_batch, make_net
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop, lr_scheduler

from castwise.errors import UsageError
from castwise.measure.nests import has_only_tensors
from castwise.measure.techniques import graph
from castwise.measure.techniques.loop import loop_of
from castwise.measure.techniques.optimizers import set_as_wanted
from castwise.measure.techniques.stems import find_stem


class Other(Optimizer):
    """One that torch does not have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> FakeCaptures:
    """What graphs of this test are captured by."""
    made = FakeCaptures()
    monkeypatch.setattr(graph, "CudaCaptures", lambda device: made)
    return made


# Optimizers


@pytest.mark.parametrize("technique", ["fused-optimizer", "foreach-optimizer", "no-step-sync"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("optimizer", [in_groups, lambda net: SGD(net.parameters(), lr=0.1, momentum=0.9), None])
def test_the_losses_of_20_steps_are_the_plain_loop_s(technique: str, dynamic: bool, optimizer: Any) -> None:
    parts = {"optimizer": optimizer, "clip_grad_norm": 1.0}
    found, expected = (
        losses_of(step_of("fp32", *names, dynamic=dynamic, **parts), [make_batch()]) for names in ((technique,), ())
    )
    assert torch.allclose(found, expected, rtol=500 * torch.finfo(torch.float32).eps)
    assert expected[-1] < expected[0]


@pytest.mark.slow
def test_a_compiled_update_of_an_optimizer_with_groups() -> None:
    parts = {"optimizer": in_groups, "clip_grad_norm": 1.0, "accumulate": 2}
    images, labels = make_batch()
    halves = [((images[:8], labels[:8]), (images[8:], labels[8:]))]
    found = losses_of(step_of("bf16-master", "compiled-update", **parts), halves)
    expected = losses_of(step_of("bf16-master", **parts), halves)
    assert torch.allclose(found, expected, rtol=torch.finfo(torch.bfloat16).eps)


def test_an_optimizer_is_set_in_all_its_groups_and_says_so() -> None:
    optimizer = in_groups(make_net())
    set_as_wanted(optimizer, loop_of(("fused-optimizer",)), torch.device("cuda"))
    for settings in (optimizer.defaults, *optimizer.param_groups):
        assert (settings["fused"], settings["foreach"], settings["capturable"]) == (True, False, True)
    plain = in_groups(make_net())
    before = copy.deepcopy(plain.state_dict())
    set_as_wanted(plain, loop_of(("channels-last",)), torch.device("cuda"))
    assert plain.state_dict() == before


@pytest.mark.parametrize(
    ("make", "technique", "words"),
    [
        (Other, "fused-optimizer", "Other has no fused kernels"),
        (RMSprop, "fused-optimizer", "RMSprop has no fused kernels; torch's SGD, Adam and AdamW have"),
        (Other, "compiled-update", "Other has no foreach kernels"),
        (Other, "cuda-graph", "what Other counts on the host"),
        (Adagrad, "cuda-graph-8", "what Adagrad counts on the host"),
        (lambda tensors: AdamW(tensors, fused=True), "fused-optimizer", "AdamW is fused already"),
    ],
)
def test_an_optimizer_that_cannot_be_set_so_is_refused(make: Any, technique: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        set_as_wanted(make(make_net().parameters()), loop_of((technique,)), torch.device("cuda"))


@pytest.mark.parametrize("technique", ["cuda-graph", "cuda-graph-8", "compiled-update"])
def test_a_scheduler_s_rate_is_held_by_no_graph(technique: str, captures: FakeCaptures) -> None:
    with pytest.raises(UsageError, match="the learning rate fixed, and your scheduler moves it"):
        step_of("fp32", technique, scheduler=lr_scheduler.ConstantLR)
    assert captures.num_captured == 0


# Graphs


@pytest.mark.parametrize(("technique", "launches"), [("cuda-graph", [1] * 17), ("cuda-graph-8", [8, 8, 1])])
def test_steps_on_batches_of_any_form_are_launched(technique: str, launches: list[int], captures: FakeCaptures) -> None:
    images, labels = make_batch()
    batches = [as_dict((images + number, labels)) for number in range(3)]
    parts = {"optimizer": in_groups, "training_step": train_on_dict}
    found = losses_of(step_of("fp32", technique, **parts), batches)
    assert captures.launches == launches
    assert torch.equal(found, losses_of(step_of("fp32", **parts), batches))


@pytest.mark.usefixtures("captures")
def test_a_batch_with_what_would_stay_the_first_s_is_refused() -> None:
    images, labels = make_batch()
    step = step_of("fp32", "cuda-graph", training_step=train_on_dict)
    with pytest.raises(UsageError, match="batches of tensors alone"):
        losses_of(step, [as_dict((images, labels)) | {"weight": 0.5}])


def test_what_is_in_a_batch_is_seen_at_any_depth() -> None:
    one = torch.ones(1)
    assert has_only_tensors((one, [one, {"a": one, "b": None}]))
    assert not has_only_tensors((one, [one, {"a": "words"}]))


# Layers


def test_a_convolution_with_hooks_keeps_its_place() -> None:
    net = make_net()
    assert find_stem(net) == ("conv", net.conv)
    net.conv.register_forward_hook(lambda *_: None)
    assert find_stem(net) == ("conv", None)
