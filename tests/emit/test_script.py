"""Emitted scripts: run as a user would, they compute what the measured loop computes, and import no castwise."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from scripts import check_whole, files_of, measured_losses, output_of, run_script, spec_of
from torchvision import models

from castwise.emit.script import script_of
from castwise.emit.source import copy_definitions
from castwise.errors import UsageError
from castwise.registry import workloads
from castwise.registry.precisions import NARROW_PRECISIONS, PRECISIONS, find_precision
from castwise.registry.technique_fit import why_unsupported
from castwise.registry.techniques import TECHNIQUES
from castwise.registry.workloads import WORKLOADS, Workload, find_workload, known_workload
from castwise.spec.recipe import Loader, Optimizer, Recipe, Schedule
from castwise.spec.trial import TrialSpec
from castwise.trial.models import build_task

_NEEDS_TORCHAO = pytest.mark.skipif(not find_spec("torchao"), reason="pip install 'castwise[fp8]'")


def _narrowed(row: Workload) -> Workload:
    options = dict(row.options)
    if row.family == "rnn_lm":
        options["width"] = 16
    elif row.family == "transformer":  # castwise's large layers of FP8 are 2048 wide
        options |= {"width": 32, "depth": 2, "heads": 4, "hidden": 2048 if row.name == "gpt2" else 48}
        options |= {"key_heads": 2} if "key_heads" in options else {}
        options |= {"length": 16, "vocabulary": 50} if row.unit == "tokens" else {}
    shape = {"mlp-4096": (64,), "resnet18": (3, 96, 96)}.get(row.name, row.input_shape)
    return replace(row, options=tuple(options.items()), input_shape=shape)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make models narrow that a CPU takes seconds a step for."""
    monkeypatch.setattr(workloads, "WORKLOADS", tuple(map(_narrowed, WORKLOADS)))
    known_workload.cache_clear()
    yield
    known_workload.cache_clear()


@pytest.mark.usefixtures("narrow", "traced")
@pytest.mark.parametrize(
    ("workload", "precision", "techniques", "loss_scale"),
    [
        ("mnist-cnn", "fp32", (), "none"),
        ("mnist-cnn", "bf16-mixed", ("channels-last",), "none"),
        ("timm:test_vit", "fp32", (), "none"),
        ("mlp-4096", "fp16-mixed", (), "dynamic"),
        ("mlp-4096", "fp16-mixed", ("no-step-sync",), "dynamic-apex"),
        ("mlp-4096", "fp16-mixed", ("compiled-update",), "dynamic"),
        ("mlp-4096", "fp16-true", (), "dynamic"),
        ("mlp-4096", "fp16-master", ("foreach-optimizer",), "128"),
        ("mnist-cnn", "bf16-master", ("compiled-update",), "none"),
        ("mnist-cnn", "fp32", ("matmul-stem",), "none"),
        ("mnist-cnn", "fp32", ("compile",), "none"),
        ("mlp-4096", "bf16-master", ("fused-optimizer",), "none"),
        ("lstm-lm", "fp32", ("pad-vocabulary", "chunked-loss"), "none"),
        ("gru-lm", "bf16-mixed", (), "none"),
    ],
)
def test_a_script_computes_what_was_measured_over_20_steps(
    workload: str, precision: str, techniques: tuple[str, ...], loss_scale: str, tmp_path: Path
) -> None:
    spec = spec_of(workload, precision, techniques, loss_scale=loss_scale)
    assert why_unsupported(spec) is None
    epochs = run_script(spec, tmp_path)
    assert [epoch.loss for epoch in epochs] == measured_losses(spec)
    assert all(epoch.speed > 0 for epoch in epochs)
    assert {epoch.unit for epoch in epochs} == {find_workload(workload).unit}


