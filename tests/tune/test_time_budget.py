"""Whether a session ends within what is left of the budget."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_engine import fake_facts, fake_spec, fake_trial

from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec
from castwise.tune.measurements import Measurements
from castwise.tune.time_budget import TimeLeft, default_budget, phase_limit

NOTHING = Measurements()


def loop(*techniques: str, workload: str = "resnet50", device: str = "cuda:0") -> TrialSpec:
    return fake_spec(workload=workload, techniques=techniques, device=device)


def trial(spec: TrialSpec, first_step_seconds: float, repeat: int = 0, status: str = "ok") -> Trial:
    facts = fake_facts(first_step_seconds=first_step_seconds)
    return fake_trial(spec.model_copy(update={"repeat": repeat}), facts=facts).model_copy(update={"status": status})


def least_seconds(
    *specs: TrialSpec, measured: Measurements = NOTHING, process_seconds: float = 2.0, final: Sequence[TrialSpec] = ()
) -> int:
    """Return the least whole number of seconds into which a session fits."""
    return next(seconds for seconds in range(10_000) if TimeLeft(seconds, process_seconds).fits(specs, measured, final))


def test_plain_loops_take_what_they_took() -> None:
    assert least_seconds(*[loop()] * 4) == 8
    assert least_seconds(*[loop()] * 4, final=[loop()] * 3) == 8 + 3 * 6
    assert least_seconds(*[loop()] * 4, process_seconds=0) == 0, "nothing is known before the first session"


def test_a_slow_machine_tries_something_within_a_small_budget() -> None:
    left = TimeLeft(63.0, 12.0)  # of 75 seconds
    specs, final = [loop()] * 2, [loop()] * 3
    assert not left.fits(specs, NOTHING, final)
    assert replace(left, most_kept=37.5).fits(specs, NOTHING, final)


def test_first_steps_are_guessed_before_any_was_measured() -> None:
    assert least_seconds(loop(), loop("cudnn-search"), loop("cudnn-search", "fused-optimizer")) == 6 + 2 * 5
    assert least_seconds(loop(), loop("compile")) == 4 + 40
    assert least_seconds(loop(workload="lstm-lm"), loop("compile", workload="lstm-lm")) == 4 + 15, "few kernels"
    assert least_seconds(loop(device="cpu"), loop("compile", device="cpu")) == 4
    assert TimeLeft(8.0, 2.0, is_short=True).fits([loop("cudnn-search"), loop()], NOTHING)


def test_compilations_run_side_by_side_behind_the_first() -> None:
    compiled = [loop("compile"), loop("compile", "channels-last"), loop("compile", "fused-optimizer")]
    assert least_seconds(*compiled) == 6 + 40 + 40
    assert least_seconds(loop("compile-max-autotune"), loop("compile")) == 4 + 4 * 40 + 40, "it times kernels alone"


def test_first_steps_are_predicted_by_those_measured() -> None:
    measured = Measurements().plus([trial(loop("compile"), 10.0), trial(loop("cudnn-search"), 3.0)])
    assert least_seconds(loop(), loop("compile", "channels-last"), measured=measured) == 4 + 10
    assert least_seconds(loop(), loop("compile", "compiled-update"), measured=measured) == 4 + 15
    assert least_seconds(loop(), loop("compile"), measured=measured) == 4 + 2, "it is on disk"
    assert least_seconds(loop(), loop("cudnn-search"), measured=measured) == 4 + 3
    again = measured.plus([trial(loop("compile"), 4.0, repeat=1)])
    assert least_seconds(loop(), loop("compile"), measured=again) == 4 + 4, "what the last process took"


def test_failures_and_updates_alone_tell_nothing_of_compilation() -> None:
    measured = Measurements().plus(
        [trial(loop("compile"), 90.0, status="crashed"), trial(loop("compiled-update"), 90.0)]
    )
    assert least_seconds(loop(), loop("compile", "channels-last"), measured=measured) == 4 + 40


@pytest.mark.parametrize(("seconds", "budget"), [(0.009, 160.0), (0.011, 540.0)])
def test_short_steps_have_a_short_budget(seconds: float, budget: float) -> None:
    assert default_budget([fake_trial(loop(), step_seconds=(seconds,) * 3)]) == budget


def test_a_phase_may_take_half_of_the_budget_or_three_minutes_of_it() -> None:
    assert [phase_limit(budget) for budget in (1200.0, 200.0, 20.0, None)] == [600.0, 180.0, 20.0, 270.0]
