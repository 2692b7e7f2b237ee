"""The lists of a report's page: what to take where."""

from fake_records import steady

from castwise.analyze.answers import answers_of
from castwise.analyze.collection import collect
from castwise.record import Trial
from castwise.report.html.lists import answer_grid


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