@pytest.mark.usefixtures("narrow", "traced")
@pytest.mark.parametrize(
    ("name", "precision", "techniques"),
    [
        ("gpt2", "fp32", ("pad-vocabulary", "chunked-loss", "short-gelu")),
        ("llama-1b", "bf16-mixed", ("chunked-loss", "selective-checkpointing")),
        ("bert-base", "bf16-master", ("activation-checkpointing", "sparse-prediction")),
        ("vit-b16", "fp32", ("compile-blocks",)),
        ("resnet18", "fp32", ("channels-last",)),
        ("resnet18", "fp32", ("channels-last", "space-to-depth")),
        ("resnet18", "fp32", ("channels-last", "activation-checkpointing")),
        pytest.param("gpt2", "fp8-tensorwise", ("pad-vocabulary",), marks=_NEEDS_TORCHAO),
        pytest.param("gpt2", "fp8-tensorwise", ("fp8-large-layers",), marks=_NEEDS_TORCHAO),
        pytest.param("gpt2", "mxfp8", ("pad-vocabulary",), marks=_NEEDS_TORCHAO),
    ],
)
@pytest.mark.slow
def test_a_script_of_a_larger_model_computes_what_was_measured(
    name: str, precision: str, techniques: tuple[str, ...], tmp_path: Path
) -> None:
    spec = spec_of(name, precision, ("fused-optimizer", *techniques))
    # Few, of what takes a CPU long: a product of FP8 takes 60 ms.
    steps = 3 if name == "resnet18" else 5 if find_precision(precision).float8_recipe else 20
    epochs = run_script(spec, tmp_path, steps)
    assert [epoch.loss for epoch in epochs] == measured_losses(spec, steps)


@pytest.mark.usefixtures("narrow")
@pytest.mark.slow
def test_a_script_runs_inductor_s_code(tmp_path: Path) -> None:
    spec = spec_of("mlp-4096", "fp32", ("compile", "compiled-update"))
    losses = [epoch.loss for epoch in run_script(spec, tmp_path, steps=5)]
    assert losses == measured_losses(spec, steps=5)


@pytest.mark.parametrize("technique", ["compile", "compile-blocks"])
def test_a_script_keeps_compiled_code_apart_by_autocast_dtype(technique: str, tmp_path: Path) -> None:
    tags = {
        precision: re.findall("cache_key_tag = (.*)", "".join(files_of(spec, tmp_path).values()))
        for precision in ("fp16-mixed", "bf16-mixed", "fp32")
        for spec in [spec_of("resnet18", precision, (technique,))]
    }
    assert tags == {"fp16-mixed": ['"float16"'], "bf16-mixed": ['"bfloat16"'], "fp32": []}


@pytest.mark.parametrize(
    ("device", "techniques", "has_loss", "has_kernel"),
    [("cuda:0", ("chunked-loss",), True, True), ("cpu", ("chunked-loss",), True, False), ("cuda:0", (), False, False)],
)
@pytest.mark.parametrize("workload", ["gpt2", "lstm-lm"])
def test_a_script_has_no_loss_in_chunks_that_it_does_not_call(
    workload: str, device: str, techniques: tuple[str, ...], has_loss: bool, has_kernel: bool
) -> None:
    text = "".join(script_of(spec_of(workload, "bf16-mixed", techniques, device=device)).values())
    assert ("chunked_loss(" in text) == has_loss
    assert ("cross_entropy_(" in text, "import triton" in text) == (has_kernel, has_kernel)


