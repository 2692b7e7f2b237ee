"""A new precision is one new row: nothing else has to be edited."""

import ast
import json
from pathlib import Path

import pytest
from conftest import CommandLine
from fake_engine import FakeEngine, fake_environment, fake_spec, fake_trial, step_time_of
from scripts import run_script, spec_of

from castwise.analysis.code_snippets import framework_snippets, loop_code
from castwise.analysis.decide import decide
from castwise.analysis.result_table import rows_of_steps
from castwise.emit.script import script_of
from castwise.errors import UsageError
from castwise.registry import precisions
from castwise.registry.precisions import (
    NARROW_PRECISIONS,
    PRECISIONS,
    Frameworks,
    Hardware,
    Look,
    Precision,
    find_precision,
    is_same_as_fp32,
    precision_row,
    precision_sort_key,
    why_unsupported,
)
from castwise.show.theme import look_of

NEW = Precision(
    name="bf16-quick",
    summary="float32 weights, autocast to bfloat16, TF32 in the other matrix products",
    aliases=("quick",),
    autocast_dtype="bfloat16",
    float32_matmul="tf32",
    keeps_float32_weights=True,
    loop_changes=2,
    peak_dtype="bf16",
    format="tf32",
    code="with torch.autocast(device_type={device!r}, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)\n"
    "loss.backward()\noptimizer.step()",
    frameworks=Frameworks(lightning="bf16-mixed", accelerate="bf16", transformers="bf16=True"),
    look=Look("#123456", "star", "solid"),
)


@pytest.fixture
def new_row(monkeypatch: pytest.MonkeyPatch) -> Precision:
    monkeypatch.setattr(precisions, "PRECISIONS", (*PRECISIONS, NEW))
    return NEW


def test_a_new_row_is_measured_advised_and_shown(command: CommandLine, new_row: Precision) -> None:
    asked = ("resnet50", "--precision", "fp32,quick")
    table = command.run(*asked)
    assert table.code == 0
    assert [line.split()[0] for line in table.out.splitlines() if line.startswith(("fp32", new_row.name))] == [
        "fp32",
        new_row.name,
    ]
    document = json.loads(command.run(*asked, "--format", "json").out)
    (advice,) = document["advice"]
    assert advice["precision"] == new_row.name
    assert ast.parse(advice["code"])
    for form in ("csv", "markdown"):
        assert new_row.name in command.run(*asked, "--format", form).out


def test_a_new_row_has_its_code_look_and_place(new_row: Precision) -> None:
    trials = [
        fake_trial(fake_spec(name, repeat=repeat), step_seconds=(step_time_of(name),))
        for repeat in (0, 1)
        for name in ("fp32", new_row.name)
    ]
    (advice,) = decide(rows_of_steps(trials))
    assert (advice.precision, advice.code) == (new_row.name, "\n".join(loop_code(new_row, fake_spec())))
    assert [bool(each.code) for each in framework_snippets(new_row, "cuda")] == [True, True, True]
    assert look_of(new_row.name) == new_row.look
    assert sorted([new_row.name, "fp32", "?"], key=precision_sort_key) == ["fp32", new_row.name, "?"]


def test_a_new_row_is_unsupported_where_the_hardware_lacks_it(command: CommandLine, new_row: Precision) -> None:
    done = command.run("resnet50", "--precision", "fp32,quick", engine=FakeEngine(fake_environment((7, 5))))
    assert done.code == 2
    assert f"{new_row.name} needs CUDA compute capability 8.0" in done.err


def test_a_new_row_s_emitted_script_trains(new_row: Precision, tmp_path: Path) -> None:
    spec = spec_of("mnist-cnn", new_row.name)
    ((_, text),) = script_of(spec).items()
    assert "bfloat16" in text
    assert new_row.name in text
    assert all(epoch.loss > 0 for epoch in run_script(spec, tmp_path, steps=3))


@pytest.mark.parametrize(("capability", "repeats"), [(None, True), ((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_pytorch_s_default_repeats_fp32_where_there_is_no_tf32(
    capability: tuple[int, int] | None, repeats: bool
) -> None:
    hardware = Hardware("Fake", capability)
    same = [row.name for row in PRECISIONS if is_same_as_fp32(row, hardware)]
    assert same == (["default"] if repeats else [])


def test_a_precision_without_a_row_has_neutral_defaults() -> None:
    spec = fake_spec().model_copy(update={"precision": "int4-mixed"})
    trials = [fake_trial(), fake_trial(spec, step_seconds=(0.01,))]
    (advice,) = decide(rows_of_steps(trials))
    assert advice.precision is None, "nobody knows whether an unknown precision keeps float32 weights"
    assert "int4-mixed (10.00×) was faster but keeps no float32 weights" in advice.sentence
    assert precision_row("int4-mixed").code == ""
    assert look_of("int4-mixed") == look_of("int2-mixed") != look_of("fp32")


@pytest.mark.parametrize(
    ("name", "capability", "why"),
    [
        ("fp8-tensorwise", (8, 9), None),
        ("fp8-tensorwise", (8, 6), "needs CUDA compute capability 8.9 or newer; GPU has 8.6"),
        ("fp8-tensorwise", None, "needs CUDA compute capability 8.9 or newer; GPU is a CPU"),
        ("fp8-rowwise", (8, 9), "needs CUDA compute capability 9.0 or newer; GPU has 8.9"),
        ("mxfp8", (9, 0), "needs CUDA compute capability 10.0 or newer, before 11.0; GPU has 9.0"),
        ("mxfp8", (12, 0), "needs CUDA compute capability 10.0 or newer, before 11.0; GPU has 12.0"),
        ("nvfp4", (12, 1), "needs CUDA compute capability 10.0 or newer, before 11.0; GPU has 12.1"),
        ("mxfp8", (10, 3), None),
        ("nvfp4", (10, 0), "castwise does not train in it yet"),
    ],
)
def test_hardware_that_precisions_below_16_bits_need(name: str, capability: tuple[int, int] | None, why: str) -> None:
    found = why_unsupported(find_precision(name), Hardware("GPU", capability))
    assert found == why or (found or "").endswith(why)


@pytest.mark.parametrize(
    ("written", "name"),
    [("bf16", "bf16-mixed"), ("BFloat16", "bf16-mixed"), ("fp16", "fp16-mixed"), ("half", "fp16-true")],
)
def test_names_of_formats_are_names_of_precisions(written: str, name: str) -> None:
    assert find_precision(written).name == name


@pytest.mark.parametrize("written", ["fp64", "float64", "double", "64-true"])
def test_float64_is_refused_by_name(written: str) -> None:
    with pytest.raises(UsageError, match="castwise does not measure"):
        find_precision(written)


def test_precisions_below_16_bits_are_measured_only_if_they_are_named(command: CommandLine) -> None:
    names = {row.name for row in NARROW_PRECISIONS}
    rows = json.loads(command.run("gpt2", "--format", "json").out)["rows"]
    assert not names & {row["precision"] for row in rows}
    engine = FakeEngine(fake_environment((9, 0), torchao="0.18.0"))
    asked = ("gpt2", "--precision", "bf16-mixed,fp8-tensorwise", "--techniques", "compile")
    rows = json.loads(command.run(*asked, "--format", "json", engine=engine).out)["rows"]
    assert {row["precision"]: row["status"] for row in rows} == {"bf16-mixed": "ok", "fp8-tensorwise": "ok"}
    on_cpu = command.run(*asked, engine=FakeEngine(fake_environment(None)))
    assert on_cpu.code == 2
    assert "fp8-tensorwise needs CUDA compute capability 8.9" in on_cpu.err
