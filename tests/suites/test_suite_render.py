"""What a suite's result looks like: terminal, Markdown, CSV and JSON."""

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import fake_epoch, fake_run, fake_trial
from rich.console import Console

from castwise.analysis.training_metrics import length_in_words
from castwise.registry.suites import SUITE_NAMES, SuiteFilter, find_suite, limit_specs, specs_of
from castwise.show import training_table
from castwise.show.fields import in_files
from castwise.show.presentation import print_parts
from castwise.suites.render import limits_table, present
from castwise.suites.result import SuiteResult

HOSTILE = "a | b [red] [/red] \\ *c* <d>\nnext line"


def result(name: str, **choice: Any) -> SuiteResult:
    """Return a suite's result with memory, a search where the suite has one, and one run that failed."""
    suite = find_suite(name)
    asked = SuiteFilter(**choice)
    gib = 2**30
    memory: dict[str, Any] = {
        "peak_allocated_bytes": gib,
        "peak_reserved_bytes": 2 * gib,
        "driver_used_bytes": 3 * gib,
    }
    specs = specs_of(suite, device="cuda:0", choice=asked)
    trials = [fake_run(spec, **memory) for spec in specs]
    searches = []
    for spec, multiple in limit_specs(suite, device="cuda:0", choice=asked):
        larger = spec.model_copy(update={"batch_size": 2 * multiple})
        searches.append((fake_run(spec, **memory), fake_trial(larger, status="oom", message="full", step_seconds=())))
    return SuiteResult(suite, tuple(trials), tuple(searches))


def printed(made: SuiteResult, width: int = 200, terminal: bool = True, **how: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None, emoji=False)
    print_parts(present([made], **how).parts, console)
    return out.getvalue()


def markdown(made: SuiteResult) -> str:
    return present([made], wide=True, verbose=True).text("markdown")


def as_json(*made: SuiteResult) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    suites = json.loads(present(made).text("json"), parse_constant=refuse)["suites"]
    assert isinstance(suites, list)
    return suites


