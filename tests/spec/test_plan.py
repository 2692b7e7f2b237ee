import hashlib
import itertools
import pickle

import pytest
from fake_engine import OTHER_VALUES, fake_spec, fake_training
from pydantic import ValidationError

from castwise.errors import UsageError
from castwise.registry.precisions import PRECISIONS
from castwise.registry.workloads import find_workload
from castwise.spec.plan import ParameterGrid, parse_grid
from castwise.spec.recipe import Recipe, Schedule
from castwise.spec.trial import CPU_PROTOCOL, CUDA_PROTOCOL, MeasurementProtocol, TrialSpec

ALL = [row.name for row in PRECISIONS]


def plan(device: str = "cuda:0", **axes: tuple[str, ...] | tuple[int, ...] | None) -> tuple[TrialSpec, ...]:
    return parse_grid(ParameterGrid(**{"workloads": ("resnet50",), **axes})).specs(device)  # type: ignore[arg-type]


def test_without_axes_a_plan_has_every_precision_once_at_the_workloads_own_batch() -> None:
    specs = plan()
    assert [spec.precision for spec in specs] == ALL
    assert {spec.batch_size for spec in specs} == {256}
    assert [spec.loss_scale for spec in specs] == [row.loss_scale for row in PRECISIONS]


def test_default_batch_size_and_protocol_depend_on_the_device() -> None:
    row = find_workload("wrn-28-10")
    (on_gpu,) = plan(workloads=(row.name,), precisions=("fp32",))
    (on_cpu,) = plan("cpu", workloads=(row.name,), precisions=("fp32",))
    assert (on_gpu.batch_size, on_gpu.protocol) == (row.batch_size, CUDA_PROTOCOL)
    assert (on_cpu.batch_size, on_cpu.protocol) == (row.cpu_batch_size, CPU_PROTOCOL)


def test_axes_are_crossed_in_order() -> None:
    axes = ("dpn92", "resnet50"), (8, 4), ("tf32", "fp32")
    specs = plan(workloads=axes[0], batch_sizes=axes[1], precisions=axes[2])
    assert [(spec.workload, spec.batch_size, spec.precision) for spec in specs] == list(itertools.product(*axes))


def test_what_one_gpu_has_nothing_to_do_for_is_left_out_beside_several() -> None:
    asked = {"precisions": ("fp32",), "techniques": ("coalesced-reduce+cuda-graph",)}
    one, two = plan(world_sizes=(1, 2), **asked)
    assert (one.techniques, two.techniques) == (("cuda-graph",), ("coalesced-reduce", "cuda-graph"))
    (alone,) = plan(world_sizes=(1,), **asked)
    assert "coalesced-reduce" in alone.techniques, "it is refused, with the reason"


@pytest.mark.parametrize(("given", "expected"), [(None, ("ddp",)), (("DDP", "fsdp"), ("ddp", "fsdp"))])
def test_parallelism_applies_to_several_gpus(given: tuple[str, ...] | None, expected: tuple[str, ...]) -> None:
    specs = plan(precisions=("fp32",), world_sizes=(1, 2), parallelisms=given)
    assert [(spec.world_size, spec.parallelism) for spec in specs] == [(1, "none"), *((2, way) for way in expected)]
    assert {spec.batch_size for spec in specs} == {256}
    assert specs[0].key == fake_spec(protocol=CUDA_PROTOCOL).key, "one GPU: the key of records without parallelism"