def _combinations() -> list[TrialSpec]:
    on_gpu = {"device": "cuda:0"}
    rows = [row.name for row in WORKLOADS if row.family != "fastai_resnet"] + ["timm:resnet18", "torchvision:alexnet"]
    made = [spec_of(name, **on_gpu) for name in rows]
    made += [spec_of("mnist-cnn", row.name, **on_gpu, loss_scale=row.loss_scale) for row in PRECISIONS]
    made += [spec_of("gpt2", row.name, ("compile",), **on_gpu) for row in NARROW_PRECISIONS if row.float8_recipe]
    for row in TECHNIQUES:
        for workload in ("lstm-lm", "mnist-cnn"):
            spec = spec_of(workload, "fp16-mixed", (row.name,), **on_gpu)
            made += [spec] if why_unsupported(spec) is None else []
    made += [
        spec_of("resnet50", "bf16-mixed", ("channels-last", "cudnn-search", "fused-optimizer", "compile"), **on_gpu)
    ]
    graph = ("channels-last", "fused-optimizer", "no-step-sync", "compile", "cuda-graph")
    made += [spec_of("resnet50", "fp16-master", graph, **on_gpu, loss_scale="dynamic")]
    made += [spec_of("resnet50", "bf16-mixed", ("space-to-depth", "cuda-graph"), **on_gpu)]
    made += [spec_of("resnet50", "bf16-mixed", ("compile-blocks",), **on_gpu)]
    made += [spec_of("mnist-cnn", "bf16-mixed", ("channels-last", "matmul-stem", "compiled-update"), **on_gpu)]
    made += [spec_of("lstm-lm-1500", "bf16-mixed", ("compiled-update", "pad-hidden", "pad-vocabulary"), **on_gpu)]
    made += [spec_of("resnet50", "fp16-mixed", ("channels-last", "space-to-depth", "max-pool-kernel"), **on_gpu)]
    kernels = ("channels-last", "max-pool-kernel", "batch-norm-kernel")
    made += [spec_of("resnet50", "bf16-master", kernels, **on_gpu)]
    made += [spec_of("resnet50", "fp16-mixed", ("space-to-depth", "compiled-update", *kernels), **on_gpu)]
    made += [spec_of("wrn-28-10", "bf16-mixed", ("compiled-update", "matmul-stem", *kernels[::2]), **on_gpu)]
    for name in ("dpn92", "resnet9", "wrn-28-10", "lstm-lm", "gru-lm", "mlp-4096", "efficientnet_b0", "mnist-cnn"):
        layout = ("channels-last", "batch-norm-kernel") if find_workload(name).unit == "images" else ()
        for graph in ("cuda-graph", "cuda-graph-8"):
            techniques = (*layout, "compiled-update", "compile", graph)
            made += [spec_of(name, row.name, techniques, **on_gpu, loss_scale=row.loss_scale) for row in PRECISIONS]
    for name, scale in (("fp32", "none"), ("fp16-master", "128"), ("bf16-master", "none"), ("fp16-mixed", "dynamic")):
        made.append(spec_of("resnet50", name, ("compiled-update", "cuda-graph"), **on_gpu, loss_scale=scale))
    return made


def test_every_script_is_whole_and_imports_no_castwise(tmp_path: Path) -> None:
    texts: list[str] = []
    for spec in _combinations():
        files = [*script_of(spec).values()]
        texts += files
        lengths = [len(text.splitlines()) for text in files]
        assert lengths[0] <= 160, spec.label
        assert max(map(len, files[0].splitlines())) <= 140, spec.label
        assert len(files) == 1 or sum(lengths) > 150, spec.label  # a second file only if the first would be too long
    check_whole(texts, {"compute_loss", "train_step"}, tmp_path)


@pytest.mark.parametrize("name", sorted({row.optimizer.name for row in WORKLOADS if row.family != "fastai_resnet"}))
def test_an_optimizer_counts_its_steps_on_the_device_where_the_measured_one_does(name: str) -> None:
    row = next(r for r in WORKLOADS if r.optimizer.name == name and r.family != "fastai_resnet")
    spec = spec_of(row.name, "fp16-mixed", ("no-step-sync",), device="cuda:0", loss_scale="dynamic")
    text = next(iter(script_of(spec).values()))
    capturable = "capturable" in inspect.signature(getattr(torch.optim, name)).parameters
    assert ("capturable=True" in text) is capturable


@pytest.mark.usefixtures("narrow")
def test_a_script_with_kernels_runs_where_torch_has_to_compute(tmp_path: Path) -> None:
    spec = spec_of("resnet18", "fp32", ("channels-last", "max-pool-kernel", "batch-norm-kernel"))
    losses = [epoch.loss for epoch in run_script(spec, tmp_path, steps=3)]
    plain = spec.model_copy(update={"techniques": ("channels-last",)})
    assert losses == measured_losses(plain, steps=3)


