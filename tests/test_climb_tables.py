"""The documents' tables and pictures of climbs."""

import copy
from pathlib import Path

import climb_tables
import pytest
from climb_tables import Climb, fastest_row, in_a_sentence, ladder, ladders, summary
from climbs import account_of
from record_charts import climb_chart
from stored import NOT_MEASURED
from test_climbs import GIB, climb
from test_tune import on_doubtful_loop

from castwise.tune.render import conclusions
from castwise.tune.rows import lines_of


def measured(**request: object) -> Climb:
    climbed, trials = climb(**request)
    return "a-Name", account_of(climbed), trials


MEASURED = measured()


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def test_a_ladder_has_all_that_was_tried_and_what_it_came_to() -> None:
    climbed, trials = climb()
    text = ladder(account_of(climbed), trials)
    lines = [line for line in lines_of(climbed) if line.outcome != "unsupported"]
    found = rows(text)[1:]
    assert [row[1] for row in found] == [line.tried for line in lines]
    assert [row[-1] for row in found] == [line.outcome or "–" for line in lines]
    assert all("× [" in row[2] for row in found if row[-1] == "taken"), "rungs have their intervals"
    assert all(f"- {sentence}" in text for sentence in conclusions(climbed))
    assert "resnet50, batch 256, steps on synthetic data, on Fake GPU" in text
    assert text.count("unsupported: foreach-optimizer needs a CPU") == 1


def test_the_summary_has_a_line_a_climb_with_the_plain_loop_and_the_fastest() -> None:
    name, account, trials = MEASURED
    (line,) = rows(summary([MEASURED], "climbs.md"))[1:]
    last = account["rows"][0]["throughput_per_second"] * max(row["total_speedup"] or 0 for row in account["rows"])
    assert line[0] == f"[{name}](climbs.md#a-name), batch 256"
    assert line[2].startswith(account["fastest"]["precision"])
    assert float(line[3].split()[0].replace(",", "")) == pytest.approx(last, rel=0.01)
    assert line[-1] == "nothing left"
    assert line[-3] == str(len(trials))


def test_a_climb_that_a_budget_ended_names_it() -> None:
    name, account, trials = MEASURED
    cut = {**account, "ending": "budget", "budget_seconds": 125.0}
    assert rows(summary([(name, cut, trials)], "climbs.md"))[1][-1] == "budget, 2 min 05 s"
    assert "`castwise tune a-Name --budget 125s`" in in_a_sentence(name, cut, trials)
    assert "--budget" not in in_a_sentence(name, {**cut, "budget_seconds": 540.0}, trials), "what it is without one"


def test_what_nothing_was_better_than_is_no_second_best() -> None:
    _, account, trials = MEASURED
    last = 1 + max(row["rung"] for row in account["rows"])
    alone = {**account["rows"][-1], "rung": last, "tried": "x", "speedup": None, "outcome": "second best"}
    text = ladder({**account, "rows": [*account["rows"], alone]}, trials)
    assert [row[-1] for row in rows(text) if row[1] == "x"] == ["unproven"]


def test_a_sentence_says_from_where_to_where_and_when() -> None:
    text = in_a_sentence(*MEASURED)
    assert text.startswith("`castwise tune a-Name` (Fake GPU, ")
    assert ", 2026-11-21): from " in text
    assert text.endswith(" s.\n")


def test_a_sentence_has_the_limit_and_tells_what_was_measured_before() -> None:
    name, account, trials = MEASURED
    text = in_a_sentence(name, account | {"memory_limit_bytes": 3 * 2**29, "num_recorded": 4}, trials)
    assert text.startswith("`castwise tune a-Name --memory 1.5GiB` (Fake GPU, ")
    assert f"; {len(trials)} trials, 4 of them on record already, in " in text
    assert account_of(climb(memory_bytes=GIB)[0], GIB)["memory_limit_bytes"] == GIB


def test_accounts_of_before_are_told_over_the_rungs() -> None:
    """They had what was tried on a loop that is no rung by its change to that loop, and its ratio over it."""
    climbed = on_doubtful_loop()
    account = account_of(climbed)
    text = ladder(account, climbed.trials)
    (restated,) = [row for row in account["rows"] if row["techniques"] == "channels-last+cudnn-search"]
    fp16 = next(row for row in account["rows"] if row["precision"] == "fp16-mixed")
    old = [row | {"tried": "cudnn-search", "speedup": 0.99} if row is restated else row for row in account["rows"]]
    old.append(fp16 | {"tried": "fp16-mixed", "speedup": 0.91})
    again = rows(ladder(account | {"rows": old}, climbed.trials))
    assert again == rows(text)
    assert sum(row[1].startswith("fp16-mixed") for row in again) == 1


def test_pictures_are_linked_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb_tables, "IMAGES", tmp_path)
    assert "![" not in ladders([MEASURED])
    (tmp_path / "tune-a-Name.png").touch()
    assert "## a-Name\n\n![What each change to a-Name bought](images/tune-a-Name.png)\n" in ladders([MEASURED])


def test_nothing_measured_says_so() -> None:
    assert summary([], "climbs.md") == ladders([]) == NOT_MEASURED


def test_a_waterfall_has_the_rungs_and_no_others() -> None:
    _, account, _ = MEASURED
    chart = climb_chart(MEASURED)
    assert chart is not None
    taken = [row for row in account["rows"] if row["outcome"] == "taken"]
    (trace,) = chart.traces
    assert len(trace["y"]) == len(taken) + 2
    assert trace["text"][1:-1] == [f"{row['speedup']:.2f}×" for row in taken]
    assert sum(trace["y"][:-1]) == pytest.approx(trace["y"][-1])
    assert chart.layout["xaxis"]["ticktext"][1] == taken[0]["tried"]


def test_a_rung_that_was_faster_beside_the_one_below_does_not_fall_in_the_waterfall() -> None:
    name, account, trials = copy.deepcopy(MEASURED)
    taken = [row for row in account["rows"] if row["outcome"] == "taken"]
    taken[1]["throughput_per_second"] = taken[0]["throughput_per_second"] * 0.9  # in another sitting, on a busy host
    chart = climb_chart((name, account, trials))
    assert chart is not None
    (trace,) = chart.traces
    plain, *steps, last = trace["y"]
    assert (plain, last) == (account["rows"][0]["throughput_per_second"], taken[-1]["throughput_per_second"])
    assert all(step > 0 for step in steps)
    totals = [row["total_speedup"] for row in taken]
    assert steps[1] == pytest.approx(plain * (totals[1] - totals[0]))


def test_a_climb_that_took_nothing_has_no_waterfall() -> None:
    name, account, trials = MEASURED
    plain = account | {"rows": [row for row in account["rows"] if row["outcome"] != "taken"]}
    assert climb_chart((name, plain, trials)) is None


def test_a_winner_on_a_smaller_batch_is_no_rung_and_not_the_fastest() -> None:
    climbed, trials = climb(memory_bytes=GIB)
    account = account_of(climbed, GIB)
    smaller = [row for row in account["rows"] if row["tried"].endswith("(within the limit)")]
    assert any(row["outcome"] == "taken" for row in smaller)
    assert fastest_row(account)["batch_size"] == account["fastest"]["batch_size"] == 256
    whole, limited = climb_chart(MEASURED), climb_chart(("a-Name", account, trials))
    assert whole is not None
    assert limited is not None
    assert limited.layout["xaxis"]["ticktext"] == whole.layout["xaxis"]["ticktext"]
