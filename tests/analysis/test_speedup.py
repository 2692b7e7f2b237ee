"""Speed-ups from several processes: paired where they ran together, and rows and verdicts made of them."""

import math
from collections.abc import Callable

import pytest
from fake_engine import fake_environment, fake_run, fake_spec, fake_training, fake_trial
from fake_gpu import fake_reading

from castwise.analysis.result_table import Row, rows_of_steps
from castwise.analysis.speedup import (
    comparison_key,
    rate_estimate,
    session_speedup_estimate,
    speedup_estimate,
    step_estimate,
)
from castwise.analysis.statistics import LEVEL
from castwise.records.schema import Status, Trial
from castwise.show.notes import notes_of, remarks
from castwise.spec.trial import MeasurementProtocol
from castwise.spec.user_model import UserModel

SCRIPT = UserModel(kind="script", path="train.py", name="")


def timed(precision: str, session: str | None, *seconds: float, repeat: int = 0, status: Status = "ok") -> Trial:
    trial = fake_trial(fake_spec(precision, repeat=repeat), step_seconds=seconds, status=status)
    return trial.model_copy(update={"session_id": session})


def rounds(*pairs: tuple[float, float], drift: float = 1.0) -> list[Trial]:
    """Return fp32 and bf16-mixed over rounds; the machine is slower by `drift` with each block."""
    trials = []
    for repeat, (before, after) in enumerate(pairs):
        slowdowns = [drift**block for block in range(5)]
        trials.append(timed("fp32", f"s{repeat}", *(before * slower for slower in slowdowns), repeat=repeat))
        trials.append(timed("bf16-mixed", f"s{repeat}", *(after * slower for slower in slowdowns), repeat=repeat))
    return trials


def rows_of(trials: list[Trial]) -> tuple[Row, Row]:
    first, second = rows_of_steps(trials)
    return first, second


def test_each_session_gives_one_ratio() -> None:
    trials = rounds((0.3, 0.1), (0.3, 0.1), (0.3, 0.1), drift=1.5)
    found = speedup_estimate(trials[::2], trials[1::2])
    assert found is not None
    assert (found.value, found.n) == (pytest.approx(3), 3)
    assert found.half_width == pytest.approx(0, abs=1e-9), "drift falls on both alike"


def test_the_blocks_of_one_session_have_an_interval() -> None:
    before, after = timed("fp32", "s", 0.3, 0.31, 0.29, 0.3, 0.3), timed("bf16-mixed", "s", 0.1, 0.1, 0.1, 0.1, 0.1)
    found = session_speedup_estimate([before], [after])
    assert found is not None
    assert (found.value, found.n) == (pytest.approx(3, rel=0.01), 1), "one process each, however many blocks"
    assert 2.8 < found.low < 2.99
    assert 3.01 < found.high < 3.2
    assert session_speedup_estimate([before], [timed("bf16-mixed", "other", 0.1)]) is None
    last = timed("bf16-mixed", "t", 0.15, 0.15, 0.15)
    newest = session_speedup_estimate([before, timed("fp32", "t", 0.3, 0.3, 0.3)], [after, last])
    assert newest is not None
    assert newest.value == pytest.approx(2), "of the last session they share"


def test_a_rate_is_the_units_of_a_step_over_its_seconds() -> None:
    trials = [timed("fp32", f"s{number}", seconds) for number, seconds in enumerate((0.1, 0.125))]
    step = step_estimate(trials)
    found = rate_estimate(trials, step)
    assert step is not None
    assert found is not None
    units = 256  # images of a step
    assert (found.value, found.n) == (pytest.approx(units / step.value), 2)
    assert (found.low, found.high) == (pytest.approx(units / step.high), pytest.approx(units / step.low))
    assert found.low < found.value < found.high
    assert rate_estimate(trials, None) is rate_estimate([], None) is None
    assert step_estimate([timed("fp32", None, status="oom")]) is None
    assert speedup_estimate([], trials) is None


def test_one_common_session_of_several_gives_an_unpaired_ratio() -> None:
    trials = rounds((0.3, 0.1), (0.33, 0.1), (0.3, 0.11))
    trials = [*trials[:2], *(trial.model_copy(update={"session_id": None}) for trial in trials[2:])]
    found = speedup_estimate(trials[::2], trials[1::2])
    assert found is not None
    assert (found.value, found.n) == (pytest.approx(3, rel=0.02), 3)
    assert 0.1 < found.half_width < 0.5, "the drift between sessions is in the interval"
    once = speedup_estimate(trials[:1], trials[1:2])
    assert once is not None
    assert (once.value, once.n) == (pytest.approx(3), 1)


