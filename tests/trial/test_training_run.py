"""Whole training runs on small data: epochs, validation, divergence, and going on from a checkpoint."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import FakeCaptures
from small_step import cpu_spec, user_spec
from torch import Tensor

from castwise.apply.precision import read_fp32_precision
from castwise.apply.techniques import cuda_graph as graphs
from castwise.errors import UsageError
from castwise.registry.workloads import find_workload
from castwise.spec.recipe import Loader, Optimizer, Recipe, Schedule
from castwise.spec.trial import TrialSpec
from castwise.trial import training_run
from castwise.trial.data import datasets, training_data
from castwise.trial.data.training_data import BatchSource, make_training_data
from castwise.trial.data.transforms import STATISTICS
from castwise.trial.data.wikitext import make_corpus
from castwise.trial.memory import CpuMemory
from castwise.trial.models import build_task
from castwise.trial.training_run import EpochSteps, TrainingRun, why_diverged
from castwise.trial.user_model.load import build_user_model

WORDS = " ".join(f"w{number * number % 11}" for number in range(900))


def digits(_: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return images whose label can be read off them: bright in the row that is the label's."""
    count = 96 if split == "train" else 40
    labels = torch.arange(count) % 10
    images = torch.randint(60, (count, 1, 28, 28), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 2 * label : 2 * label + 3] = 255
    return images, labels


@pytest.fixture(autouse=True)
def small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(datasets.IMAGE_SETS, "mnist", digits)
    monkeypatch.setattr(training_data, "load_wikitext2", lambda _: make_corpus(WORDS, WORDS[:900], WORDS[:900]))


def spec(precision: str = "fp32", lr: float = 1.0, seed: int = 0, loss_scale: str = "none", **recipe: Any) -> TrialSpec:
    """Return a small MNIST run without loader processes."""
    fields: dict[str, Any] = {
        "epochs": 2,
        "transform": "mnist",
        "loader": Loader(num_workers=0),
        "optimizer": Optimizer(name="Adadelta", arguments={"lr": lr}),
        "validate_each_epoch": True,
        "validation_workers": 0,
        "validation_batch_size": 16,
    }
    made = Recipe(**(fields | recipe))
    return cpu_spec(precision, loss_scale=loss_scale, batch_size=20, data_set="mnist", recipe=made, seed=seed)


def run(a_spec: TrialSpec, tmp_path: Path, epochs: int | None = None, checkpoint: Path | None = None) -> TrainingRun:
    training = TrainingRun(a_spec, tmp_path, checkpoint)
    assert a_spec.recipe is not None
    for _ in range(a_spec.recipe.epochs if epochs is None else epochs):
        training.run_epoch()
    return training


def test_kept_weights_validate_as_the_run_did(tmp_path: Path) -> None:
    """By the workload's own model, whatever the loop was."""
    a_spec = spec("bf16-master", epochs=1).model_copy(update={"techniques": ("channels-last", "matmul-stem")})
    training = run(a_spec, tmp_path)
    training.keep_weights(tmp_path / "kept" / "run.pt")
    (epoch,) = training.finish().epochs
    task = build_task(find_workload("mnist-cnn"))
    task.model.load_state_dict(torch.load(tmp_path / "kept" / "run.pt", weights_only=True))
    images, labels = digits(tmp_path, "test")
    mean, deviation = (part[0] for part in STATISTICS["mnist"])
    with torch.no_grad():
        out = task.model.eval()((images / 255 - mean) / deviation)
    assert epoch.validation_loss == pytest.approx(float(torch.nn.functional.cross_entropy(out, labels)), rel=0.02)


def test_failed_write_removes_older_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    training = run(spec(epochs=1), tmp_path)
    (tmp_path / "run.pt").write_bytes(b"of another run")
    monkeypatch.setattr(torch, "save", fail)
    with pytest.warns(UserWarning, match="nothing was written to .*No space left"):
        training.keep_weights(tmp_path / "run.pt")
    assert not (tmp_path / "run.pt").exists()


