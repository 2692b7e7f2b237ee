"""Techniques on a GPU: the plain loop's losses, graphs that replay every step, steps skipped within them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import ADADELTA, IMAGES, WORDS, losses_of, setup_of, spec_of
from real_gpu import on_gpus
from torch import Tensor

from castwise.apply.precision import autocast_maker, numeric_state
from castwise.apply.techniques.first_conv import SpaceToDepthConv
from castwise.registry.precisions import find_precision
from castwise.registry.technique_fit import why_unsupported
from castwise.registry.techniques import TECHNIQUES, join
from castwise.spec.recipe import Loader, Optimizer, Recipe, Schedule
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.trial.steady_run import SteadyRun
from castwise.trial.training_run import TrainingRun

pytestmark = on_gpus()

DEVICE = "cuda:0"
EPS = {"fp32": torch.finfo(torch.float32).eps, "bf16-mixed": 2.0**-7, "fp16-mixed": 2.0**-10, "fp16-master": 2.0**-10}
# As in test_loop.py: a loss is a mean of many numbers, and float32 training amplifies what another order begins.
# Source of fp16's 1: Wide ResNets compiled on an H200 were 0.6 of it away after 16 steps.
BOUNDS = {"fp32": 2000 * EPS["fp32"]} | {
    name: (0.5 if name == "bf16-mixed" else 1.0) * eps for name, eps in EPS.items() if name != "fp32"
}

TOGETHER = [
    ("channels-last", "cudnn-search", "fused-optimizer", "cuda-graph"),
    ("channels-last", "fused-optimizer", "compile", "cuda-graph"),
    ("pad-channels-8", "channels-last", "fused-optimizer", "cuda-graph"),
    ("fused-optimizer", "pad-vocabulary", "chunked-loss", "cuda-graph"),
    ("fused-optimizer", "pad-vocabulary", "compile", "cuda-graph"),
    ("no-step-sync", "cuda-graph"),
    ("channels-last", "cudnn-search", "fused-optimizer", "cuda-graph-8"),
    ("fused-optimizer", "compile", "cuda-graph-8"),
    ("compiled-update", "cuda-graph"),
    ("channels-last", "cudnn-search", "compile", "compiled-update", "cuda-graph"),
    ("pad-vocabulary", "compile", "compiled-update", "cuda-graph-8"),
]


def cases() -> list[tuple[str, str, tuple[str, ...]]]:
    # The small models have no blocks that are alike; sums in float16 differ by more than what is allowed here.
    left_out = ("compile-max-autotune", "compile-blocks", "fp16-accumulation")
    alone = [(row.name,) for row in TECHNIQUES if row.name not in left_out]
    names = [
        (workload, precision, tuple(row.name for row in TECHNIQUES if row.name in techniques))
        for workload in (IMAGES, WORDS, ADADELTA)
        for precision in EPS
        for techniques in alone + TOGETHER
    ]
    return [setup for setup in names if why_unsupported(spec_of(*setup[:2], *setup[2], device=DEVICE)) is None]


@pytest.mark.parametrize(
    ("workload", "precision", "names"), cases(), ids=lambda value: value if isinstance(value, str) else join(value)
)
def test_the_losses_of_20_steps_are_the_plain_loop_s(workload: str, precision: str, names: tuple[str, ...]) -> None:
    found = losses_of(spec_of(workload, precision, *names, device=DEVICE))
    expected = losses_of(spec_of(workload, precision, device=DEVICE))
    assert ((found - expected) / expected).abs().max() < BOUNDS[precision]


def test_a_graph_is_captured_once_and_replayed_for_its_shape() -> None:
    with setup_of(spec_of(IMAGES, "fp16-mixed", "fused-optimizer", "cuda-graph", device=DEVICE)) as (setup, batches):
        graph = setup.step.graph
        assert graph is not None
        for index in range(3):
            setup.step(batches[index])
        assert graph.captures.seconds is None
        losses = [setup.step(batches[index % 4]) for index in range(8)]
        captured = graph.captures.seconds
        assert captured is not None
        assert len({loss.data_ptr() for loss in losses}) == len(losses)  # none is overwritten by the next replay
        assert len({loss.item() for loss in losses}) == len(losses)
        short = tuple(part[:3] for part in batches[0])
        assert setup.step(short).isfinite()
        assert setup.step(batches[0]).isfinite()
        assert graph.captures.seconds == captured
        assert setup.step(short).isfinite()
        assert graph.captures.seconds > captured, "a second shape is warm after a step"


@pytest.mark.parametrize("workload", [IMAGES, ADADELTA])
@pytest.mark.parametrize("update", ["fused-optimizer", "compiled-update", None])
def test_a_graph_skips_the_step_that_overflows_and_grows_its_scale(workload: str, update: str | None) -> None:
    if update == "fused-optimizer" and workload == ADADELTA:
        pytest.skip("torch has no fused Adadelta")
    names = ("cuda-graph",) if update is None else (update, "cuda-graph")
    with setup_of(spec_of(workload, "fp16-mixed", *names, device=DEVICE)) as (setup, batches):
        step = setup.step
        for index in range(5):
            step(batches[index % 4])
        taken, scale = step.scaling.skipped_steps, step.scaling.read_scale()
        weights = [weight.detach().clone() for weight in step.model.parameters()]
        images, *rest = batches[0]
        step((images * math.inf, *rest))
        assert step.scaling.skipped_steps == taken + 1
        assert scale is not None
        assert step.scaling.read_scale() == scale / 2
        for weight, old in zip(step.model.parameters(), weights, strict=True):
            assert torch.equal(weight, old)
        step(batches[1])
        assert step.scaling.skipped_steps == taken + 1
        assert not all(torch.equal(w, old) for w, old in zip(step.model.parameters(), weights, strict=True))


def test_several_steps_are_one_launch_and_each_is_taken_once() -> None:
    spec = spec_of(IMAGES, "fp16-mixed", "fused-optimizer", "cuda-graph-8", device=DEVICE)
    with setup_of(spec) as (setup, batches):
        for index in range(3):
            setup.step(batches[index])
        waiting = [setup.step(batches[index % 4]) for index in range(7)]
        assert all(loss.isnan() for loss in waiting)
        last = setup.step(batches[3])
        found = torch.stack([*waiting, last])
        assert found.isfinite().all()
        assert len(set(found.tolist())) == 8
        rest = setup.step(batches[0])
        assert rest.isnan()
        setup.step.flush()
        assert rest.isfinite()


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize(("kernel", "padding", "side"), [(7, 3, 224), (3, 1, 224), (3, 0, 299)])
def test_a_convolution_over_pairs_of_pixels_is_the_plain_one(
    precision: str, kernel: int, padding: int, side: int
) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(3, 64, kernel, 2, padding, bias=False)
    plain = plain.to(DEVICE, memory_format=torch.channels_last)
    paired = SpaceToDepthConv(3, 64, kernel, 2, padding, bias=False, device=DEVICE)
    paired.weight = plain.weight
    images = torch.randn(8, 3, side, side, device=DEVICE).contiguous(memory_format=torch.channels_last)
    outputs, gradients = [], []
    with numeric_state(find_precision(precision)):
        for conv in (plain, paired, torch.compile(paired)):
            plain.weight.grad = None
            with autocast_maker(find_precision(precision), "cuda")():
                output = conv(images)
            assert output.is_contiguous(memory_format=torch.channels_last)
            output.float().square().mean().backward()
            outputs.append(output.detach().float())
            assert plain.weight.grad is not None
            gradients.append(plain.weight.grad)
    for found in (outputs, gradients):
        for other in found[1:]:
            assert (other - found[0]).norm() / found[0].norm() < (100 if precision == "fp32" else 4) * EPS[precision]


def test_a_graph_draws_a_new_dropout_mask_each_step() -> None:
    with setup_of(spec_of(ADADELTA, "fp32", "cuda-graph", device=DEVICE)) as (setup, batches):
        for module in setup.task.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
        for group in setup.step.optimizer.param_groups:
            group["lr"] = 0.0
        losses = [setup.step(batches[0]).item() for _ in range(8)]
        assert len(set(losses[4:])) == 4


def test_a_new_epoch_starts_from_zeros_in_a_graph_too() -> None:
    spec = spec_of(WORDS, "fp32", "fused-optimizer", "cuda-graph", device=DEVICE)
    plain = spec.model_copy(update={"techniques": ()})
    found: list[list[float]] = []
    for each in (spec, plain):
        with setup_of(each) as (setup, batches):
            losses = []
            for index in range(12):
                if index in {6, 9}:
                    setup.task.begin_epoch()
                batch = batches[index % 4]
                if index == 8:  # a short last batch, then a new epoch
                    batch = (batch[0][:20], batch[1][: 20 * batch[0].shape[1]])
                losses.append(setup.step(batch).item())
            found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=BOUNDS["fp32"])


def test_a_graph_s_memory_is_seen() -> None:
    """The allocator takes what a replay uses for free; the plain loop's peak says what it must be about."""
    peaks = []
    for names in ((), ("cuda-graph",)):
        torch.cuda.empty_cache()
        spec = spec_of(IMAGES, "fp32", *names, device=DEVICE).model_copy(update={"batch_size": 256})
        setup = SteadyRun(
            spec.model_copy(update={"protocol": MeasurementProtocol(warm_up_seconds=0.5, block_seconds=0.01)}), None
        )
        setup.warm_up()
        setup.run_block()
        peaks.append(setup.finish().peak_allocated_bytes or 0)
        del setup
    assert peaks[1] == pytest.approx(peaks[0], rel=0.3)