def test_unpaired_interval_is_welchs() -> None:
    from scipy.stats import ttest_ind

    before, after = [0.30, 0.32, 0.31, 0.33], [0.10, 0.11, 0.10]
    found = speedup_estimate(
        [timed("fp32", None, second, repeat=n) for n, second in enumerate(before)],
        [timed("bf16-mixed", None, second, repeat=n) for n, second in enumerate(after)],
    )
    logs = [[math.log(second) for second in side] for side in (before, after)]
    expected = ttest_ind(*logs, equal_var=False).confidence_interval(LEVEL)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(math.exp(expected.low)), pytest.approx(math.exp(expected.high)))


def test_a_throughput_that_contradicts_its_ratio_is_the_baseline_s_by_the_ratio() -> None:
    trials = rounds((0.3, 0.1), (0.1, 0.05), (0.1, 0.05))  # the machine was busy in the first
    base, mixed = rows_of([*trials[:2], trials[2], trials[4]])
    assert mixed.speedup == pytest.approx(3)
    assert base.throughput is not None
    assert mixed.throughput == pytest.approx(3 * base.throughput)
    assert mixed.step_seconds == pytest.approx((base.step_seconds or 0) / 3)
    assert (base.adjusted_to, mixed.adjusted_to) == ("", "fp32")
    assert [note.name for note in notes_of([base, mixed]) if note.name == "drift"] == ["drift"]
    quiet = rounds((0.3, 0.1), (0.299, 0.1), (0.3, 0.1))
    _, in_fewer = rows_of([*quiet[:2], quiet[2], quiet[4]])
    assert (in_fewer.adjusted_to, in_fewer.step_seconds) == ("", pytest.approx(0.1)), "as measured"
    _, in_all = rows_of(trials)
    assert in_all.adjusted_to == ""
    assert in_all.step_seconds == pytest.approx((0.1 * 0.05 * 0.05) ** (1 / 3))


@pytest.mark.parametrize("sessions", [("s", "s"), (None, None)])
@pytest.mark.parametrize(("values", "speedup"), [(500, 1.5), (990, 3), (None, 3)])
def test_scripts_are_compared_over_batches_of_one_size(
    sessions: tuple[str | None, str | None], values: int | None, speedup: float
) -> None:
    """Nearly equal batches are taken to be equal."""
    trials = []
    for precision, session, seconds, size in zip(
        ("as-written", "bf16-mixed"), sessions, (0.3, 0.1), (1000, values), strict=True
    ):
        spec = fake_spec(precision, user_model=SCRIPT)
        trial = fake_trial(spec, step_seconds=(seconds,)).model_copy(update={"session_id": session})
        block = (
            trial.ranks[0]
            .blocks[0]
            .model_copy(update={"num_values": size, "in_stretch": True, "num_samples": size and size / 10})
        )
        trials.append(trial.model_copy(update={"ranks": (trial.ranks[0].model_copy(update={"blocks": (block,)}),)}))
    written, mixed = rows_of(trials)
    assert mixed.written_speedup == pytest.approx(speedup)
    assert written.throughput == pytest.approx(100 / 0.3)
    if values is not None:
        assert mixed.throughput == pytest.approx(speedup * 100 / 0.3, rel=0.02), "of batches of that size"
    names = {note.name for note in notes_of([written, mixed])}
    assert ("batches" in names, "drift" in names) == (values == 500, False)


def test_a_configuration_is_one_row_over_all_processes() -> None:
    base, mixed = rows_of(rounds((0.30, 0.10), (0.31, 0.10), (0.32, 0.11)))
    assert len(base.trials) == len(mixed.trials) == 3
    assert base.step_seconds == pytest.approx((0.30 * 0.31 * 0.32) ** (1 / 3))
    assert base.speedup == 1
    assert base.verdict is None
    assert mixed.throughput_estimate is not None
    assert mixed.throughput_estimate.low < (mixed.throughput or 0) < mixed.throughput_estimate.high
    assert mixed.verdict is not None
    assert mixed.verdict.kind == "faster"


