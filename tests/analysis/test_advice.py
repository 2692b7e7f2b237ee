import pytest
from fake_engine import fake_spec, fake_trial
from syrupy.assertion import SnapshotAssertion

from castwise.analysis.advice import Advice, recommend
from castwise.analysis.result_table import compare
from castwise.records.schema import Status, Trial


def advise(*trials: Trial) -> Advice:
    (advice,) = recommend(compare(trials))
    return advice


def at(precision: str, speed: float, status: Status = "ok", **changes: object) -> Trial:
    """Return a trial that is `speed` times as fast as one of 0.1 s a step."""
    return fake_trial(fake_spec(precision, **changes), status=status, step_seconds=(0.1 / speed,))


def in_rounds(*speeds: float) -> list[Trial]:
    """Return a round for each speed-up of bf16-mixed."""
    pairs = [(at("fp32", 1, repeat=n), at("bf16-mixed", speed, repeat=n)) for n, speed in enumerate(speeds)]
    return [trial.model_copy(update={"session_id": f"s{n}"}) for n, pair in enumerate(pairs) for trial in pair]


def noisy(precision: str, speed: float) -> Trial:
    return fake_trial(fake_spec(precision), step_seconds=tuple(each / speed for each in (0.08, 0.09, 0.1, 0.11, 0.12)))


def skipping(count: int) -> Trial:
    return fake_trial(fake_spec("fp16-mixed"), step_seconds=(0.05,), skipped=count)


NEARLY_EQUAL = [
    at("fp32", 1),
    at("tf32", 1.96),
    at("bf16-mixed", 1.97),
    at("fp16-mixed", 2.0),
    at("fp16-master", 2.01),
]
NO_BASELINE = at("fp32", 1, status="oom")
# What was measured, and the precision to take.
CASES: dict[str, tuple[list[Trial], str | None]] = {
    "the fastest": ([at("fp32", 1), at("tf32", 1.5), at("bf16-mixed", 3.25), at("fp16-mixed", 3)], "bf16-mixed"),
    "an interval with 1 in it": (in_rounds(1.1, 1.5), "fp32"),
    "an interval above 1": (in_rounds(1.30, 1.31, 1.30), "bf16-mixed"),
    "slower": ([at("fp32", 1), at("bf16-mixed", 0.8), at("tf32", 0.7)], "fp32"),
    "as fast": ([at("fp32", 1), at("bf16-mixed", 1)], "fp32"),
    "a gain below 3 %": ([at("fp32", 1), at("bf16-mixed", 1.029), at("tf32", 0.7)], "fp32"),
    "a gain above 3 %": ([at("fp32", 1), at("bf16-mixed", 1.031)], "bf16-mixed"),
    "a gain within the noise": ([noisy("fp32", 1), noisy("tf32", 1.1)], "fp32"),
    "only the less simple gains enough": ([at("fp32", 1), at("tf32", 1.02), at("bf16-mixed", 1.04)], "bf16-mixed"),
    "the simplest of nearly equals": (NEARLY_EQUAL, "tf32"),
    "in any order": (NEARLY_EQUAL[::-1], "tf32"),
    "simple but slower": ([at("fp32", 1), at("tf32", 1.9), at("bf16-mixed", 2.0)], "bf16-mixed"),
    "two without float32 weights": (
        [at("fp32", 1), at("bf16-mixed", 2), at("bf16-true", 2.2), at("fp16-true", 3)],
        "bf16-mixed",
    ),
    "one without float32 weights": ([at("fp32", 1), at("bf16-mixed", 2), at("bf16-true", 2.2)], "bf16-mixed"),
    "hardly faster without float32 weights": (
        [at("fp32", 1), at("bf16-mixed", 2), at("bf16-true", 2.04), at("fp16-true", 3, status="diverged")],
        "bf16-mixed",
    ),
    "fp32 and one without float32 weights": ([at("fp32", 1), at("bf16-true", 2)], "fp32"),
    "a skipped step": ([at("fp32", 1), skipping(1)], "fp16-mixed"),
    "skipped steps": ([at("fp32", 1), skipping(3)], "fp16-mixed"),
    "no baseline": ([at("bf16-mixed", 2), at("tf32", 1)], "bf16-mixed"),
    "a baseline out of memory": ([NO_BASELINE, at("bf16-mixed", 2), at("bf16-true", 2.2)], "bf16-mixed"),
    "a crashed baseline": ([at("fp32", 1, status="crashed"), at("bf16-mixed", 2)], "bf16-mixed"),
    "nothing with float32 weights": ([at("bf16-true", 2), at("fp16-true", 1)], "bf16-true"),
    "nothing else with float32 weights": ([NO_BASELINE, at("fp16-true", 1)], "fp16-true"),
    "fp32 alone": ([at("fp32", 1)], "fp32"),
    "several loss scales": (
        [at("fp32", 1), at("fp16-master", 2), at("fp16-master", 3, loss_scale="128")],
        "fp16-master",
    ),
    "nothing ended well": ([NO_BASELINE, at("bf16-mixed", 2, status="crashed")], None),
}


@pytest.mark.parametrize("name", CASES)
def test_which_precision_to_take(name: str) -> None:
    trials, precision = CASES[name]
    advice = advise(*trials)
    assert (advice.workload, advice.precision) == ("resnet50", precision)
    assert bool(advice.code) == (precision not in ("fp32", None))


def test_the_words_of_the_advice(snapshot: SnapshotAssertion) -> None:
    assert "\n".join(f"{name}: {advise(*trials).sentence}" for name, (trials, _) in CASES.items()) == snapshot


@pytest.mark.parametrize("status", ["oom", "timeout", "crashed", "diverged", "unsupported"])
def test_failed_trials_are_not_recommended(status: Status) -> None:
    assert advise(at("fp32", 1), at("bf16-mixed", 9, status=status), at("tf32", 2)).precision == "tf32"
    assert advise(fake_trial(status=status, step_seconds=())).precision is None


def test_advice_is_per_workload_batch_size_and_number_of_gpus() -> None:
    two = {"world_size": 2, "parallelism": "ddp"}
    trials = [
        at("fp32", 1),
        at("fp32", 1, batch_size=8),
        at("fp32", 1, workload="dpn92"),
        at("tf32", 2, batch_size=8),
        at("fp32", 0.9, **two),
        at("bf16-mixed", 3, **two),
    ]
    advice = recommend(compare(trials))
    assert [(item.workload, item.precision) for item in advice] == [
        ("resnet50", "fp32"),
        ("resnet50", "tf32"),
        ("dpn92", "fp32"),
        ("resnet50", "bf16-mixed"),
    ]
    assert recommend([]) == []