def test_a_script_says_what_it_is() -> None:
    spec = spec_of("resnet50", "bf16-mixed", ("channels-last",))
    ((_, text),) = script_of(spec, measured="8,000 images/s on a GPU.").items()
    assert text.startswith('"""resnet50, bf16-mixed, channels-last: batch 2.\n\n8,000 images/s on a GPU.')
    assert 'torch.set_float32_matmul_precision("highest")' in text, "float32 products are IEEE's in bf16-mixed"
    assert "Your data loader goes here" in text
    assert "Your validation goes here" in text


@pytest.mark.parametrize("name", ["inception_v3", "efficientnet_b0", "torchvision:googlenet", "torchvision:resnet18"])
def test_a_script_builds_torchvision_s_models_as_castwise_does(name: str) -> None:
    row = find_workload(name)
    ((_, text),) = script_of(spec_of(name)).items()
    names: dict[str, object] = {"nn": torch.nn, "partial": partial, "models": models}
    exec(re.findall(r"^model = .+$", text, flags=re.MULTILINE)[0], names)
    made = names["model"]
    assert isinstance(made, torch.nn.Module)
    assert str(made) == str(build_task(row).model)


def test_definitions_come_with_what_they_use() -> None:
    imports, text = copy_definitions(["castwise.apply.techniques.cuda_graph:StepGraph"])
    assert "# Steps on the capture's stream" in text
    assert "@dataclass(frozen=True)\nclass _Captured:" in text
    assert text.index("def tree_signature") < text.index("class StepGraph")
    assert "TechniqueError = RuntimeError" in text
    assert "import torch" in imports
    assert not any("castwise" in line for line in imports)


def test_statements_about_a_definition_and_imports_within_it_are_followed() -> None:
    _, text = copy_definitions(["castwise.trial.kernels.max_pool.module:use_max_pool_kernel"])
    assert "max_pool.register_autograd(" in text
    assert text.index("def max_pool(") < text.index("max_pool.register_autograd(")
    assert "castwise.trial" not in text


@pytest.mark.parametrize("root", ["castwise.spec.loss_scale:nothing_such", "castwise.trial.no_module:x"])
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
    spec = spec_of(workload, precision, techniques, kind="training", recipe=made, data_set=data_set, batch_size=4)
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
@pytest.mark.slow
def test_the_script_of_a_training_run_trains(
    precision: str, techniques: tuple[str, ...], schedule: Schedule, tmp_path: Path
) -> None:
    optimizer = Optimizer(name="SGD", arguments={"lr": 0.01, "momentum": 0.9})
    spec = training_of(*techniques, precision=precision, schedule=schedule, optimizer=optimizer)
    assert why_unsupported(spec) is None
    files = files_of(spec, tmp_path)
    if precision == "fp16-master":  # a CPU takes ten seconds for 400 images in float16
        files = {file: text.replace("else 400", "else 20") for file, text in files.items()}
    out = output_of(files, "--epochs", "2", "--steps", "3")
    line = r"loss \d\.\S+, \S+ images/s, accuracy 0\.\d{4}\n"
    assert re.fullmatch(f"epoch 1: {line}epoch 2: {line}", out)


@pytest.mark.parametrize("graph", [(), ("cuda-graph",), ("compiled-update", "compile", "cuda-graph-8")])
@pytest.mark.parametrize("data_set", ["mnist", "cifar10", "synthetic:mnist"])
def test_every_script_of_a_training_run_is_whole(data_set: str, graph: tuple[str, ...], tmp_path: Path) -> None:
    schedule = Schedule(kind="step", arguments={"gamma": 0.5})
    spec = training_of("resident-data", *graph, data_set=data_set, precision="fp16-master", schedule=schedule)
    files = script_of(spec.model_copy(update={"device": "cuda:0"}))
    check_whole(files.values(), {"compute_loss", "train_step"}, tmp_path)
    text = next(iter(files.values()))
    assert len(text.splitlines()) <= 160
    assert ("step.flush()" in text) is ("cuda-graph-8" in graph)
    assert ("torchvision.datasets" in text) is (data_set in ("mnist", "cifar10"))
    assert ("loss.item()  # as the source does" in text) is (not graph)


