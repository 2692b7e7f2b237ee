"""Steps as CUDA graphs, with a fake for CUDA: which steps are one launch, and that each batch is one step."""

import math

import pytest
import torch
from fake_graphs import FakeCaptures
from loops import WORDS, setup_of, spec_of
from torch import Tensor

from castwise.apply.pytree import Batch
from castwise.apply.techniques.cuda_graph import StepGraph

CPU = torch.device("cpu")
WARM_UP = 3


class Counted:
    """A "step" that adds each batch's number to a list on the device, and returns it as the loss."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, batch: Batch) -> Tensor:
        self.seen.append(batch[0].flatten()[0].item())
        return batch[0].flatten()[0] * 1.0


def batch_of(number: int, size: int = 4) -> Batch:
    return torch.full((size, 2), float(number)), torch.full((size,), number)


def run(sizes: list[int], at_once: int) -> tuple[list[float], list[float], FakeCaptures]:
    """Return the batches in the order of their steps, the losses, and the captures."""
    step, captures = Counted(), FakeCaptures()
    graph = StepGraph(step, CPU, None, at_once, captures)  # type: ignore[arg-type]
    losses = [graph(batch_of(number, size)) for number, size in enumerate(sizes)]
    graph.flush()
    return step.seen, [loss.item() for loss in losses], captures


@pytest.mark.parametrize("at_once", [1, 4, 8])
@pytest.mark.parametrize(
    "sizes",
    [[4] * 2, [4] * 3, [4] * 19, [4] * 27, ([4] * 9 + [3]) * 4, [4] * 9 + [3, 2, 3, 2, 4, 4]],
    ids=["warm-up", "just warm", "rest", "whole launches", "a short last one", "three shapes"],
)
def test_every_batch_is_one_step_in_order(sizes: list[int], at_once: int) -> None:
    seen, losses, _ = run(sizes, at_once)
    expected = [float(number) for number in range(len(sizes))]
    assert seen == expected
    assert losses == expected


def test_remaining_steps_are_launched_one_by_one() -> None:
    _, _, captures = run([4] * (WARM_UP + 8 + 8 + 5), 8)
    assert captures.launches == [8, 8, 1, 1, 1, 1, 1]
    assert captures.num_captured == 2
    assert captures.num_aside == WARM_UP


def test_short_last_batch_has_its_own_graph() -> None:
    _, _, captures = run(([4] * (WARM_UP + 8) + [3]) * 3, 8)
    # The first epoch warms both shapes up; then 11 batches are a launch and three, and the short one is its own.
    assert captures.num_aside == WARM_UP + 1
    assert captures.launches == [8] + 2 * [8, 1, 1, 1, 1]


def test_loss_is_nan_before_the_launch() -> None:
    graph = StepGraph(Counted(), CPU, None, 8, FakeCaptures())  # type: ignore[arg-type]
    for number in range(WARM_UP):
        graph(batch_of(number))
    waiting = [graph(batch_of(10 + number)) for number in range(7)]
    assert all(math.isnan(loss.item()) for loss in waiting)
    last = graph(batch_of(17))
    assert [loss.item() for loss in (*waiting, last)] == [10.0 + number for number in range(8)]


def test_graph_copies_its_batches() -> None:
    step = Counted()
    graph = StepGraph(step, CPU, None, 1, FakeCaptures())  # type: ignore[arg-type]
    buffer = batch_of(0)
    for number in range(8):
        buffer[0].fill_(number)
        graph(buffer)
    assert step.seen == [float(number) for number in range(8)]


@pytest.mark.parametrize("at_once", [1, 4])
def test_recurrent_state_through_launches_and_epochs(at_once: int) -> None:
    found: list[list[float]] = []
    for graphed in (False, True):
        with setup_of(spec_of(WORDS, "fp32")) as (setup, batches):
            step = setup.step
            if graphed:
                graph = StepGraph(step._train, CPU, setup.task.recurrent_state, at_once, FakeCaptures())  # type: ignore[arg-type]
            losses: list[Tensor] = []
            for index in range(26):
                if index in {9, 18}:
                    if graphed:
                        graph.flush()
                    setup.task.begin_epoch()
                batch = batches[index % 4]
                if index in {8, 17}:  # a short last batch, then a new epoch
                    batch = (batch[0][:20], batch[1][: 20 * batch[0].shape[1]])
                losses.append((graph(batch) if graphed else step(batch)).detach())
            if graphed:
                graph.flush()
            found.append([loss.item() for loss in losses])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