def test_a_graph_s_steady_cell_is_timed_and_recorded() -> None:
    spec = TrialSpec(
        workload="mnist-cnn",
        precision="fp16-mixed",
        loss_scale="dynamic",
        batch_size=64,
        device=DEVICE,
        techniques=("channels-last", "cudnn-search", "cuda-graph"),
        protocol=MeasurementProtocol(warm_up_steps=5, warm_up_seconds=0.5, block_seconds=0.01),
    )
    setup = SteadyRun(spec, None)
    facts = setup.warm_up()
    blocks = [setup.run_block() for _ in range(3)]
    samples = setup.finish()
    assert facts.capture_seconds is not None
    assert facts.first_step_seconds is not None
    assert facts.first_step_seconds > 0  # it belongs to the set-up, and the warm-up begins behind it
    assert facts.warm_up_seconds > 0
    assert all(block.seconds > 0 and math.isfinite(block.loss) and block.loss_scale for block in blocks)
    assert samples.peak_allocated_bytes


def run_mnist(techniques: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **recipe: Any) -> Any:
    from castwise.trial.data import datasets

    def digits(_: Path, split: str) -> tuple[Tensor, Tensor]:
        count = 1000 if split == "train" else 100
        labels = torch.arange(count) % 10
        images = torch.randint(60, (count, 1, 28, 28), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
        for image, label in zip(images, labels.tolist(), strict=True):
            image[0, 2 * label : 2 * label + 3] = 255
        return images, labels

    monkeypatch.setitem(datasets.IMAGE_SETS, "mnist", digits)
    fields: dict[str, Any] = {
        "epochs": 2,
        "transform": "mnist",
        "loader": Loader(num_workers=0),
        "optimizer": Optimizer(name="Adadelta", arguments={"lr": 1.0}),
        "schedule": Schedule(kind="step", arguments={"gamma": 0.5}),
        "validate_each_epoch": True,
        "validation_workers": 0,
    }
    spec = TrialSpec(
        workload="mnist-cnn",
        precision="bf16-mixed",
        loss_scale="none",
        batch_size=64,
        device=DEVICE,
        data_set="mnist",
        kind="training",
        recipe=Recipe(**(fields | recipe)),
        techniques=techniques,
    )
    assert why_unsupported(spec) is None
    training = TrainingRun(spec, tmp_path)
    return [training.run_epoch() for _ in range(2)]


@pytest.mark.parametrize(
    "techniques",
    [
        ("pinned-transfer",),
        ("loader-workers", "pinned-transfer"),
        ("resident-data", "channels-last", "cuda-graph"),
        ("resident-data", "channels-last", "compile", "cuda-graph"),
        ("resident-data", "cuda-graph-8"),
        ("resident-data", "channels-last", "cudnn-search", "compile", "cuda-graph-8"),
        ("loader-workers", "cuda-graph-8"),
    ],
    ids="+".join,
)
def test_a_training_run_with_techniques_learns(
    techniques: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = run_mnist((), monkeypatch, tmp_path)
    epochs = run_mnist(techniques, monkeypatch, tmp_path)
    assert [epoch.num_steps for epoch in epochs] == [16, 16]  # the last one's batch is short
    assert [epoch.learning_rate for epoch in epochs] == pytest.approx([epoch.learning_rate for epoch in plain])
    assert epochs[-1].accuracy == pytest.approx(plain[-1].accuracy, abs=0.1)


@pytest.mark.parametrize("graph", ["cuda-graph", "cuda-graph-8"])
def test_a_schedule_moves_the_rate_within_a_graph(graph: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a rate of 0 from the second epoch on nothing is learned, whatever rate was captured."""
    sgd = Optimizer(name="SGD", arguments={"lr": 0.1, "momentum": 0.9})
    still = Schedule(kind="step", arguments={"gamma": 0.0})
    names = ("resident-data", "fused-optimizer", graph)
    epochs = run_mnist(names, monkeypatch, tmp_path, optimizer=sgd, schedule=still)
    assert epochs[0].losses[-1][1] < epochs[0].losses[0][1]
    assert epochs[1].learning_rate == 0.0
    assert epochs[1].validation_loss == pytest.approx(epochs[0].validation_loss, rel=0.05)
