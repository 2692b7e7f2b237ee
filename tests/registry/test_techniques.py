"""The registry of techniques: names, sets, and which trials can have which technique."""

from dataclasses import fields
from typing import Any, get_args

import pytest
from fake_engine import fake_spec

from castwise.errors import UsageError
from castwise.registry.technique_fit import resolve, why_unsupported
from castwise.registry.techniques import (
    PLAIN,
    PRECISION,
    SETS,
    TECHNIQUES,
    Applier,
    StepConfig,
    Technique,
    find_technique,
    join,
    parse_techniques,
    step_config_of,
)
from castwise.registry.workloads import WORKLOADS
from castwise.spec.plan import ParameterGrid, parse_grid
from castwise.spec.recipe import Loader, Optimizer, Recipe, Schedule
from castwise.spec.trial import TrialSpec

NAMES = [row.name for row in TECHNIQUES]
every_technique = pytest.mark.parametrize("row", TECHNIQUES, ids=lambda row: row.name)
V100, P100 = (7, 0), (6, 0)
ON_TWO: dict[str, object] = {"world_size": 2, "parallelism": "ddp"}
SHARDED: dict[str, object] = {"world_size": 2, "parallelism": "fsdp"}


def spec_of(*techniques: str, **fields: object) -> TrialSpec:
    values: dict[str, object] = {"workload": "resnet50", "device": "cuda:0", "techniques": techniques, **fields}
    return fake_spec(str(values.pop("precision", "fp32")), **values)


def training(recipe: Recipe, *techniques: str, **fields: object) -> TrialSpec:
    values = {"workload": "mnist-cnn", "data_set": "mnist", "kind": "training", "recipe": recipe, **fields}
    return spec_of(*techniques, **values)


@every_technique
def test_a_row_names_other_rows_that_exist(row: Technique) -> None:
    assert row.name not in SETS
    related = {row.requires, row.required_on_several_gpus, row.tried_after, *row.tried_with, *row.interacts_with}
    assert {*row.excludes, *related} <= {*NAMES, PRECISION, ""} - {row.name}
    assert bool(row.absent_in) == bool(row.acts_on)
    assert row.numerics != "shape" or all(row.name not in members for members in SETS.values()), "only if it is named"


@every_technique
def test_a_row_makes_settings_of_its_own(row: Technique) -> None:
    assert set(row.settings) <= set(StepConfig.__dataclass_fields__)
    assert step_config_of([row.name]) not in [PLAIN, *(step_config_of([name]) for name in NAMES if name != row.name)]
    assert row.summary
    assert row.cost


def test_each_setting_says_what_can_apply_it() -> None:
    assert all({*each.metadata["appliers"]} <= {*get_args(Applier)} for each in fields(StepConfig))
    assert not find_technique("fused-optimizer").unfit_settings("script")
    assert find_technique("no-step-sync").unfit_settings("script") == ["reads_loss"]
    assert find_technique("coalesced-reduce").unfit_settings("emit") == ["coalesced_reduce"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("none", ()),
        (" None ", ()),
        ("compile", ("compile",)),
        ("compile+channels-last", ("channels-last", "compile")),
        ("Channels-Last + COMPILE+compile", ("channels-last", "compile")),
        ("tuned+cuda-graph", ("tuned", "cuda-graph")),
    ],
)
def test_techniques_are_joined_by_plus_in_any_order(text: str, names: tuple[str, ...]) -> None:
    assert parse_techniques(text) == names


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, "is no list of techniques") for text in ("", "+", "compile+", "none+compile", "compile+none")),
        ("compile+compile-max-autotune", "exclude each other"),
        ("compiled+compile-max-autotune", "exclude each other"),
        ("pad-channels-8+pad-channels-4", "exclude each other"),
        ("chanels-last", "Did you mean channels-last"),
        ("set-to-none", "set to None, as torch does"),
    ],
)
def test_a_wrong_list_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_techniques(text)


def test_the_axis_is_crossed_with_the_precisions() -> None:
    axes = ParameterGrid(
        workloads=("resnet50",), precisions=("fp32", "bf16-mixed"), techniques=("none", "compile+channels-last")
    )
    specs = parse_grid(axes).specs("cuda:0")
    assert [(spec.techniques, spec.precision) for spec in specs] == [
        ((), "fp32"),
        ((), "bf16-mixed"),
        (("channels-last", "compile"), "fp32"),
        (("channels-last", "compile"), "bf16-mixed"),
    ]
    assert len({spec.label for spec in specs}) == 4


def test_the_plain_loop_keeps_the_key_it_had() -> None:
    axes = ParameterGrid(workloads=("resnet50",), precisions=("fp32",))
    (plain,) = parse_grid(axes).specs("cuda:0")
    (named,) = parse_grid(ParameterGrid(**{**axes.__dict__, "techniques": ("none",)})).specs("cuda:0")
    assert plain.key == named.key
    assert "techniques" not in plain.model_dump_json(exclude_defaults=True)


