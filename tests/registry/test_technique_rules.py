"""Which trials can have which technique, and why not."""

import pytest
from fake_engine import fake_spec, fake_training

from castwise.registry.techniques import TECHNIQUES, Technique, join, resolve, why_unsupported
from castwise.registry.workloads import WORKLOADS
from castwise.spec.recipe import Loader, Optimizer, Recipe, Schedule
from castwise.spec.trial import TrialSpec

every_technique = pytest.mark.parametrize("row", TECHNIQUES, ids=lambda row: row.name)
V100, P100 = (7, 0), (6, 0)
ON_TWO: dict[str, object] = {"world_size": 2, "parallelism": "ddp"}


def spec_of(*techniques: str, **fields: object) -> TrialSpec:
    values: dict[str, object] = {"workload": "resnet50", "device": "cuda:0", "techniques": techniques, **fields}
    return fake_spec(str(values.pop("precision", "fp32")), **values)


def training(recipe: Recipe, *techniques: str, **fields: object) -> TrialSpec:
    values = {"workload": "mnist-cnn", "data_set": "mnist", "kind": "training", "recipe": recipe, **fields}
    return spec_of(*techniques, **values)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (spec_of("channels-last", workload="lstm-lm"), "is for images; lstm-lm has tokens"),
        (spec_of("cudnn-search", device="cpu"), "needs a CUDA device; this is cpu"),
        (spec_of("cuda-graph", device="cpu"), "needs a CUDA device"),
        (spec_of("foreach-optimizer"), "needs a CPU; this is cuda:0"),
        (spec_of("fused-optimizer", workload="mnist-cnn"), "torch has no such Adadelta"),
        (spec_of("no-step-sync"), "finds nothing to leave out"),
        (spec_of("pad-vocabulary"), "is for recurrent language models; resnet50 is none"),
        (spec_of("chunked-loss", workload="mlp-4096"), "recurrent language models"),
        (spec_of("cuda-graph", **ON_TWO), "needs coalesced-reduce"),
        (spec_of("cuda-graph-8", **ON_TWO), "cuda-graph-8 needs coalesced-reduce"),
        (spec_of("compiled-update", **ON_TWO), "compiled-update needs coalesced-reduce"),
        (spec_of("coalesced-reduce"), "finds nothing to do: one device takes the whole step"),
        (spec_of("coalesced-reduce", world_size=2, parallelism="dp"), "needs a process a GPU, as ddp has"),
        (spec_of("coalesced-reduce", "cuda-graph", world_size=2, parallelism="dp"), "needs a process a GPU"),
        (spec_of("compile", "compile-max-autotune"), "excludes compile-max-autotune"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value.techniques),
)
def test_a_technique_that_does_not_apply_says_why(spec: TrialSpec, words: str) -> None:
    assert words in str(why_unsupported(spec))


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(),
        spec_of("channels-last", "cudnn-search", "fused-optimizer", "compile", "cuda-graph"),
        spec_of("no-step-sync", precision="fp16-mixed", loss_scale="dynamic"),
        spec_of("pad-vocabulary", "chunked-loss", workload="gru-lm"),
        spec_of("compile", **ON_TWO),
        spec_of("coalesced-reduce", **ON_TWO),
        spec_of("coalesced-reduce", **ON_TWO, device="cpu"),
        spec_of("coalesced-reduce", **ON_TWO, workload="lstm-lm", precision="fp16-master", loss_scale="dynamic"),
        spec_of("compile", "coalesced-reduce", "cuda-graph", **ON_TWO),
        spec_of("compiled-update", "coalesced-reduce", "cuda-graph-8", **ON_TWO),
        training(Recipe(epochs=1), "coalesced-reduce", "cuda-graph", **ON_TWO),
        training(Recipe(epochs=1, read_loss_every_step=True), "no-step-sync"),
        training(Recipe(epochs=1), "resident-data"),
        training(Recipe(epochs=1), "loader-workers", "pinned-transfer"),
        training(Recipe(epochs=1, optimizer=Optimizer(name="SGD", arguments={"lr": 0.1})), "fused-optimizer"),
    ],
    ids=lambda spec: join(spec.techniques),
)
def test_a_technique_that_applies_is_not_refused(spec: TrialSpec) -> None:
    assert why_unsupported(spec) is None