@pytest.mark.parametrize(
    ("after", "kind"),
    [((0.3, 0.3003, 0.2997), "same"), ((0.31, 0.3102, 0.3098), "slower"), ((0.25, 0.35, 0.3), "inconclusive")],
)
def test_verdicts_of_rows(after: tuple[float, ...], kind: str) -> None:
    rows = rows_of_steps(rounds(*((0.3, second) for second in after)))
    assert rows[1].verdict is not None
    assert rows[1].verdict.kind == kind
    assert any("inconclusive" in line for line in remarks(rows)) == (kind == "inconclusive")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (fake_trial(fake_spec("bf16-mixed", batch_size=128)), "another batch size"),
        (fake_trial(fake_spec("bf16-mixed", workload="dpn92")), "another workload"),
        (fake_trial(fake_spec("bf16-mixed"), environment=fake_environment(driver="another")), "another driver"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_incomparable_configurations_have_a_reason(other: Trial, words: str) -> None:
    (_, row) = rows_of_steps([fake_trial(fake_spec("fp32", protocol=MeasurementProtocol(timeout_seconds=5.0))), other])
    assert row.speedup is None
    assert row.verdict is not None
    assert (row.verdict.kind, row.verdict.ratio) == ("incomparable", None)
    assert words in row.verdict.reason
    assert "protocol" not in row.verdict.reason, "a time limit keeps nothing from being compared"
    assert any(words in line for line in remarks([row]))


def test_a_process_that_failed_shows_in_its_row() -> None:
    trials = rounds((0.3, 0.1), (0.3, 0.1))
    trials.append(timed("bf16-mixed", None, repeat=2, status="crashed"))
    row = rows_of_steps(trials)[1]
    assert row.trial.status == "crashed"
    assert row.speedup == pytest.approx(3)


def test_comparison_key() -> None:
    first, other = fake_trial(fake_spec(batch_size=8)), fake_trial(fake_spec(batch_size=32, techniques=("compile",)))
    assert comparison_key(first, "batch_size", "techniques") == comparison_key(other, "batch_size", "techniques")
    assert comparison_key(first, "batch_size") != comparison_key(other, "batch_size")
    patient = fake_spec(batch_size=8, repeat=1, protocol=MeasurementProtocol(timeout_seconds=5.0))
    assert comparison_key(first) == comparison_key(fake_trial(patient)), "repeat and time limit"
    here, there = (fake_trial(environment=fake_environment(driver=driver)) for driver in ("1", "2"))
    assert comparison_key(here) != comparison_key(there)
    short, long = (fake_run(fake_training(recipe={"stop_after": epochs})) for epochs in (1, 2))
    assert comparison_key(short) != comparison_key(long)
    assert comparison_key(short, recipe={"stop_after": True}) == comparison_key(long, recipe={"stop_after": True})


def in_stretch(trial: Trial) -> Trial:
    (rank,) = trial.ranks
    blocks = tuple(block.model_copy(update={"in_stretch": True}) for block in rank.blocks)
    return trial.model_copy(update={"ranks": (rank.model_copy(update={"blocks": blocks}),)})


def capped(trial: Trial) -> Trial:
    return trial.model_copy(update={"readings": (fake_reading(throttle_reasons=("sw_power_cap",)),)})


@pytest.mark.parametrize(("at_limit", "share"), [(in_stretch, 1.005), (capped, 1.02)])
def test_intervals_at_the_power_limit_hold_its_bias(at_limit: Callable[[Trial], Trial], share: float) -> None:
    trials = rounds((0.3, 0.1), (0.303, 0.1), (0.306, 0.1))
    before, after = trials[::2], trials[1::2]
    limited = [at_limit(trial) for trial in after]
    for free, held in (
        (speedup_estimate(before, after), speedup_estimate(before, limited)),
        (step_estimate(after), step_estimate(limited)),
    ):
        assert free is not None
        assert held is not None
        assert held.value == pytest.approx(free.value)
        assert (held.low, held.high) == (pytest.approx(free.low / share), pytest.approx(free.high * share))


@pytest.mark.parametrize(("at_limit", "share"), [(in_stretch, 1), (lambda each: capped(in_stretch(each)), 1.005)])
def test_a_script_s_interval_is_wider_at_the_power_limit_alone(
    at_limit: Callable[[Trial], Trial], share: float
) -> None:
    trials = [
        trial.model_copy(update={"spec": trial.spec.model_copy(update={"user_model": SCRIPT})})
        for trial in rounds((0.3, 0.1), (0.303, 0.1), (0.306, 0.1))
    ]
    free, held = step_estimate(trials[::2]), step_estimate([at_limit(trial) for trial in trials[::2]])
    assert free is not None
    assert held is not None
    assert (held.low, held.high) == (pytest.approx(free.low / share), pytest.approx(free.high * share))


def test_blocks_at_the_power_limit_do_not_count_next_to_stretches() -> None:
    trials = rounds((0.3, 0.1), (0.303, 0.1), (0.306, 0.1))[1::2]
    stretches = [in_stretch(trial) for trial in trials[1:]]
    assert step_estimate([capped(trials[0]), *stretches]) == step_estimate(stretches)
    one, all_three = step_estimate([capped(trials[0]), capped(trials[1]), stretches[1]]), step_estimate(trials)
    assert one is not None
    assert all_three is not None
    assert one.n == all_three.n


def test_blocks_of_a_stretch_are_not_paired() -> None:
    """They are not of the same moments as the other side's: each side has its own pseudomedian."""
    seconds = 0.3, 0.3, 0.3, 0.3, 0.2, 0.2, 0.2, 0.2
    before, after = timed("fp32", "s", *seconds), timed("bf16-mixed", "s", 0.1, 0.1, 0.1, 0.1)
    paired, unpaired = speedup_estimate([before], [after]), speedup_estimate([before], [in_stretch(after)])
    assert paired is not None
    assert unpaired is not None
    assert paired.value == pytest.approx(3.0)
    assert unpaired.value == pytest.approx(2.5)