def test_a_set_becomes_its_members_that_apply() -> None:
    axes = ParameterGrid(workloads=("resnet50", "mnist-cnn", "lstm-lm"), precisions=("fp32",), techniques=("tuned",))
    specs = parse_grid(axes).specs("cuda:0")
    assert [spec.techniques for spec in specs] == [
        ("channels-last", "cudnn-search", "fused-optimizer"),
        ("channels-last", "cudnn-search"),  # torch has no fused Adadelta
        ("fused-optimizer",),
    ]


def test_a_set_of_which_nothing_applies_is_the_plain_loop_once() -> None:
    axes = ParameterGrid(workloads=("mnist-cnn",), precisions=("fp32",), techniques=("none", "tuned", "channels-last"))
    assert [spec.techniques for spec in parse_grid(axes).specs("cpu")] == [(), ("channels-last",)]


@pytest.mark.parametrize("name", ["resident-data", "loader-workers", "pinned-transfer"])
def test_what_changes_the_reading_of_data_is_no_axis_of_steady_trials(name: str) -> None:
    with pytest.raises(UsageError, match="here only steps are timed"):
        parse_grid(ParameterGrid(workloads=("resnet50",), techniques=(name,))).specs("cuda:0")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (spec_of("channels-last", workload="lstm-lm"), "is for images; lstm-lm has tokens"),
        (spec_of("cudnn-search", device="cpu"), "needs a CUDA device; this is cpu"),
        (spec_of("cuda-graph", device="cpu"), "needs a CUDA device"),
        (spec_of("fp16-accumulation", precision="bf16-mixed"), "is for products in float16, and bf16-mixed has none"),
        (spec_of("foreach-optimizer"), "needs a CPU; this is cuda:0"),
        (spec_of("fused-optimizer", workload="mnist-cnn"), "torch has no such Adadelta"),
        (spec_of("no-step-sync"), "finds nothing to leave out"),
        (spec_of("cudnn-attention", workload="lstm-lm"), "has no attention"),
        (spec_of("cudnn-attention", workload="gpt2"), "computes attention in 16 bits, and fp32 does not"),
        (spec_of("efficient-attention", "flash-attention", workload="gpt2"), "excludes"),
        (spec_of("pad-vocabulary"), "is for language models; resnet50 is none"),
        (spec_of("chunked-loss", workload="mlp-4096"), "is for tokens; mlp-4096 has samples"),
        (spec_of("chunked-loss", workload="vit-b16"), "is for tokens; vit-b16 has images"),
        (spec_of("chunked-loss", workload="gpt2", world_size=2, parallelism="dp"), "needs one process per GPU"),
        (spec_of("activation-checkpointing", workload="lstm-lm"), "lstm-lm has no repeated blocks"),
        (spec_of("selective-checkpointing", workload="dpn92"), "has no repeated blocks with linear layers"),
        (spec_of("activation-checkpointing", "cuda-graph", workload="gpt2"), "excludes cuda-graph"),
        (spec_of("cuda-graph", **ON_TWO), "needs coalesced-reduce"),
        (spec_of("cuda-graph-8", **ON_TWO), "cuda-graph-8 needs coalesced-reduce"),
        (spec_of("compiled-update", **ON_TWO), "compiled-update needs coalesced-reduce"),
        (spec_of("coalesced-reduce"), "finds nothing to do: one device takes the whole step"),
        (spec_of("coalesced-reduce", world_size=2, parallelism="dp"), "needs one process per GPU, as with ddp"),
        (spec_of("coalesced-reduce", "cuda-graph", world_size=2, parallelism="dp"), "needs one process per GPU"),
        (spec_of("coalesced-reduce", **SHARDED), "fsdp leaves each rank a part of them"),
        (spec_of("ddp-bucket-view"), "needs several GPUs, and DistributedDataParallel on them"),
        (spec_of("ddp-buckets-100", **SHARDED), "needs several GPUs, and DistributedDataParallel on them"),
        (spec_of("ddp-static-graph", "coalesced-reduce", **ON_TWO), "excludes"),
        (spec_of("bf16-all-reduce", precision="fp16-mixed", **ON_TWO), "and fp16-mixed has others"),
        (spec_of("bf16-all-reduce", precision="bf16-master", **ON_TWO), "and bf16-master has others"),
        (spec_of("bf16-all-reduce", precision="bf16-mixed", **SHARDED), "DistributedDataParallel on them"),
        (spec_of("fsdp-keep-weights", **ON_TWO), "fsdp alone shards weights"),
        (spec_of("cuda-graph", **SHARDED), "cuda-graph does not fit fsdp"),
        (spec_of("compiled-update", **SHARDED), "compiled-update does not fit fsdp"),
        (spec_of("channels-last", **SHARDED), "shards contiguous weights only"),
        (spec_of("channels-last", "batch-norm-kernel", **SHARDED), "channels-last does not fit fsdp"),
        (spec_of("fused-optimizer", workload="wrn-28-10", **SHARDED), "no fused SGD for sharded weights"),
        (spec_of(precision="bf16-master", **SHARDED), "bf16-master converts them; take a -mixed precision, or ddp"),
        (spec_of("compile", precision="fp8-tensorwise", **SHARDED), "fp8-tensorwise converts them"),
        (training(Recipe(epochs=1), **SHARDED), "fsdp is for steady steps; take the parallelism ddp"),
        (spec_of("compile", "compile-max-autotune"), "excludes compile-max-autotune"),
        (spec_of("max-pool-kernel"), "needs channels-last"),
        (spec_of("channels-last", "max-pool-kernel", workload="efficientnet_b0"), "no max pooling of 3 by 3"),
        (spec_of("batch-norm-kernel"), "needs channels-last"),
        (spec_of("channels-last", "batch-norm-kernel", workload="mnist-cnn"), "mnist-cnn has no batch norm"),
        (spec_of("space-to-depth", workload="wrn-28-10"), "no first convolution of stride 2"),
        (spec_of("pad-hidden", workload="lstm-lm"), "a width of 200 is a multiple of 8 already"),
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
        spec_of("channels-last", "max-pool-kernel", "batch-norm-kernel"),
        spec_of("space-to-depth"),
        spec_of("pad-hidden", workload="lstm-lm-1500"),
        spec_of("no-step-sync", precision="fp16-mixed", loss_scale="dynamic"),
        spec_of("pad-vocabulary", "chunked-loss", workload="gru-lm"),
        spec_of("pad-vocabulary", "chunked-loss", "activation-checkpointing", "compile", workload="gpt2", **ON_TWO),
        spec_of("compile", **ON_TWO),
        spec_of("pad-vocabulary", "chunked-loss", "activation-checkpointing", "compile", workload="gpt2", **SHARDED),
        spec_of("fused-optimizer", precision="fp16-mixed", loss_scale="dynamic", **SHARDED),
        spec_of("coalesced-reduce", **ON_TWO),
        spec_of("coalesced-reduce", **ON_TWO, device="cpu"),
        spec_of("coalesced-reduce", **ON_TWO, workload="lstm-lm", precision="fp16-master", loss_scale="dynamic"),
        spec_of("compile", "coalesced-reduce", "cuda-graph", **ON_TWO),
        spec_of("compile", "ddp-bucket-view", "ddp-buckets-100", "bf16-all-reduce", precision="bf16-mixed", **ON_TWO),
        spec_of("compile", "fsdp-keep-weights", **SHARDED),
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