def test_validation_at_end_does_not_change_training(tmp_path: Path) -> None:
    with_it, without, each = (
        run(spec(**changes), tmp_path).finish().epochs
        for changes in ({"validate_each_epoch": False, "validate_at_end": True}, {"validate_each_epoch": False}, {})
    )
    assert [epoch.losses for epoch in with_it] == [epoch.losses for epoch in without]
    assert [epoch.accuracy for epoch in with_it] == [None, each[-1].accuracy]
    assert with_it[-1].accuracy is not None
    assert with_it[-1].validation_loss == each[-1].validation_loss
    assert [epoch.validation_seconds for epoch in with_it] == [0.0, 0.0], "it is no part of the run"


def always_say_the_same(model: torch.nn.Module) -> None:
    """Make an untrained model say the same digit of every image: it is right in a tenth of the cases."""
    final = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    with torch.no_grad():
        final.weight.zero_()
        final.bias.copy_(torch.arange(10.0))


NO_LEARNING = Optimizer(name="SGD", arguments={"lr": 0.0})


def test_validation_at_end_affects_neither_memory_nor_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def noting(*given: Any) -> tuple[BatchSource, BatchSource]:
        training, validation = make_training_data(*given)
        assert validation is not None
        return training, validation.prepared(lambda batch: told.append("validation") or batch)

    def read_memory(_: CpuMemory) -> None:
        told.append(f"memory, {read_fp32_precision()['cuda.matmul']}")

    monkeypatch.setattr(training_run, "make_training_data", noting)
    monkeypatch.setattr(CpuMemory, "driver_used", read_memory)
    training = TrainingRun(
        spec(epochs=1, validate_each_epoch=False, validate_at_end=True, optimizer=NO_LEARNING), tmp_path
    )
    always_say_the_same(training.model)
    epoch = training.run_epoch()
    training.finish()
    assert told == ["memory, ieee", *["validation"] * 3], "before numeric state and graphs are let go of, too"
    assert (epoch.accuracy, epoch.diverged) == (pytest.approx(0.1), None)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_run_learns(precision: str, tmp_path: Path) -> None:
    first, *_, last = run(spec(precision, epochs=3), tmp_path).finish().epochs
    assert (first.num_steps, first.num_samples) == (5, 96)  # the last batch is short
    assert first.counted_samples == 96
    assert first.losses[0][0] == 0
    assert last.losses[-1][0] == 4
    assert last.validation_loss is not None
    assert first.validation_loss is not None
    assert last.validation_loss < first.validation_loss
    assert last.accuracy is not None
    assert last.accuracy > 0.3
    assert 0 <= first.data_seconds <= first.seconds
    assert first.placing_seconds is not None
    assert 0 <= first.placing_seconds <= first.seconds - first.data_seconds
    assert first.validation_seconds > 0
    assert not first.shortened


def test_placing_is_not_data_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*given: Any) -> tuple[BatchSource, None]:
        source, _ = make_training_data(*given)
        return replace(source, place=lambda batch: (time.sleep(0.1), batch)[1]), None

    monkeypatch.setattr(training_run, "make_training_data", slow)
    epoch = TrainingRun(spec(epochs=1, max_steps=3), tmp_path).run_epoch()
    assert epoch.placing_seconds is not None
    assert epoch.placing_seconds >= 0.3
    assert epoch.data_seconds <= epoch.seconds - 0.3


@pytest.mark.parametrize(
    ("recipe", "num_steps", "counted_samples"),
    [
        ({"max_steps": 2}, 2, 40),
        ({"skip_batches": 2, "loader": Loader(num_workers=0, drop_last=True)}, 4, 40),
    ],
)
def test_shortened_epoch_and_skipped_batches(
    recipe: dict[str, Any], num_steps: int, counted_samples: int, tmp_path: Path
) -> None:
    (epoch,) = run(spec(epochs=1, **recipe), tmp_path).finish().epochs
    assert (epoch.num_steps, epoch.num_samples) == (num_steps, 20 * num_steps)
    assert (epoch.counted_samples, epoch.shortened) == (counted_samples, "max_steps" in recipe)
    assert (epoch.counted_seconds < epoch.seconds) == ("skip_batches" in recipe)