def test_triton_needs_a_volta() -> None:
    assert why_unsupported(spec_of("compile"), V100) is None
    assert "7.0 or newer, for Triton; this GPU has 6.0" in str(why_unsupported(spec_of("compile"), P100))


def test_a_graph_follows_schedules_that_leave_momentum_alone() -> None:
    def reason(kind: str) -> str | None:
        return why_unsupported(training(Recipe(epochs=1, schedule=Schedule(kind=kind)), "cuda-graph"))  # type: ignore[arg-type]

    assert reason("step") is reason("triangular") is reason("constant") is None
    assert "a graph holds the momentum fixed" in str(reason("one_cycle"))


def test_a_compiled_update_follows_schedules_that_leave_momentum_alone() -> None:
    def reason(kind: str, *names: str) -> str | None:
        sgd = Optimizer(name="SGD", arguments={"lr": 0.1, "momentum": 0.9})
        recipe = Recipe(epochs=1, optimizer=sgd, schedule=Schedule(kind=kind))  # type: ignore[arg-type]
        return why_unsupported(training(recipe, *names))

    assert reason("step", "compiled-update") is reason("plateau", "compiled-update", "cuda-graph") is None
    assert "needs fused-optimizer or compiled-update" in str(reason("step", "cuda-graph"))
    assert "the momentum that it changes is compiled in" in str(reason("one_cycle", "compiled-update"))


def test_a_launch_of_several_steps_follows_schedules_that_move_between_epochs() -> None:
    def reason(kind: str) -> str | None:
        return why_unsupported(training(Recipe(epochs=1, schedule=Schedule(kind=kind)), "cuda-graph-8"))  # type: ignore[arg-type]

    assert reason("step") is reason("plateau") is reason("constant") is None
    assert "changes the rate each step: take cuda-graph" in str(reason("triangular"))
    assert "a graph holds the momentum fixed" in str(reason("one_cycle"))


def test_sgd_s_rate_moves_in_a_graph_only_where_it_is_fused() -> None:
    sgd = Optimizer(name="SGD", arguments={"lr": 0.1})
    moving = Recipe(epochs=1, optimizer=sgd, schedule=Schedule(kind="step", arguments={"gamma": 0.5}))
    assert "needs fused-optimizer" in str(why_unsupported(training(moving, "cuda-graph")))
    assert why_unsupported(training(moving, "fused-optimizer", "cuda-graph")) is None
    assert why_unsupported(training(Recipe(epochs=1, optimizer=sgd), "cuda-graph")) is None


def test_augmentation_that_the_device_cannot_do_is_refused() -> None:
    recipe = Recipe(epochs=1, transform="fastai-224")
    assert "cannot do the augmentation 'fastai-224'" in str(why_unsupported(training(recipe, "resident-data")))


@pytest.mark.parametrize("name", ["resident-data", "loader-workers", "pinned-transfer"])
def test_a_source_whose_data_lies_on_the_device_has_no_loader_to_change(name: str) -> None:
    recipe = Recipe(epochs=1, loader=Loader(resident=True))
    assert "the source's data lies on the device" in str(why_unsupported(training(recipe, name)))


def test_resolving_leaves_what_was_named_even_where_it_does_not_apply() -> None:
    """It is `unsupported` then, and says so: never something else in its place."""
    spec = resolve(("tuned", "cuda-graph"), spec_of(workload="mnist-cnn", device="cpu"))
    assert spec.techniques == ("channels-last", "cuda-graph")


@pytest.mark.parametrize("workload", [row.name for row in WORKLOADS])
@every_technique
def test_every_row_has_an_answer_for_every_workload(row: Technique, workload: str) -> None:
    reason = why_unsupported(spec_of(row.name, workload=workload))
    assert reason is None or reason.startswith(f"{row.name} ")


def test_a_training_spec_of_the_fake_engine_is_the_plain_loop() -> None:
    assert why_unsupported(fake_training()) is None
