"""The registry of techniques: names, sets, what excludes what."""

import pytest
from fake_engine import fake_spec

from castwise.errors import UsageError
from castwise.registry.techniques import (
    SETS,
    TECHNIQUES,
    Technique,
    find_technique,
    join,
    parse_techniques,
    why_unsupported,
)
from castwise.spec.plan import ParameterGrid, build_plan
from castwise.spec.trial import TrialSpec

every_technique = pytest.mark.parametrize("row", TECHNIQUES, ids=lambda row: row.name)
NAMES = [row.name for row in TECHNIQUES]


def spec_of(*techniques: str, **fields: object) -> TrialSpec:
    values: dict[str, object] = {"workload": "resnet50", "device": "cuda:0", "techniques": techniques, **fields}
    return fake_spec(str(values.pop("precision", "fp32")), **values)


# Names


@every_technique
def test_a_technique_is_found_by_its_name_in_any_case(row: Technique) -> None:
    for written in (row.name, row.name.upper(), f" {row.name} "):
        assert find_technique(written) is row


def test_names_are_one_row_s_and_can_be_joined() -> None:
    assert len(set(NAMES) | set(SETS)) == len(NAMES) + len(SETS)
    assert not any(set(name) & set(", +:") or name != name.lower() for name in (*NAMES, *SETS))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"No technique named 'chanels-last'\. Did you mean channels-last"):
        find_technique("chanels-last")
    with pytest.raises(UsageError, match="compile"):
        find_technique("compiled-graph")


def test_what_the_plain_loop_does_is_no_technique() -> None:
    with pytest.raises(UsageError, match="set to None, as torch does"):
        find_technique("set-to-none")


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


@pytest.mark.parametrize("text", ["", "+", "compile+", "none+compile", "compile+none"])
def test_half_a_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="none"):
        parse_techniques(text)


@pytest.mark.parametrize(
    "text",
    ["compile+compile-max-autotune", "compiled+compile-max-autotune", "pad-channels-8+pad-channels-4"],
)
def test_what_excludes_each_other_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        parse_techniques(text)


def test_techniques_are_written_as_they_are_read() -> None:
    assert join(()) == "none"
    assert join(parse_techniques("compile+channels-last")) == "channels-last+compile"


@every_technique
def test_exclusions_name_rows(row: Technique) -> None:
    assert set(row.excludes) <= set(NAMES) - {row.name}


# Plans


def test_the_axis_is_crossed_with_the_precisions() -> None:
    axes = ParameterGrid(
        workloads=("resnet50",), precisions=("fp32", "bf16-mixed"), techniques=("none", "compile+channels-last")
    )
    specs = build_plan(axes, device="cuda:0")
    assert [(spec.techniques, spec.precision) for spec in specs] == [
        ((), "fp32"),
        ((), "bf16-mixed"),
        (("channels-last", "compile"), "fp32"),
        (("channels-last", "compile"), "bf16-mixed"),
    ]
    assert len({spec.label for spec in specs}) == 4


def test_the_plain_loop_keeps_the_key_it_had() -> None:
    axes = ParameterGrid(workloads=("resnet50",), precisions=("fp32",))
    (plain,) = build_plan(axes, device="cuda:0")
    (named,) = build_plan(ParameterGrid(**{**axes.__dict__, "techniques": ("none",)}), device="cuda:0")
    assert plain.key == named.key
    assert "techniques" not in plain.model_dump_json(exclude_defaults=True)


def test_a_set_becomes_its_members_that_apply() -> None:
    axes = ParameterGrid(workloads=("resnet50", "mnist-cnn", "lstm-lm"), precisions=("fp32",), techniques=("tuned",))
    specs = build_plan(axes, device="cuda:0")
    assert [spec.techniques for spec in specs] == [
        ("channels-last", "cudnn-search", "fused-optimizer"),
        ("channels-last", "cudnn-search"),  # torch has no fused Adadelta
        ("fused-optimizer",),
    ]


def test_a_set_of_which_nothing_applies_is_the_plain_loop_once() -> None:
    axes = ParameterGrid(workloads=("mnist-cnn",), precisions=("fp32",), techniques=("none", "tuned", "channels-last"))
    assert [spec.techniques for spec in build_plan(axes, device="cpu")] == [(), ("channels-last",)]


@every_technique
def test_a_model_is_changed_only_where_it_is_asked_for(row: Technique) -> None:
    if row.changes_model:
        assert all(row.name not in members for members in SETS.values())


@pytest.mark.parametrize("name", ["resident-data", "loader-workers", "pinned-transfer"])
def test_what_changes_the_reading_of_data_is_no_axis_of_steady_trials(name: str) -> None:
    with pytest.raises(UsageError, match="here only steps are timed"):
        build_plan(ParameterGrid(workloads=("resnet50",), techniques=(name,)), device="cuda:0")
    assert "changes how a training run reads its data" in str(why_unsupported(spec_of(name)))