def test_sequences_of_several_lengths_have_as_many_tokens_a_batch() -> None:
    specs = plan(workloads=("gpt2", "bert-base"), lengths=(1024 // 4, 512), precisions=("fp32",))
    found = [(spec.workload, spec.batch_size) for spec in specs]
    assert found == [("gpt2@256", 64), ("gpt2@512", 32), ("bert-base@256", 128), ("bert-base", 64)]
    with pytest.raises(UsageError, match="gpt2@1024 and --seq-len both name a length of sequences"):
        plan(workloads=("gpt2@1024",), precisions=("fp32",), lengths=(512,))
    assert [spec.workload for spec in plan(workloads=("GPT2@64", "gpt2@1024"), precisions=("fp32",))] == [
        "gpt2@64",
        "gpt2",
    ]


def test_a_gpt_has_the_width_and_depth_of_its_name() -> None:
    specs = plan(workloads=("gpt-d2048x12", "gpt-d768", "gpt-d4096x4", "gpt-d8192@512"), precisions=("fp32",))
    found = [(spec.workload, spec.batch_size) for spec in specs]
    assert found == [("gpt-d2048x12", 16), ("gpt-d768", 32), ("gpt-d4096", 8), ("gpt-d8192@512", 8)]
    options = dict(find_workload("gpt-d2048x12").options)
    assert (options["width"], options["depth"], options["heads"]) == (2048, 12, 16)
    with pytest.raises(UsageError, match="gpt-d4096"):
        find_workload("gpt-d1000")


def test_each_cell_is_measured_once_however_often_it_is_named() -> None:
    specs = plan(workloads=("resnet50", "ResNet50"), precisions=("fp32", "O0", "single"), batch_sizes=(8, 8))
    assert len(specs) == 1


def test_a_loss_scale_applies_to_the_precisions_that_scale() -> None:
    specs = plan(precisions=("fp32", "bf16-mixed", "fp16-mixed", "fp16-master"), loss_scales=("dynamic", "128"))
    assert [(spec.precision, spec.loss_scale) for spec in specs] == [
        ("fp32", "none"),
        ("bf16-mixed", "none"),
        ("fp16-mixed", "dynamic"),
        ("fp16-mixed", "128"),
        ("fp16-master", "dynamic"),
        ("fp16-master", "128"),
    ]


def test_a_loss_scale_applies_to_float16_if_no_precision_named_scales() -> None:
    specs = plan(precisions=("fp32", "fp16-true"), loss_scales=("none", "128"))
    assert [(spec.precision, spec.loss_scale) for spec in specs] == [
        ("fp32", "none"),
        ("fp16-true", "none"),
        ("fp16-true", "128"),
    ]


@pytest.mark.parametrize(
    ("written", "meant"),
    [("128.0", "128"), ("1e3", "1000"), ("65536", "65536"), ("0.5", "0.5"), ("16777216", "16777216"), ("NONE", "none")],
)
def test_spellings_of_one_loss_scale_are_one_cell(written: str, meant: str) -> None:
    specs = plan(precisions=("fp16-mixed",), loss_scales=(written, meant))
    assert [spec.loss_scale for spec in specs] == [meant]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"workloads": ("resnet49",)}, "No workload named 'resnet49'. Did you mean resnet"),
        ({"precisions": ("fp31",)}, "No precision named 'fp31'. Did you mean fp32"),
        ({"workloads": ("torchvision:",)}, "'torchvision:' needs a model's name"),
        ({"batch_sizes": (0,)}, "batch size 0 is impossible"),
        ({"workloads": ("gpt2",), "lengths": (2048,)}, "takes sequences of 1 to 1,024 tokens, not 2,048"),
        ({"workloads": ("gpt2@0",)}, "not 0"),
        ({"workloads": ("resnet50",), "lengths": (64,)}, "no choice of sequence length"),
        ({"workloads": ("resnet50@64",)}, "no choice of sequence length"),
        ({"workloads": ("gpt2@many",)}, "No workload named"),
        ({"world_sizes": (0,)}, "0 GPUs are impossible"),
        ({"world_sizes": (2,), "parallelisms": ("dpd",)}, "No parallelism named 'dpd'. Did you mean dp"),
        ({"world_sizes": (2,), "parallelisms": ("none",)}, "No parallelism named 'none'"),
        ({"loss_scales": ("0",)}, "must be a positive number; '0' is not"),
        ({"loss_scales": ("inf",)}, "must be a positive number; 'inf' is not"),
        ({"loss_scales": ("dynamics",)}, "'dynamics' is no loss scale"),
        (
            {"precisions": ("fp32", "bf16-true"), "loss_scales": ("dynamic",)},
            "A loss scale is for float16 (fp16-mixed, fp16-master, fp16-true), and fp32, bf16-true needs none.",
        ),
        ({"workloads": (".",)}, "'.' is a folder. Name a Python file, train_me.py, or one with a function"),
    ],
)
def test_an_impossible_request_is_refused(axes: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        plan(**axes)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_data_set_is_refused_where_the_workload_does_not_take_it() -> None:
    parse_grid(ParameterGrid(workloads=("mnist-cnn",)), "mnist").specs("cpu")
    with pytest.raises(UsageError, match=r"resnet50 does not take the data set 'mnist'\. It takes: synthetic"):
        parse_grid(ParameterGrid(workloads=("mnist-cnn", "resnet50")), "mnist").specs("cpu")
    parse_grid(ParameterGrid(workloads=("gpt2@64", "bert-base")), "wikitext-2").specs("cpu")
    with pytest.raises(UsageError, match="vit-b16 does not take the data set 'wikitext-2'"):
        parse_grid(ParameterGrid(workloads=("vit-b16",)), "wikitext-2").specs("cpu")


def test_the_key_depends_on_every_field_and_the_cell_on_all_but_the_repeat() -> None:
    spec = fake_spec()
    assert set(OTHER_VALUES) == set(TrialSpec.model_fields), "a new field needs another value in OTHER_VALUES"
    for name, value in OTHER_VALUES.items():
        other = spec.model_copy(update={name: value})
        assert other.key != spec.key, name
        assert (other.configuration == spec.configuration) == (name == "repeat"), name


@pytest.mark.parametrize("name", list(MeasurementProtocol.model_fields))
def test_the_key_depends_on_every_field_of_the_protocol_that_figures_depend_on(name: str) -> None:
    spec = fake_spec()
    value = getattr(spec.protocol, name)
    protocol = spec.protocol.model_copy(update={name: not value if isinstance(value, bool) else (value or 0) + 1})
    other = spec.model_copy(update={"protocol": protocol})
    is_extra = name in ("timeout_seconds", "profile_steps", "numerics")
    assert (other.key == spec.key, other.configuration == spec.configuration, other.comparison == spec.comparison) == (
        is_extra,
    ) * 3


def test_keys_of_earlier_runs_stay_valid() -> None:
    # A changed key means that no job goes on from its old records: raise SCHEMA_VERSION where it is meant.
    assert fake_spec().key == "c828598414bb"
    assert fake_spec().configuration == "c828598414bb"
    assert fake_spec(repeat=2, protocol=MeasurementProtocol(num_blocks=7)).key == "6b06cb11f9da"


def test_a_field_added_later_leaves_old_records_their_keys() -> None:
    class LaterSpec(TrialSpec):
        colour: str = "none"

    old = fake_spec("bf16-mixed", protocol=MeasurementProtocol(num_blocks=7))
    new = LaterSpec.model_validate(old.model_dump())
    assert new.key == old.key
    assert new.configuration == old.configuration
    assert new.model_copy(update={"colour": "red"}).key != old.key


def test_a_label_tells_apart_the_trials_of_a_job() -> None:
    gpus = {"world_sizes": (1, 2), "parallelisms": ("ddp", "dp")}
    specs = plan(workloads=("dpn92",), batch_sizes=(4, 8), loss_scales=("dynamic", "128"), **gpus)
    assert len({spec.label for spec in specs}) == len(specs)
    assert fake_spec("fp16-mixed").label == "resnet50 fp16-mixed batch 256"
    assert fake_spec("fp16-mixed", loss_scale="128").label == "resnet50 fp16-mixed batch 256 loss scale 128"
    assert fake_spec(world_size=2, parallelism="dp").label == "resnet50 fp32 batch 256 on 2 GPUs (dp)"
    assert fake_training(seed=1).label == "resnet50 fp32 batch 256 seed 1"
    assert fake_spec(seed=1).label == "resnet50 fp32 batch 256", "a steady job has one seed for all"
    on_cpu = fake_spec(world_size=2, parallelism="ddp", device="cpu")
    assert on_cpu.label == "resnet50 fp32 batch 256 on 2 CPU processes (ddp)"


def test_fewest_blocks_above_the_number_of_blocks() -> None:
    with pytest.raises(ValidationError, match="min_blocks"):
        MeasurementProtocol(min_blocks=21, num_blocks=20)


def test_each_key_of_a_spec_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[bytes] = []
    digest = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda text: counted.append(text) or digest(text))
    spec = fake_spec()
    keys = {(spec.key, spec.configuration, spec.comparison) for _ in range(100)}
    assert (len(keys), len(counted)) == (1, 3)
    copy = spec.model_copy(update={"batch_size": spec.batch_size + 1})
    assert copy.key != spec.key, "a copy has keys of its own"
    assert copy == TrialSpec.model_validate_json(copy.model_dump_json())
    assert pickle.loads(pickle.dumps(spec)) == spec


