"""What a reader would stumble over who reckons one column from another: told where it happens, and nowhere else."""

import statistics

import pytest
from fake_engine import fake_spec, fake_trial

from castwise.analysis.result_table import compare
from castwise.analysis.steady_metrics import spread
from castwise.records.schema import Trial
from castwise.render.disagreements import disagreements
from castwise.render.steady_columns import remarks

QUIET = (0.1,) * 8
LOUD = (0.1, 0.12) * 4
LOUDER = (0.1, 0.15) * 4


def sat(precision: str, repeat: int, *seconds: float, sitting: bool = True) -> Trial:
    trial = fake_trial(fake_spec(precision, repeat=repeat), step_seconds=seconds)
    return trial.model_copy(update={"session_id": f"s{repeat}" if sitting else None})


def rounds(*gains: float, drift: float = 1.0, sitting: bool = True) -> list[Trial]:
    """Return fp32 and bf16-mixed over rounds, with so many turns more of fp32 that drift falls on it alone."""
    trials = []
    for repeat, gain in enumerate(gains):
        before = [0.3 * drift**turn for turn in range(8)]
        trials.append(sat("fp32", repeat, *before, sitting=sitting))
        trials.append(sat("bf16-mixed", repeat, *(each / gain for each in before[:4]), sitting=sitting))
    return trials


def test_a_speed_up_by_turns_that_is_not_the_ratio_of_the_throughputs_says_why() -> None:
    _, row = rows = compare(rounds(1.05, 1.06, 1.04, drift=1.02))
    assert row.unpaired_speedup == pytest.approx((rows[0].step_seconds or 0) / (row.step_seconds or 1))
    (line,) = disagreements(rows)
    assert line.endswith(": its ratio is 1.09× for resnet50 bf16-mixed batch 256 (speed-up 1.05×)"), (
        "the four later turns of fp32 took longer"
    )
    assert line in remarks(rows)


def test_of_one_process_and_of_processes_apart_there_is_one_ratio() -> None:
    assert disagreements(compare(rounds(1.05, drift=1.02))) == []
    assert disagreements(compare(rounds(1.05, 1.06, 1.04, drift=1.02, sitting=False))) == []


def test_figures_that_agree_need_no_word() -> None:
    assert disagreements(compare(rounds(1.05, 1.06, 1.04))) == []
    within = compare(rounds(1.0, 1.3, 1.1, drift=1.02))
    assert within[1].unpaired_speedup != pytest.approx(within[1].speedup or 0)
    assert disagreements(within) == [], "the interval holds both"


def test_of_many_cells_a_few_are_told() -> None:
    trials = [
        trial.model_copy(update={"spec": trial.spec.model_copy(update={"batch_size": batch})})
        for batch in range(1, 10)
        for trial in rounds(1.05, 1.06, 1.04, drift=1.02)
    ]
    (line,) = disagreements(compare(trials))
    assert line.count("1.09×") == 6
    assert line.endswith("batch 6 (speed-up 1.05×) and 3 more")


def test_a_warning_is_that_of_the_noisiest_process_and_says_so_where_the_column_says_another_thing() -> None:
    (row,) = compare([sat("fp32", repeat, *blocks) for repeat, blocks in enumerate((QUIET, LOUD, LOUDER))])
    spreads = sorted(spread(trial) or 0.0 for trial in row.trials)
    assert row.spread == statistics.median(spreads) == spreads[1]
    lines = remarks([row])
    assert any(f"blocks spread by {100 * spreads[2]:.2g} %" in line for line in lines)
    told = "the column spread is the median over a cell's processes; the warning tells of the noisiest of them"
    assert told in lines
    for blocks in ((LOUD, LOUD), (QUIET, QUIET)):
        assert told not in remarks(compare([sat("fp32", repeat, *each) for repeat, each in enumerate(blocks)]))
    assert told not in remarks(compare([sat("fp32", 0, *LOUDER)])), "one process has one spread"
