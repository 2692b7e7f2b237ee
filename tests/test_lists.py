"""The lists of a report's page: what to take where."""

import pytest
from fake_engine import fake_environment, fake_spec, fake_trial
from fake_records import steady

from castwise.records.schema import Trial
from castwise.report.collection import collect
from castwise.report.conclusions import answers_of
from castwise.report.html import report_page
from castwise.report.html.page_frame import Source
from castwise.report.html.sections import answer_grid, summary, warnings


def settings(*trials: Trial) -> list[str]:
    grid = answer_grid(answers_of(collect(trials)))
    (column,) = [each for each in grid.columns if each.title == "setting"]
    return [column.text(item) for item in grid.rows]


def test_a_setting_names_the_loop_where_loops_differ() -> None:
    plain = [steady("fp32"), steady("tf32")]
    assert settings(*plain) == ["batch 256"]
    loops = [steady("tf32", techniques=("compile", "cuda-graph"))]
    assert settings(*plain, *loops) == ["batch 256, plain loop", "batch 256, compile+cuda-graph"]
    assert settings(*loops) == ["batch 256, compile+cuda-graph"]


def test_a_few_of_many_devices_and_of_many_cells_are_named() -> None:
    machines = [fake_environment(gpu=f"GPU {number}") for number in range(5)]
    many = collect(
        fake_trial(fake_spec(batch_size=batch), step_seconds=(0.3,) * 3).model_copy(update={"environment": machine})
        for batch, machine in enumerate(machines * 2, start=1)
    )
    assert " on GPU 0, GPU 1, GPU 2 and 2 more, " in summary(many)
    short = next(befallen for warning, _, befallen in warnings(many) if warning.name == "too-few-blocks")
    assert short.startswith("resnet50 fp32 batch 1 (")
    assert short.count("; ") == 5
    assert short.endswith(" and 4 more")


def test_a_few_of_the_comparisons_without_charts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "_MOST_TOPICS", 1)
    made = report_page.render(collect(steady(workload=f"model-{n}") for n in range(11)), Source(lambda _: "f.json"))
    assert "10 more comparisons have no charts on this page" in made
    assert "model-1, model-2, model-3, model-4, model-5, model-6, model-7, model-8 and 2 more." in made