def as_csv(*made: SuiteResult) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(present(made).text("csv"))))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Return the tables of a Markdown text, each a list of lines of cells; each stands between blank lines."""
    tables = []
    for part in text.split("\n\n"):
        if part.lstrip().startswith("|"):
            lines = part.strip("\n").split("\n")
            assert all(line.startswith("|") for line in lines), part
            tables.append([cells(line) for line in lines])
    return tables


@pytest.mark.parametrize("name", SUITE_NAMES)
@pytest.mark.parametrize("width", [80, 200])
def test_a_suite_fits_its_terminal_and_breaks_no_figure(name: str, width: int) -> None:
    made = result(name, quick=True)
    text = printed(made, width)
    assert all(len(line) <= width for line in text.splitlines())
    for run in made.runs:
        batch = str(run.trial.spec.batch_size)
        assert any({run.trial.spec.precision, batch} <= set(line.split()) for line in text.splitlines()), (
            f"{run.trial.spec.label} is broken over lines"
        )


@pytest.mark.parametrize("name", SUITE_NAMES)
def test_a_piped_suite_has_every_line_whole(name: str) -> None:
    made = result(name)
    lines = printed(made, 250, terminal=False, verbose=True).splitlines()
    assert f"source: {made.suite.source}" in lines
    for line in (*made.suite.oddities, *made.suite.contradictions):
        assert f"  {line}" in lines


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"epochs": 1}, "1 of 10 epochs"),
        ({"max_steps": 3}, "10 epochs, cut to 3 steps"),
        ({"epochs": 2, "max_steps": 3}, "2 of 10 epochs, cut to 3 steps"),
    ],
)
def test_the_length_of_a_shortened_run_is_in_every_format(choice: dict[str, Any], words: str) -> None:
    made = result("wrn-cifar10", **choice)
    rows = [line for line in printed(made, 300).splitlines() if re.match(r"(fp32|fp16)", line)]
    assert len(rows) == 4 + 4 + 1 + 3, "the runs, and next to them the figures of T4, K80 and P100"
    assert all(words in row for row in rows)
    for table in markdown_tables(markdown(made)):
        column = next(index for index, title in enumerate(table[0]) if title in ("length", "measured run"))
        assert all(row[column] == words for row in table[2:])
    assert [row["length"] for row in as_csv(made)] == [words] * 4
    (document,) = as_json(made)
    assert [row["length"] for row in document["runs"]] == [words] * 4
    assert [(row["measured"], row["seconds"]) for row in document["published"]] == [(words, None)] * 8


def test_a_whole_run_is_called_whole_and_has_its_time() -> None:
    (document,) = as_json(result("wrn-cifar10"))
    row = document["published"][1]
    assert (row["measured"], row["precision"]) == ("whole", "fp16-mixed")
    run = next(run for run in document["runs"] if run["precision"] == "fp16-mixed")
    assert row["seconds"] == run["seconds"] > 0
    assert run["length"] == "10 epochs"
    assert row["published_seconds"] == 1874.0
    assert row["published_speedup"] == pytest.approx(3437 / 1874)
    assert row["ratio"] == pytest.approx(row["speedup"] / row["published_speedup"])
    assert row["memory_bytes"] == 3 * 2**30, "the driver's figure, as the source's is"


def ended(status: str, *, epochs: int, name: str = "wrn-cifar10", **choice: Any) -> SuiteResult:
    """Return a result whose first run ended otherwise, after so many epochs."""
    made = result(name, **choice)
    spec = made.trials[0].spec
    if epochs:
        trial = fake_run(spec, *(fake_epoch(spec, n) for n in range(epochs)), status=status)  # type: ignore[arg-type]
    else:
        trial = fake_trial(spec, status=status, message="it went wrong (fake)", step_seconds=())  # type: ignore[arg-type]
    return replace(made, trials=(trial, *made.trials[1:]))


def measured_runs(made: SuiteResult) -> list[str]:
    return [row["measured"] for row in as_json(made)[0]["published"]]


def test_published_rows_say_how_runs_ended() -> None:
    assert measured_runs(ended("oom", epochs=0))[0] == "oom"
    assert measured_runs(ended("diverged", epochs=3))[0] == "diverged after 3 of 10 epochs"
    three = result("wrn-cifar10", seeds=3)
    assert set(measured_runs(three)) == {"whole, 3 seeds"}
    assert measured_runs(ended("crashed", epochs=1, seeds=3))[0] == (
        "crashed after 1 of 10 epochs, 1 seed; whole, 2 seeds"
    )


def test_columns_without_information_are_left_out() -> None:
    def names(made: SuiteResult) -> set[str]:
        return {column.name for column in training_table.data_table(made.runs, made.pairs).columns}

    one, several = names(result("wrn-cifar10")), names(result("tensorcore"))
    assert one & {"workload", "data_set", "gpus", "seed", "efficiency"} == set()
    assert {"loss_scale", "accuracy"} <= one
    assert {"workload", "data_set"} <= several
    assert "loss_scale" not in several
    assert "seed" in names(result("wrn-cifar10", seeds=2))
    assert "perplexity" in names(result("rnn-lm"))
    assert {"gpus", "efficiency"} <= names(result("amd-nvidia", world_sizes=(1, 2), workloads=("resnet50",)))


def test_there_is_a_table_for_each_published_gpu_with_measured_cells() -> None:
    def num_published(name: str, **choice: Any) -> int:
        return printed(result(name, **choice), 300).count("Published on")

    assert num_published("wrn-cifar10", precisions=("O0",)) == 3
    assert num_published("wrn-cifar10", precisions=("O1",)) == 2
    assert num_published("amd-nvidia", world_sizes=(1,)) == 0
    assert "1.83" in printed(result("wrn-cifar10", precisions=("O1",)), 300), "without a run of the source's float32"


def test_the_largest_batch() -> None:
    made = result("dpn-cifar10")
    limits = as_json(made)[0]["largest_batch"]
    assert [(row["precision"], row["published"], row["measured"]) for row in limits] == [
        ("fp32", [256, 512], [128, 256]),
        ("fp16-master", [512, 640], [128, 256]),
    ]
    limit = made.limits[0]
    for measured, words in (
        ((None, 128), "128 does not"),
        ((128, None), "128 trains"),
        ((None, None), "–"),
    ):
        table = limits_table([{**limit, "measured": measured}])
        assert words in [column.text(table.rows[0]) for column in table.columns]


def hostile() -> SuiteResult:
    made = result("dpn-cifar10")
    figures = tuple(figure.model_copy(update={"gpu": HOSTILE}) for figure in made.suite.published)
    suite = made.suite.model_copy(
        update={"title": HOSTILE, "source": HOSTILE, "oddities": (HOSTILE,), "published": figures}
    )
    failed = made.trials[0].model_copy(update={"status": "crashed", "message": HOSTILE})
    data = made.trials[1].spec.model_copy(update={"data_set": HOSTILE})
    other = made.trials[1].model_copy(update={"spec": data})
    return SuiteResult(suite, (failed, other, *made.trials[2:]), made.searches)


def test_hostile_strings_break_no_table() -> None:
    made = hostile()
    text = markdown(made)
    tables = markdown_tables(text)
    assert len(tables) == 3
    for table in tables:
        assert len({len(line) for line in table}) == 1
    for line in text.splitlines():
        assert not line.startswith("next line"), "a newline got through"
    rows = as_csv(made)
    assert rows[1]["data_set"] == HOSTILE
    assert rows[0]["message"] == HOSTILE
    assert as_json(made)[0]["runs"][0]["message"] == HOSTILE
    for width in (80, 300):
        assert "[red]" in printed(made, width), "what looks like markup is printed as it is"
    assert "[red]" in printed(made, 250, terminal=False)


def test_json_and_csv_hold_everything() -> None:
    made = result("dpn-cifar10"), result("rnn-lm")
    one, two = as_json(*made)
    assert [one["suite"], two["suite"]] == ["dpn-cifar10", "rnn-lm"]
    assert (len(one["runs"]), len(one["trials"]), len(one["published"])) == (11, 11 + 4, 9), "cells and searches"
    assert one["oddities"]
    assert two["contradictions"]
    assert set(one["runs"][0]) == {each.name for each in in_files(training_table.COLUMNS)}
    rows = as_csv(*made)
    assert [row["suite"] for row in rows] == ["dpn-cifar10"] * 11 + ["rnn-lm"] * len(two["runs"])
    assert all(None not in row and None not in row.values() for row in rows), "each line has every column"
    empty = replace(made[0], trials=(), searches=())
    assert markdown_tables(markdown(empty)) == []
    assert as_csv(empty) == []


@pytest.mark.parametrize(
    ("epochs", "done", "steps", "words"),
    [
        (1, 1, None, "1 epoch"),
        (1, 0, None, "0 of 1 epoch"),
        (3, 3, None, "3 epochs"),
        (3, 1, None, "1 of 3 epochs"),
        (1, 1, 5, "1 epoch, cut to 5 steps"),
        (3, 2, 1, "2 of 3 epochs, cut to 1 step"),
    ],
)
def test_length(epochs: int, done: int, steps: int | None, words: str) -> None:
    suite = find_suite("wrn-cifar10")
    (spec, *_) = specs_of(suite, device="cuda:0", choice=SuiteFilter(max_steps=steps))
    assert spec.recipe is not None
    spec = spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"epochs": epochs})})
    trial = fake_run(spec, *(fake_epoch(spec, number) for number in range(done))) if done else fake_trial(spec)
    assert length_in_words(trial) == words


def test_the_note_on_first_steps_is_below_the_table_of_tuned_runs() -> None:
    made = result("tensorcore", workloads=("mnist-cnn",), max_steps=3, synthetic=True, techniques=("none", "tuned"))
    (document,) = as_json(made)
    (note,) = [line for line in document["notes"] if line.startswith("times as fast counts the first step")]
    for text in (printed(made, 2000), markdown(made)):
        _, _, below = text.partition("The published loop, and the tuned one")
        assert note in below
