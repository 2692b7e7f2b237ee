"""Emitted scripts: run as a user would, they compute what the measured loop computes, and import no castwise."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from scripts import check_whole, measured_loss, output_of, run_script, spec_of

from castwise.errors import UsageError
from castwise.registry.precisions import PRECISIONS, find_precision
from castwise.registry.techniques import TECHNIQUES, why_unsupported
from castwise.registry.workloads import WORKLOADS, find_workload
from castwise.render.emit.script import script_of
from castwise.render.emit.source import copy_definitions
from castwise.spec.recipe import Loader, Optimizer, Recipe, Schedule
from castwise.spec.trial import TrialSpec


@pytest.mark.parametrize(
    ("workload", "precision", "techniques"),
    [
        ("mnist-cnn", "bf16-mixed", ("channels-last",)),
        ("mnist-cnn", "fp16-mixed", ("no-step-sync",)),
        ("mnist-cnn", "fp16-master", ("foreach-optimizer",)),
        ("resnet18", "fp32", ("channels-last", "fused-optimizer")),
        ("lstm-lm", "fp32", ("pad-vocabulary", "chunked-loss")),
        ("resnet18", "fp32", ("space-to-depth",)),
        ("mnist-cnn", "fp32", ("matmul-stem",)),
        ("mnist-cnn", "bf16-master", ("compiled-update",)),
    ],
)
def test_a_script_computes_what_was_measured(
    workload: str, precision: str, techniques: tuple[str, ...], tmp_path: Path
) -> None:
    spec = spec_of(workload, precision, techniques)
    assert why_unsupported(spec) is None
    loss, speed, unit = run_script(script_of(spec), tmp_path)
    assert loss == pytest.approx(measured_loss(spec), rel=1e-5)
    assert speed > 0
    assert unit == find_workload(workload).unit


def _combinations() -> list[TrialSpec]:
    on_gpu = {"device": "cuda:0"}
    rows = [row.name for row in WORKLOADS if row.family != "fastai_resnet"] + ["timm:resnet18", "torchvision:alexnet"]
    made = [spec_of(name, **on_gpu) for name in rows]
    made += [spec_of("mnist-cnn", row.name, **on_gpu, loss_scale=row.loss_scale) for row in PRECISIONS]
    for row in TECHNIQUES:
        for workload in ("lstm-lm", "mnist-cnn"):
            spec = spec_of(workload, "fp16-mixed", (row.name,), **on_gpu)
            made += [spec] if why_unsupported(spec) is None else []
    made += [spec_of("resnet50", "bf16-mixed", ("space-to-depth", "cuda-graph"), **on_gpu)]
    made += [spec_of("mnist-cnn", "bf16-mixed", ("channels-last", "matmul-stem", "compiled-update"), **on_gpu)]
    made += [spec_of("lstm-lm-1500", "bf16-mixed", ("compiled-update", "pad-hidden", "pad-vocabulary"), **on_gpu)]
    made += [spec_of("resnet50", "fp16-mixed", ("channels-last", "space-to-depth", "max-pool-kernel"), **on_gpu)]
    kernels = ("channels-last", "max-pool-kernel", "batch-norm-kernel")
    made += [spec_of("resnet50", "bf16-master", kernels, **on_gpu)]
    made += [spec_of("resnet50", "fp16-mixed", ("space-to-depth", "compiled-update", *kernels), **on_gpu)]
    made += [spec_of("wrn-28-10", "bf16-mixed", ("compiled-update", "matmul-stem", *kernels[::2]), **on_gpu)]
    for name, scale in (("fp32", "none"), ("fp16-master", "128"), ("bf16-master", "none"), ("fp16-mixed", "dynamic")):
        made.append(spec_of("resnet50", name, ("compiled-update", "cuda-graph"), **on_gpu, loss_scale=scale))
    return made


@pytest.mark.parametrize("spec", _combinations(), ids=lambda spec: spec.label)
def test_every_script_is_whole_and_imports_no_castwise(spec: TrialSpec) -> None:
    check_whole(script_of(spec), wrapped={"compute_loss", "batches"})


@pytest.mark.parametrize("name", sorted({row.optimizer.name for row in WORKLOADS if row.family != "fastai_resnet"}))
def test_an_optimizer_counts_its_steps_on_the_device_where_the_measured_one_does(name: str) -> None:
    row = next(r for r in WORKLOADS if r.optimizer.name == name and r.family != "fastai_resnet")
    text = script_of(spec_of(row.name, "fp16-mixed", ("no-step-sync",), device="cuda:0"))
    capturable = "capturable" in inspect.signature(getattr(torch.optim, name)).parameters
    assert ("capturable=True" in text) is capturable


def test_a_script_with_kernels_runs_where_torch_has_to_compute(tmp_path: Path) -> None:
    spec = spec_of("resnet18", "fp32", ("channels-last", "max-pool-kernel", "batch-norm-kernel"))
    loss, _, _ = run_script(script_of(spec), tmp_path)
    plain = spec.model_copy(update={"techniques": ("channels-last",)})
    assert loss == pytest.approx(measured_loss(plain), rel=1e-5)


def test_a_script_says_what_it_is() -> None:
    text = script_of(spec_of("resnet50", "bf16-mixed", ("channels-last",)), "8,000 images/s on a GPU.")
    assert text.startswith('"""resnet50, bf16-mixed, channels-last: batch 2.\n\n8,000 images/s on a GPU.')
    assert f"torch.backends.fp32_precision = '{find_precision('bf16-mixed').float32_matmul}'" in text


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (spec_of("fastai-resnet18"), "its model starts from weights"),
        (spec_of("mnist-cnn", data_set="mnist"), "on synthetic data and one device"),
    ],
)
def test_what_has_no_script_is_refused(spec: TrialSpec, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        script_of(spec)


def test_definitions_come_with_what_they_use() -> None:
    imports, text = copy_definitions(["castwise.worker.techniques.cuda_graph:StepGraph"])
    assert "# Steps on the capture's stream" in text
    assert "@dataclass(frozen=True)\nclass _Captured:" in text
    assert text.index("def tree_signature") < text.index("class StepGraph")
    assert "TechniqueError = RuntimeError" in text
    assert "import torch" in imports
    assert not any("castwise" in line for line in imports)


def test_statements_about_a_definition_and_imports_within_it_are_followed() -> None:
    _, text = copy_definitions(["castwise.worker.kernels.max_pool.module:use_max_pool_kernel"])
    assert "max_pool.register_autograd(" in text
    assert text.index("def max_pool(") < text.index("max_pool.register_autograd(")
    assert "castwise.worker" not in text


@pytest.mark.parametrize("root", ["castwise.spec.loss_scale:nothing_such", "castwise.worker.no_module:x"])
def test_what_does_not_exist_cannot_be_copied(root: str) -> None:
    with pytest.raises((KeyError, FileNotFoundError)):
        copy_definitions([root])


# Training runs


def training_of(
    *techniques: str, precision: str = "fp32", data_set: str = "synthetic:mnist", **recipe: object
) -> TrialSpec:
    fields: dict[str, object] = {"epochs": 3, "loader": Loader(num_workers=0), "read_loss_every_step": True}
    made = Recipe.model_validate(fields | recipe)
    workload = "mnist-cnn" if data_set.endswith("mnist") else "wrn-28-10"
    spec = spec_of(workload, precision, techniques, kind="training", recipe=made, data_set=data_set, batch_size=20)
    return spec.model_copy(update={"loss_scale": find_precision(precision).loss_scale})


@pytest.mark.parametrize(
    ("precision", "techniques", "schedule"),
    [
        ("bf16-mixed", ("resident-data", "channels-last"), Schedule(kind="step", arguments={"gamma": 0.5})),
        ("fp16-master", ("resident-data", "no-step-sync"), Schedule()),
        (
            "fp32",
            ("resident-data", "foreach-optimizer"),
            Schedule(kind="triangular", arguments={"max_mul": 10.0, "ratio": 5.0}),
        ),
    ],
    ids=str,
)
def test_the_script_of_a_training_run_trains(
    precision: str, techniques: tuple[str, ...], schedule: Schedule, tmp_path: Path
) -> None:
    optimizer = Optimizer(name="SGD", arguments={"lr": 0.01, "momentum": 0.9})
    spec = training_of(*techniques, precision=precision, schedule=schedule, optimizer=optimizer)
    assert why_unsupported(spec) is None
    out = output_of(script_of(spec), tmp_path, "--epochs", "2", "--steps", "3")
    first, second, accuracy, speed = out.splitlines()
    assert re.fullmatch(r"epoch 1 loss \d\.\S+ \S+ images/s", first)
    assert re.fullmatch(r"epoch 2 loss \d\.\S+ \S+ images/s", second)
    assert re.fullmatch(r"accuracy 0\.\d{4}", accuracy)
    assert re.fullmatch(r"\S+ images/s", speed)


@pytest.mark.parametrize("graph", [(), ("cuda-graph",), ("cuda-graph-8",)])
@pytest.mark.parametrize("data_set", ["mnist", "cifar10", "synthetic:mnist"])
def test_every_script_of_a_training_run_is_whole(data_set: str, graph: tuple[str, ...]) -> None:
    schedule = Schedule(kind="step", arguments={"gamma": 0.5})
    spec = training_of("resident-data", *graph, data_set=data_set, precision="fp16-mixed", schedule=schedule)
    text = script_of(spec.model_copy(update={"device": "cuda:0"}))
    check_whole(text, wrapped={"compute_loss", "batches"})
    assert ("step.flush()" in text) is (graph == ("cuda-graph-8",))
    assert ("torchvision.datasets" in text) is (data_set in ("mnist", "cifar10"))
    assert ("loss.item()  # as the source does" in text) is (not graph)


@pytest.mark.parametrize(
    ("technique", "is_tensor"), [("fused-optimizer", False), ("compiled-update", True), ("cuda-graph", True)]
)
def test_a_rate_that_moves_is_a_tensor_where_a_number_would_be_held(technique: str, is_tensor: bool) -> None:
    schedule = Schedule(kind="step", arguments={"gamma": 0.5})
    optimizer = Optimizer(name="Adam", arguments={"lr": 0.01})
    spec = training_of("resident-data", technique, schedule=schedule, optimizer=optimizer)
    assert ("keep_rates_on_device(optimizer, DEVICE)" in script_of(spec)) is is_tensor


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (training_of(), "reads it through a loader"),
        (training_of("resident-data", schedule=Schedule(kind="one_cycle")), "no schedule 'one_cycle'"),
        (training_of("resident-data", data_set="wikitext-2"), "does not go with the data set wikitext-2"),
    ],
    ids=["loader", "schedule", "text"],
)
def test_a_training_run_without_a_script_is_refused(spec: TrialSpec, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        script_of(spec)
