"""The options classes, of which the command line and the Python API are made."""

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import castwise
from castwise.api import (
    CompareKeywords,
    MaxBatchModelKeywords,
    ModelKeywords,
    ReportKeywords,
    RunKeywords,
    TuneModelKeywords,
    WhyModelKeywords,
)
from castwise.cli.compare import CompareOptions
from castwise.cli.export import ExportOptions
from castwise.cli.options import PrintOptions
from castwise.cli.report import ReportPrintOptions
from castwise.cli.run import RunPrintOptions
from castwise.cli.tune import TunePrintOptions
from castwise.errors import UsageError
from castwise.max_batch.options import MaxBatchOptions
from castwise.report.files import ReportOptions
from castwise.spec.options import DEFAULT_RESULTS, RunOptions, WhyOptions, options_of, parse_options
from castwise.suites.options import SuiteOptions
from castwise.tune.options import TuneOptions

MEASURING = (RunOptions, WhyOptions, TuneOptions, MaxBatchOptions, SuiteOptions)
PRINTING = (PrintOptions, RunPrintOptions, TunePrintOptions)


@pytest.mark.parametrize(
    "options", [*MEASURING, *PRINTING, ReportOptions, ReportPrintOptions, CompareOptions, ExportOptions]
)
def test_every_option_has_its_help_and_a_name_of_its_own(options: type) -> None:
    found = list(options_of(options))
    assert all(each.help or each.hidden for each in found)
    for names in ([each.keyword for each in found], [flag for each in found for flag in each.flags]):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("options", MEASURING)
def test_every_field_is_an_option(options: type) -> None:
    assert {each.name for each in options_of(options)} == set(options.__dataclass_fields__)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "keywords", "options"),
    [
        (castwise.run, RunKeywords, RunOptions),
        (castwise.compare, CompareKeywords, RunOptions),
        (castwise.tune, TuneModelKeywords, TuneOptions),
        (castwise.why, WhyModelKeywords, WhyOptions),
        (castwise.max_batch, MaxBatchModelKeywords, MaxBatchOptions),
        (castwise.report, ReportKeywords, ReportOptions),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_keywords_of_a_function_are_the_options_of_its_command(function: Any, keywords: Any, options: Any) -> None:
    names = {option.keyword for option in options_of(options) if not option.hidden}
    arguments = {"workload", "records"} if keywords is not ReportKeywords else {"records"}
    assert set(keywords.__annotations__) - set(ModelKeywords.__annotations__) == names - arguments
    assert set(keywords.__annotations__) <= set(inspect.signature(function).parameters)
    assert all(f"        {keyword}: " in str(function.__doc__) for keyword in keywords.__annotations__)
    assert "**options" not in str(function.__doc__)


@pytest.mark.parametrize("name", ["run", "compare", "tune", "why", "max_batch", "report"])
def test_an_unknown_keyword_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'batchsize'"):
        getattr(castwise, name)("resnet50", batchsize=8)


def test_a_command_is_a_function_of_the_package_whatever_was_imported_before() -> None:
    import_module("castwise.tune.search")
    for name in ("tune", "max_batch", "report"):
        assert inspect.isfunction(getattr(castwise, name))
        assert inspect.ismodule(sys.modules[f"castwise.{name}"])


@pytest.mark.parametrize(
    ("keyword", "given", "meant"),
    [
        ("workload", ["resnet18", "resnet50,dpn92"], ("resnet18", "resnet50", "dpn92")),
        ("precision", "fp32, tf32", ("fp32", "tf32")),
        ("batch_size", [4, "8,16"], (4, 8, 16)),
        ("loss_scale", ["dynamic", 128], ("dynamic", "128")),
        ("timeout_seconds", "2min", 120.0),
        ("timeout_seconds", 5, 5.0),
        ("within", "1%", 0.01),
        ("rounds", "3", 3),
        ("data", "there", Path("there")),
    ],
)
def test_texts_and_values_are_understood(keyword: str, given: Any, meant: Any) -> None:
    field = next(option.name for option in options_of(RunOptions) if option.keyword == keyword)
    assert getattr(parse_options(RunOptions, {keyword: given}), field) == meant


def test_options_that_are_not_given_have_defaults() -> None:
    assert parse_options(RunOptions, {"precision": None}) == RunOptions()
    assert next(option.default for option in options_of(RunOptions) if option.name == "results") == DEFAULT_RESULTS


@pytest.mark.parametrize(("on_command_line", "name"), [(True, "--timeout"), (False, "timeout_seconds")])
def test_an_error_names_the_option_as_the_user_wrote_it(on_command_line: bool, name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name} takes a duration"):
        parse_options(RunOptions, {"timeout_seconds": "soon"}, on_command_line=on_command_line)