def test_arguments_of_the_wrapper_add_up() -> None:
    config = step_config_of(["ddp-bucket-view", "ddp-buckets-100"])
    assert config.ddp_arguments == (("gradient_as_bucket_view", True), ("bucket_cap_mb", 100))


def test_sets_leave_out_what_does_not_fit_shards() -> None:
    assert resolve(("tuned",), spec_of(**SHARDED)).techniques == ("cudnn-search", "fused-optimizer")
    assert resolve(("tuned",), spec_of(workload="wrn-28-10", **SHARDED)).techniques == ("cudnn-search",)


def test_triton_needs_a_volta() -> None:
    assert why_unsupported(spec_of("compile"), V100) is None
    assert "7.0 or newer, for Triton; this GPU has 6.0" in str(why_unsupported(spec_of("compile"), P100))


SGD = Optimizer(name="SGD", arguments={"lr": 0.1, "momentum": 0.9})


@pytest.mark.parametrize(
    ("techniques", "optimizer", "kinds", "words"),
    [
        (("cuda-graph",), None, ("constant", "step", "triangular"), None),
        (("cuda-graph",), None, ("one_cycle",), "a graph holds the momentum fixed"),
        (("cuda-graph",), SGD, ("constant",), None),
        (("cuda-graph",), SGD, ("step",), "needs fused-optimizer or compiled-update"),
        (("fused-optimizer", "cuda-graph"), SGD, ("step",), None),
        (("compiled-update", "cuda-graph"), SGD, ("plateau",), None),
        (("compiled-update",), SGD, ("step",), None),
        (("compiled-update",), SGD, ("one_cycle",), "the momentum that it changes is compiled in"),
        (("cuda-graph-8",), None, ("constant", "step", "plateau"), None),
        (("cuda-graph-8",), None, ("triangular",), "changes the rate each step: take cuda-graph"),
        (("cuda-graph-8",), None, ("one_cycle",), "a graph holds the momentum fixed"),
    ],
)
def test_which_schedules_a_captured_or_compiled_step_follows(
    techniques: tuple[str, ...], optimizer: Optimizer | None, kinds: tuple[Any, ...], words: str | None
) -> None:
    for kind in kinds:
        recipe = Recipe(epochs=1, optimizer=optimizer, schedule=Schedule(kind=kind))
        reason = why_unsupported(training(recipe, *techniques))
        assert reason is None if words is None else words in str(reason)


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


@every_technique
def test_every_row_has_an_answer_for_every_workload(row: Technique) -> None:
    for workload in WORKLOADS:
        reason = why_unsupported(spec_of(row.name, workload=workload.name))
        assert reason is None or reason.startswith(f"{row.name} "), workload.name