@pytest.mark.parametrize(
    ("technique", "is_tensor"), [("fused-optimizer", False), ("compiled-update", True), ("cuda-graph", True)]
)
def test_a_rate_that_moves_is_a_tensor_where_a_number_would_be_held(technique: str, is_tensor: bool) -> None:
    schedule = Schedule(kind="step", arguments={"gamma": 0.5})
    optimizer = Optimizer(name="Adam", arguments={"lr": 0.01})
    spec = training_of("resident-data", technique, schedule=schedule, optimizer=optimizer)
    text = next(iter(script_of(spec).values()))
    assert ("keep_rates_on_device(optimizer, DEVICE)" in text) is is_tensor


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (training_of(), "reads it through a loader"),
        (training_of("resident-data", schedule=Schedule(kind="one_cycle")), "no schedule 'one_cycle'"),
        (training_of("resident-data", data_set="wikitext-2"), "does not go with the data set wikitext-2"),
        (spec_of("fastai-resnet18"), "its model starts from weights"),
        (spec_of("mnist-cnn", data_set="mnist"), "on synthetic data and one device"),
    ],
    ids=["loader", "schedule", "text", "weights", "data"],
)
def test_what_has_no_script_is_refused(spec: TrialSpec, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        script_of(spec)


# CUDA graphs, without CUDA: a replay does the work that was captured.
_FAKE_CUDA = """
import contextlib

import torch


class Stream:
    def __init__(self, device):
        pass

    def wait_stream(self, stream):
        pass


torch.cuda.Stream = torch.cuda.current_stream = Stream
torch.cuda.CUDAGraph = type("Graph", (), {})
torch.cuda.graph = lambda graph, **_: contextlib.nullcontext()
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.cuda.synchronize = torch.cuda.reset_peak_memory_stats = lambda device=None: None
torch.cuda.max_memory_allocated = lambda device=None: 0
torch.cuda.graph_pool_handle = lambda: None
"""


@pytest.mark.usefixtures("narrow", "traced")
@pytest.mark.parametrize(
    ("workload", "precision", "techniques"),
    [
        ("mnist-cnn", "bf16-master", ("compiled-update", "cuda-graph")),
        ("mlp-4096", "fp16-mixed", ("cuda-graph",)),
        ("lstm-lm", "fp32", ("cuda-graph",)),
        ("lstm-lm", "fp32", ("cuda-graph-8",)),
    ],
)
@pytest.mark.slow
def test_a_script_with_a_graph_takes_the_same_steps(
    workload: str, precision: str, techniques: tuple[str, ...], tmp_path: Path
) -> None:
    spec = spec_of(workload, precision, techniques, loss_scale=find_precision(precision).loss_scale)
    (file, text), *second = files_of(spec.model_copy(update={"device": "cuda:0"}), tmp_path).items()
    text = text.replace('torch.device("cuda:0")', 'torch.device("cpu")').replace(", capturable=True", "")
    (tmp_path / "fake_cuda.py").write_text(_FAKE_CUDA)
    at_once = 4 if "cuda-graph-8" in techniques else 1  # 3 steps before the graph, two launches and one step at the end
    files = {file: f"import fake_cuda\n{text}"} | dict(second)
    captured = "                work()\n"
    files = {
        path: each.replace(captured, captured.replace("work()", "graph.replay = work")) for path, each in files.items()
    }
    out = output_of(files, "--epochs", str(20 // at_once), "--steps", str(at_once))
    losses = [float(found) for found in re.findall(r"loss (\S+),", out)]
    plain = tuple(name for name in techniques if "graph" not in name)
    if precision == "fp16-mixed":
        plain = ("no-step-sync",)
    expected = measured_losses(spec.model_copy(update={"techniques": plain}))
    assert losses == pytest.approx(expected[at_once - 1 :: at_once], rel=1e-5)