@pytest.mark.parametrize(
    ("precision", "scale", "techniques"),
    [("fp32", "none", ()), ("bf16-master", "dynamic", ()), ("fp32", "none", ("resident-data",))],
)
def test_resumed_run_equals_uninterrupted_run(
    precision: str, scale: str, techniques: tuple[str, ...], tmp_path: Path
) -> None:
    schedule = Schedule(kind="triangular", arguments={"max_mul": 10.0, "ratio": 2.0})
    a_spec = spec(precision, epochs=3, schedule=schedule, loss_scale=scale, max_steps=2)
    a_spec = a_spec.model_copy(update={"techniques": techniques})
    whole = run(a_spec, tmp_path).finish().epochs
    checkpoint = tmp_path / "checkpoints" / "run.pt"
    interrupted = run(a_spec, tmp_path, epochs=1, checkpoint=checkpoint)
    interrupted.close()
    resumed = TrainingRun(a_spec, tmp_path, checkpoint)
    assert len(resumed.epochs) == 1
    resumed.run_epoch()
    resumed.run_epoch()
    epochs = resumed.finish().epochs
    assert [epoch.losses for epoch in epochs] == [epoch.losses for epoch in whole]
    assert [epoch.accuracy for epoch in epochs] == [epoch.accuracy for epoch in whole]
    assert [epoch.learning_rate for epoch in epochs] == [epoch.learning_rate for epoch in whole]
    assert not checkpoint.exists(), "a finished run needs no checkpoint"


def test_non_finite_loss_ends_the_run(tmp_path: Path) -> None:
    a_spec = spec(
        lr=math.inf, read_loss_every_step=True, epochs=3, optimizer=Optimizer(name="SGD", arguments={"lr": 1e30})
    )
    epoch = run(a_spec, tmp_path, epochs=1).epochs[0]
    assert epoch.diverged is not None
    assert "nan" in epoch.diverged or "inf" in epoch.diverged
    assert epoch.validation_loss is None, "there is nothing to validate"


def test_accuracy_of_chance_is_diverged(tmp_path: Path) -> None:
    training = TrainingRun(spec(optimizer=NO_LEARNING), tmp_path)
    always_say_the_same(training.model)
    epoch = training.run_epoch()
    assert epoch.accuracy == pytest.approx(0.1)
    assert epoch.diverged is not None
    assert "no better than chance" in epoch.diverged


def test_language_model_trains_on_text(tmp_path: Path) -> None:
    recipe = Recipe(
        epochs=2,
        loader=Loader(resident=True, num_workers=0, shuffle=False),
        schedule=Schedule(kind="plateau", arguments={"factor": 0.25}),
        validate_each_epoch=True,
        validation_batch_size=2,
    )
    a_spec = cpu_spec(workload="lstm-lm", data_set="wikitext-2", recipe=recipe)
    first, second = run(a_spec, tmp_path).finish().epochs
    assert first.num_samples == 4 * first.num_steps, "a sample is a column"
    assert first.accuracy is None
    assert second.validation_loss is not None
    assert second.validation_loss < math.log(33_278) / 2, "eleven words are soon known"


# Techniques


@pytest.mark.parametrize(
    "techniques",
    [
        ("resident-data",),
        ("resident-data", "channels-last", "foreach-optimizer", "pad-channels-4"),
        ("loader-workers",),
    ],
    ids="+".join,
)
@pytest.mark.slow
def test_run_with_techniques_learns(techniques: tuple[str, ...], tmp_path: Path) -> None:
    plain = run(spec(epochs=3), tmp_path).finish().epochs[-1]
    changed = run(spec(epochs=3).model_copy(update={"techniques": techniques}), tmp_path).finish().epochs[-1]
    assert (changed.num_steps, changed.num_samples) == (plain.num_steps, plain.num_samples)
    assert changed.accuracy is not None
    assert changed.accuracy > 0.3
    assert changed.accuracy == pytest.approx(plain.accuracy, abs=0.2)


