"""What is counted of a step, against formulas."""

import pytest
from work_counter import count_work, units_per_sample

from castwise.registry.suites import find_suite
from castwise.registry.workloads import find_workload

BATCH = 4


def test_linear_layers() -> None:
    work, width = count_work(find_workload("mlp-4096"), BATCH), 4096
    # Three products forward, three for the weights' gradients, two for the inputs': the first layer needs none.
    assert work.flops == 8 * 2 * BATCH * width**2
    products = [each for each in work.operations if each.flops]
    assert len(products) == 8
    bias = width
    assert sum(each.elements for each in products) == 8 * (width**2 + 2 * BATCH * width) + 3 * bias
    loss = [each.elements for each in work.operations if each.name.startswith("mse_loss")]
    assert loss == pytest.approx([2 * BATCH * width, 3 * BATCH * width], abs=2)
    assert (work.num_parameters, work.num_states, work.clips) == (50_343_936, 0, False)


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0"])
def test_backward_is_twice_forward_but_for_the_first_layers_input(name: str) -> None:
    row = find_workload(name)
    work = count_work(row, BATCH)
    forward = sum(each.flops for each in work.operations if each.name in ("convolution", "addmm"))
    assert 2.9 * forward < work.flops < 3 * forward
    assert work.num_states == 2  # Adam's


def test_each_batch_norm_reads_twice_and_writes_once_and_backward_the_same_of_two() -> None:
    work = count_work(find_workload("resnet50"), BATCH)
    forward = [each.elements for each in work.operations if each.name == "native_batch_norm"]
    backward = [each.elements for each in work.operations if each.name == "native_batch_norm_backward"]
    assert len(forward) == len(backward) == 53
    # The first of forward, the last of backward: 64 channels of 112² each.
    outputs = BATCH * 64 * 112**2
    assert (forward[0], backward[-1]) == (3 * outputs, 5 * outputs)
    additions = [each.elements for each in work.operations if each.name == "add_" and each.elements > 0]
    assert len(additions) == 16  # the residuals


@pytest.mark.parametrize(("name", "width"), [("lstm-lm", 200), ("lstm-lm-1500", 1500)])
def test_language_models(name: str, width: int) -> None:
    work, vocabulary, tokens = count_work(find_workload(name), BATCH), 33_278, 35 * BATCH
    recurrent = 2 * 4 * 2 * width**2
    assert work.flops == 3 * 2 * tokens * (recurrent + vocabulary * width)
    assert work.clips
    assert work.num_parameters == 2 * vocabulary * width + vocabulary + recurrent + 2 * 4 * 2 * width
    table = next(each.elements for each in work.operations if each.name == "embedding")
    assert table == 2 * tokens * width


def test_a_runs_own_optimizer_counts() -> None:
    recipe = find_suite("wrn-cifar10").recipes["ten-epochs"]
    assert count_work(find_workload("wrn-28-10"), 1, recipe).num_states == 1
    assert count_work(find_workload("mnist-cnn"), 1).num_states == 2


def test_units_of_a_sample() -> None:
    assert units_per_sample(find_workload("lstm-lm")) == 35
    assert units_per_sample(find_workload("mnist-cnn")) == 1