# What a recipe refuses

ONE_CYCLE = Schedule(kind="one_cycle")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"first_cycle_epochs": 1}, "needs a schedule of kind one_cycle, not 'constant'"),
        ({"schedule": ONE_CYCLE, "first_cycle_epochs": -1}, "greater than or equal to 0"),
        ({"schedule": ONE_CYCLE, "first_cycle_epochs": 1, "first_cycle_rates": (0.1, 0.2)}, "2 rates where .* has 1"),
        ({"schedule": ONE_CYCLE, "group_rates": (0.1, 0.2), "first_cycle_rates": (0.1,)}, "1 rates where .* has 2"),
        ({"group_rates": (0.0, 0.1)}, "greater than 0"),
    ],
)
def test_rates_and_cycles_that_do_not_fit(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Recipe(epochs=3, **fields)


@pytest.mark.parametrize(
    ("fields", "num_epochs"),
    [
        ({}, 3),
        ({"stop_after": 1}, 1),
        ({"max_steps": 5}, 3),
        ({"stop_after": 2, "max_steps": 5}, 2),
    ],
)
def test_a_recipe_says_how_long_it_runs(fields: dict[str, object], num_epochs: int) -> None:
    recipe = Recipe(epochs=3, **fields)
    assert recipe.num_epochs == num_epochs