def test_no_step_sync_reads_fewer_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Tensor] = []
    item = Tensor.item
    monkeypatch.setattr(Tensor, "item", lambda self: reads.append(self) or item(self))
    reading = spec("fp32", loss_scale="dynamic", read_loss_every_step=True, validate_each_epoch=False, epochs=1)
    plain = run(reading, tmp_path).finish().epochs
    with_reads = len(reads)
    reads.clear()
    quiet = run(reading.model_copy(update={"techniques": ("no-step-sync",)}), tmp_path).finish().epochs
    assert with_reads >= 5
    assert len(reads) < with_reads - 4
    assert [loss for _, loss in quiet[0].losses] == pytest.approx([loss for _, loss in plain[0].losses], rel=1e-5)


@pytest.mark.parametrize("graph", ["cuda-graph", "cuda-graph-8"])
@pytest.mark.slow
def test_run_with_graphs_equals_plain_run(graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are made within the graph, of what an epoch draws; here the graph is a fake."""
    captures = FakeCaptures()
    monkeypatch.setattr(graphs, "CudaCaptures", lambda _: captures)
    resident_run = spec(epochs=4, schedule=Schedule(kind="step", arguments={"gamma": 0.5}))
    resident_run = resident_run.model_copy(update={"techniques": ("resident-data",), "batch_size": 10})
    with_graph = resident_run.model_copy(update={"techniques": ("resident-data", graph)})
    plain, graphed = (run(each, tmp_path).finish().epochs for each in (resident_run, with_graph))
    assert [epoch.num_steps for epoch in graphed] == [10] * 4
    assert [epoch.num_samples for epoch in graphed] == [96] * 4
    assert [epoch.losses for epoch in graphed] == [epoch.losses for epoch in plain]
    assert [epoch.accuracy for epoch in graphed] == [epoch.accuracy for epoch in plain]
    # An epoch is 9 whole batches, three of which warm the first one up, and a short one, which is warm in the second.
    rest = [1] * 10 if graph == "cuda-graph" else [8, 1, 1]
    assert captures.launches == [1] * 6 + 3 * rest


# The steps of an epoch


def steps_of(losses: list[float], *, read_every_loss: bool = True) -> EpochSteps:
    steps = EpochSteps(read_every_loss, len(losses))
    for index, loss in enumerate(losses):
        steps.add(index, torch.tensor(loss), 4)
    return steps


@pytest.mark.parametrize("read_every_loss", [False, True])
def test_kept_losses(read_every_loss: bool) -> None:
    few = steps_of([3.0, 2.0, 1.0], read_every_loss=read_every_loss)
    assert (few.num_steps, few.num_samples) == (3, 12)
    assert few.read_losses() == ((0, 3.0), (1, 2.0), (2, 1.0))
    many = steps_of([float(step) for step in range(1005)], read_every_loss=read_every_loss).read_losses()
    assert [index for index, _ in many] == [*range(0, 1005, 10), 1004]
    assert all(index == loss for index, loss in many)


@pytest.mark.parametrize(
    ("losses", "have_diverged"),
    [
        ([math.nan] * 19, False),
        ([1.0] * 100 + [math.inf] + [math.nan] * 19, True),
        ([math.nan] * 19 + [1.0] + [math.nan] * 19, False),
    ],
)
def test_diverged_after_many_non_finite_losses(losses: list[float], have_diverged: bool) -> None:
    assert steps_of(losses).have_diverged == have_diverged
    assert not steps_of(losses, read_every_loss=False).have_diverged, "nobody has read them"


def test_why_diverged() -> None:
    assert why_diverged(((0, math.nan), (9, 2.0)), 10) is None, "it recovered"
    reason = why_diverged(((0, 1.0), (5, math.inf), (9, math.nan)), 10)
    assert reason is not None
    assert "nan at step 10" in reason
    assert "first at step 6" in reason


OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.arange(96.0).sin().reshape(24, 4)


def validate(model):
    assert not model.training and not torch.is_grad_enabled()
    return model(inputs.to(next(model.parameters()).dtype)).float().mean()

def build():
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return {"model": model, "batch": loader, "loss": nn.MSELoss(), "training_set": loader, "validate": validate}
"""


def own_spec(tmp_path: Path, precision: str = "fp32", seed: int = 0, more: str = "") -> TrialSpec:
    (tmp_path / "own.py").write_text(OWN.replace('"validate": validate', f'"validate": validate{more}'))
    recipe = Recipe(epochs=2, validate_each_epoch=True)
    return user_spec(tmp_path / "own.py", precision, batch_size=4, recipe=recipe, seed=seed)


def test_a_users_own_model_trains_on_its_training_set_and_is_scored(tmp_path: Path) -> None:
    runs = []
    for precision, seed in (("fp32", 0), ("fp32", 0), ("fp32", 1), ("bf16-true", 0)):
        runs.append(run(own_spec(tmp_path, precision, seed), tmp_path))
        runs[-1].close()  # before the next one sets another precision
    first, again, other, narrow = runs
    assert [epoch.num_steps for epoch in first.epochs] == [6, 6]
    assert [epoch.num_samples for epoch in first.epochs] == [24, 24]
    assert [epoch.score for epoch in again.epochs] == [epoch.score for epoch in first.epochs]
    assert [epoch.losses for epoch in again.epochs] == [epoch.losses for epoch in first.epochs]
    assert other.epochs[0].losses[0] != first.epochs[0].losses[0], "another seed has other weights and another order"
    # With the same seed another precision has the same weights, order and dropout.
    assert narrow.epochs[0].losses[0][1] == pytest.approx(first.epochs[0].losses[0][1], rel=0.03)
    assert first.facts.higher_is_better is False
    code = (tmp_path / "own.py").read_text().replace('"training_set": loader, ', "")
    (tmp_path / "own.py").write_text(code)
    model = user_spec(tmp_path / "own.py").user_model
    assert model is not None
    assert build_user_model(model).higher_is_better is None, "without a training set there is no score"


def test_a_users_optimizer_step_takes_as_many_batches_as_are_accumulated(tmp_path: Path) -> None:
    training = run(own_spec(tmp_path, more=', "accumulate": 4').model_copy(update={"batch_size": 16}), tmp_path)
    assert [epoch.num_steps for epoch in training.epochs] == [1, 1], "the last two batches are left out"


def test_a_training_set_without_batches_is_refused(tmp_path: Path) -> None:
    spec = own_spec(tmp_path)
    (tmp_path / "own.py").write_text(OWN.replace('"training_set": loader', '"training_set": iter(loader)'))
    with pytest.raises(UsageError, match=r"gave no batches in epoch 2\. It must give them in every epoch"):
        run(spec, tmp_path)


def test_a_score_that_is_no_number_is_refused(tmp_path: Path) -> None:
    spec = own_spec(tmp_path)
    (tmp_path / "own.py").write_text(OWN.replace(".float().mean()", ""))
    with pytest.raises(UsageError, match=r"validate of own.py:build returned Tensor, not a number"):
        run(spec, tmp_path)
    (tmp_path / "own.py").write_text(OWN.replace(".float().mean()", ".float().mean() * float('nan')"))
    training = run(spec, tmp_path, epochs=1)
    assert training.epochs[0].diverged == "after epoch 1 the score was nan"


def test_pairs_of_runs_begin_with_the_same_weights_and_batches(tmp_path: Path) -> None:
    """Of castwise's own workloads: with dropout, and a loader that shuffles."""

    def start(precision: str, seed: int = 0) -> list[float]:
        a_spec = spec(precision, lr=0.01, seed=seed, max_steps=3, validate_each_epoch=False)
        return [loss for _, loss in run(a_spec, tmp_path, 1).epochs[0].losses]

    expected = start("fp32")
    for precision in ("bf16-mixed", "bf16-true"):
        assert start(precision) == pytest.approx(expected, rel=0.02)
    assert start("fp32", seed=1) != pytest.approx(expected, rel=0.02)
