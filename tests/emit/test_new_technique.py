"""What a technique is made of: one row, of which plan, search, worker, table and emitted script know all they need."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest
import sample_technique
from loops import ADADELTA, setup_of, spec_of
from rich.console import Console
from scripts import check_whole, measured_losses, run_script
from scripts import spec_of as script_spec

from castwise.cli import listings
from castwise.emit.script import script_of
from castwise.emit.source import copy_definitions
from castwise.errors import UsageError
from castwise.registry.technique_fit import why_unsupported
from castwise.registry.techniques import TECHNIQUES, Technique, step_config_of
from castwise.show.presentation import print_parts
from castwise.spec.plan import ParameterGrid, parse_grid
from castwise.tune.candidates import Change, allowed_techniques, is_applicable

NAME = sample_technique.ROW.name


@pytest.fixture
def registered() -> Iterator[Technique]:
    """Add a technique for the time of a test."""
    TECHNIQUES.append(sample_technique.ROW)
    yield sample_technique.ROW
    TECHNIQUES.remove(sample_technique.ROW)


@pytest.mark.usefixtures("registered")
def test_a_new_row_is_planned_and_listed() -> None:
    axes = ParameterGrid(workloads=("mnist-cnn", "lstm-lm"), precisions=("fp32",), techniques=(NAME,))
    images, words = parse_grid(axes).specs("cpu")
    assert images.techniques == (NAME,)
    assert why_unsupported(images) is None
    assert "is for images" in str(why_unsupported(words))
    console = Console(width=400, file=io.StringIO(), record=True)
    print_parts(listings.techniques(), console)
    assert NAME in console.export_text()


@pytest.mark.usefixtures("registered")
def test_a_new_row_is_searched() -> None:
    assert NAME in allowed_techniques("rounding", script_spec("mnist-cnn"))
    assert NAME not in allowed_techniques("bits", script_spec("mnist-cnn"))
    plain = script_spec("mnist-cnn")
    assert is_applicable(NAME, plain)
    assert Change(techniques=(NAME,)).on(plain).techniques == (NAME,)


@pytest.mark.usefixtures("registered")
def test_a_new_row_is_carried_out_by_the_worker() -> None:
    with setup_of(spec_of(ADADELTA, "fp32", NAME)) as (setup, _):
        kinds = [type(module) for module in setup.task.model.modules()]
    assert kinds.count(sample_technique.ScaledConv) == 2


@pytest.mark.usefixtures("registered")
def test_a_new_row_is_emitted(tmp_path: Path) -> None:
    spec = script_spec("mnist-cnn", "bf16-mixed", (NAME,))
    check_whole(script_of(spec).values(), set(), tmp_path)
    losses = [epoch.loss for epoch in run_script(spec, tmp_path)]
    assert losses == measured_losses(spec)
    plain = spec.model_copy(update={"techniques": ()})
    assert losses != pytest.approx(measured_losses(plain), rel=1e-5)


def test_a_technique_that_no_script_can_have_is_refused() -> None:
    row = replace(sample_technique.ROW, settings={"pinned_transfer": True})
    TECHNIQUES.append(row)
    try:
        with pytest.raises(UsageError, match=f"No script can be emitted with {NAME}.*'pinned_transfer'"):
            script_of(script_spec("mnist-cnn", "fp32", (NAME,)))
    finally:
        TECHNIQUES.remove(row)


@pytest.mark.parametrize("row", TECHNIQUES, ids=lambda row: row.name)
def test_functions_that_change_a_model_exist_and_can_be_copied(row: Technique, tmp_path: Path) -> None:
    for change in step_config_of([row.name]).model_changes:
        assert callable(resolve_name(change.function))
        imports, text = copy_definitions([change.function])
        check_whole(["\n".join([*imports, text])], set(), tmp_path)
