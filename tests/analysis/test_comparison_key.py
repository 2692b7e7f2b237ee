"""What trials must share to be set beside each other."""

from fake_engine import fake_environment, fake_run, fake_spec, fake_training, fake_trial

from castwise.analysis.result_table import compare
from castwise.analysis.speedup import comparison_key
from castwise.spec.trial import MeasurementProtocol


def test_trials_that_differ_in_the_named_fields_alone_share_all_else() -> None:
    first = fake_trial(fake_spec(batch_size=8))
    other = fake_trial(fake_spec(batch_size=32, techniques=("channels-last",)))
    assert comparison_key(first, "batch_size", "techniques") == comparison_key(other, "batch_size", "techniques")
    assert comparison_key(first, "batch_size") != comparison_key(other, "batch_size")


def test_rounds_share_all() -> None:
    first, second = (fake_trial(fake_spec(repeat=number)) for number in (0, 1))
    assert comparison_key(first) == comparison_key(second)


def test_two_machines_never_share_all() -> None:
    here, there = (fake_trial(environment=fake_environment(driver=driver)) for driver in ("1", "2"))
    assert comparison_key(here) != comparison_key(there)


def test_a_part_of_a_field_may_differ() -> None:
    short, long = (fake_run(fake_training(recipe={"stop_after": epochs})) for epochs in (1, 2))
    assert comparison_key(short) != comparison_key(long)
    assert comparison_key(short, recipe={"stop_after": True}) == comparison_key(long, recipe={"stop_after": True})
    assert comparison_key(fake_trial(), recipe={"stop_after": True}) == comparison_key(fake_trial()), "it has no recipe"


def test_the_time_limit_sets_nothing_apart() -> None:
    short, long = (
        fake_trial(fake_spec(protocol=MeasurementProtocol(timeout_seconds=seconds))) for seconds in (5.0, 900.0)
    )
    assert comparison_key(short) == comparison_key(long)
    (_, faster) = compare([short, fake_trial(fake_spec("tf32", protocol=long.spec.protocol), step_seconds=(0.05,))])
    assert faster.speedup is not None


def test_a_time_limit_is_no_reason_why_two_cannot_be_compared() -> None:
    short, long = (MeasurementProtocol(timeout_seconds=seconds) for seconds in (5.0, 900.0))
    plain = fake_trial(fake_spec(protocol=short))
    (_, other) = compare([plain, fake_trial(fake_spec("tf32", protocol=long, batch_size=64))])
    assert other.verdict is not None
    assert "batch size" in other.verdict.reason
    assert "protocol" not in other.verdict.reason
