import shlex

import pytest
from fake_engine import fake_environment, fake_facts, fake_spec, fake_trial
from fake_gpu import fake_reading
from syrupy.assertion import SnapshotAssertion

from castwise.analysis.decide import Advice, Decision, _ratios_over, decide
from castwise.analysis.result_table import rows_of_steps
from castwise.records.schema import Environment, Status, Trial
from castwise.spec.user_model import UserModel

SAME = (1.0, 1.0, 1.0)  # the gains of three rounds without noise


def advise(*trials: Trial) -> Advice:
    (advice,) = decide(rows_of_steps(trials))
    return advice


def once(*trials: Trial) -> Advice:
    return advise(*rounds(*trials, gains=(1.0,)))


def at(
    precision: str,
    speed: float,
    status: Status = "ok",
    skipped: int = 0,
    environment: Environment | None = None,
    **changes: object,
) -> Trial:
    """Return a trial that is `speed` times as fast as one of 0.1 s a step."""
    spec = fake_spec(precision, **changes)
    return fake_trial(spec, status=status, step_seconds=(0.1 / speed,) * 4, skipped=skipped, environment=environment)


def on_cpu(precision: str, speed: float) -> Trial:
    return at(precision, speed, environment=fake_environment(None), device="cpu")


def rounds(*firsts: Trial, gains: tuple[float, ...] = SAME) -> list[Trial]:
    """Return the trials in rounds: all but the first gain as much more in each."""
    trials = []
    for repeat, gain in enumerate(gains):
        for index, trial in enumerate(firsts):
            update: dict[str, object] = {"spec": trial.spec.model_copy(update={"repeat": repeat})}
            if index and trial.ranks:
                blocks = [each.model_copy(update={"seconds": each.seconds / gain}) for each in trial.ranks[0].blocks]
                update["ranks"] = (trial.ranks[0].model_copy(update={"blocks": tuple(blocks)}),)
            trials.append(trial.model_copy(update={**update, "session_id": f"s{repeat}"}))
    return trials


FP32 = at("fp32", 1)
DEFAULT = at("default", 1.5)
TOO_LARGE = fake_trial(fake_spec("fp32"), status="oom", step_seconds=())
DEFAULT_TOO_LARGE = fake_trial(fake_spec("default"), status="oom", step_seconds=())
NEARLY_EQUAL = rounds(FP32, at("tf32", 1.96), at("bf16-mixed", 1.97), at("fp16-mixed", 2.0), at("fp16-master", 2.01))

# What was measured, the decision, and the precision to take or to stay with.
CASES: dict[str, tuple[list[Trial], Decision, str | None]] = {
    # Three rounds without noise.
    "the fastest": (rounds(FP32, at("tf32", 1.5), at("bf16-mixed", 3.25), at("fp16-mixed", 3)), "take", "bf16-mixed"),
    "faster than default": (rounds(FP32, DEFAULT, at("tf32", 1.5), at("bf16-mixed", 3)), "take", "bf16-mixed"),
    "faster than fp32 alone": (rounds(FP32, DEFAULT, at("tf32", 1.5), at("bf16-mixed", 1.4)), "stay", "default"),
    "fp32 for want of default": (rounds(FP32, DEFAULT_TOO_LARGE, at("bf16-mixed", 1.4)), "take", "bf16-mixed"),
    "slower": (rounds(FP32, at("bf16-mixed", 0.8), at("tf32", 0.7)), "stay", "fp32"),
    "as fast": (rounds(FP32, at("bf16-mixed", 1)), "stay", "fp32"),
    "a gain below 3 %": (rounds(FP32, at("bf16-mixed", 1.029), at("tf32", 0.7)), "stay", "fp32"),
    "a gain above 3 %": (rounds(FP32, at("bf16-mixed", 1.031)), "take", "bf16-mixed"),
    "only the less simple gains enough": (rounds(FP32, at("tf32", 1.02), at("bf16-mixed", 1.04)), "take", "bf16-mixed"),
    "the simplest of nearly equals": (NEARLY_EQUAL, "take", "tf32"),
    "in any order": (NEARLY_EQUAL[::-1], "take", "tf32"),
    "simple but slower": (rounds(FP32, at("tf32", 1.9), at("bf16-mixed", 2.0)), "take", "bf16-mixed"),
    "on a CPU": (
        rounds(on_cpu("fp32", 1), on_cpu("bf16-mixed", 2)),
        "take",
        "bf16-mixed",
    ),
    # Precisions without float32 weights.
    "one without float32 weights": (rounds(FP32, at("bf16-mixed", 2), at("bf16-true", 2.2)), "take", "bf16-mixed"),
    "two without float32 weights": (
        rounds(FP32, at("bf16-mixed", 2), at("bf16-true", 2.2), at("fp16-true", 3)),
        "take",
        "bf16-mixed",
    ),
    "hardly faster without float32 weights": (
        rounds(FP32, at("bf16-mixed", 2), at("bf16-true", 2.04), at("fp16-true", 3, status="diverged")),
        "take",
        "bf16-mixed",
    ),
    "slower, and one without float32 weights": (
        rounds(FP32, at("bf16-mixed", 0.8), at("bf16-true", 2)),
        "stay",
        "fp32",
    ),
    "fp32 and one without float32 weights": ([FP32, at("bf16-true", 2)], "nothing", None),
    # Intervals, and none.
    "an interval above 1": (rounds(FP32, at("bf16-mixed", 1.3), gains=(1, 1.01, 1)), "take", "bf16-mixed"),
    "an interval below 1.03": (rounds(FP32, at("bf16-mixed", 1), gains=(0.999, 1.001, 1)), "stay", "fp32"),
    "an interval with 1 in it": (rounds(FP32, at("bf16-mixed", 1), gains=(1.1, 1.5)), "undecided", None),
    "one process each": ([FP32, DEFAULT, at("tf32", 0.5), at("bf16-mixed", 2)], "undecided", None),
    "one process each, slower": ([FP32, at("bf16-mixed", 0.5)], "undecided", None),
    # Loss scaling.
    "skipped steps": (rounds(FP32, at("fp16-mixed", 2, skipped=1)), "take", "fp16-mixed"),
    "several loss scales": (
        rounds(FP32, at("fp16-master", 2), at("fp16-master", 3, loss_scale="128")),
        "take",
        "fp16-master",
    ),
    # No reference.
    "no reference": (rounds(at("bf16-mixed", 2), at("tf32", 1)), "take", "bf16-mixed"),
    "no reference, and one alone": ([at("bf16-mixed", 2)], "nothing", None),
    "no reference with float32 weights": (rounds(at("bf16-true", 2), at("fp16-true", 1)), "take", "bf16-true"),
    "only one has room": ([TOO_LARGE, at("bf16-mixed", 2)], "take", "bf16-mixed"),
    "only one with float32 weights has room": (
        [DEFAULT_TOO_LARGE, TOO_LARGE, at("bf16-mixed", 2), at("bf16-true", 2.2)],
        "take",
        "bf16-mixed",
    ),
    "only one without float32 weights has room": ([TOO_LARGE, at("fp16-true", 1)], "take", "fp16-true"),
    "several have room": (rounds(TOO_LARGE, at("bf16-mixed", 1.5), at("fp16-mixed", 2)), "take", "fp16-mixed"),
    "several have room and are as fast": (
        rounds(TOO_LARGE, at("bf16-mixed", 1.99), at("fp16-mixed", 2)),
        "take",
        "bf16-mixed",
    ),
    "several have room, in one process each": (
        [TOO_LARGE, at("bf16-mixed", 1.5), at("fp16-mixed", 2)],
        "undecided",
        None,
    ),
    "several have room, with an interval with 1 in it": (
        rounds(at("bf16-mixed", 1.5), at("fp16-mixed", 1.5), TOO_LARGE, gains=(1.2, 0.9, 1.1)),
        "undecided",
        None,
    ),
    "fp32 crashed": ([at("fp32", 1, status="crashed"), at("bf16-mixed", 2)], "take", "bf16-mixed"),
    "one process at a hundredth of the speed": (
        [*rounds(FP32, at("bf16-mixed", 1.01), gains=(1.001, 0.999, 1.0)), at("fp16-mixed", 0.01)],
        "stay",
        "fp32",
    ),
    "one emulated process at three quarters of the speed": (
        [*rounds(on_cpu("fp32", 1), on_cpu("tf32", 1.01), gains=(1.001, 0.999, 1.0)), on_cpu("bf16-mixed", 0.75)],
        "stay",
        "fp32",
    ),
    "one process at three quarters of the speed": (
        [*rounds(FP32, at("bf16-mixed", 1.01), gains=(1.001, 0.999, 1.0)), at("fp16-mixed", 0.75)],
        "undecided",
        None,
    ),
    # Nothing to compare.
    "fp32 alone": ([FP32], "nothing", None),
    "nothing ended well": ([TOO_LARGE, at("bf16-mixed", 2, status="crashed")], "nothing", None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_decision(name: str) -> None:
    trials, decision, precision = CASES[name]
    advice = advise(*trials)
    assert (advice.workload, advice.decision, advice.precision) == ("resnet50", decision, precision)
    assert bool(advice.code) == (decision == "take")
    assert bool(advice.command) == (decision == "undecided")
    assert bool(advice.key) == (precision is not None)
    assert advice.command in advice.sentence


def test_the_words_of_the_advice(snapshot: SnapshotAssertion) -> None:
    assert "\n".join(f"{name}: {advise(*trials).sentence}" for name, (trials, *_) in CASES.items()) == snapshot


def test_a_loss_scale_of_one_s_own_is_named_and_noted_in_the_code() -> None:
    advice = advise(*rounds(FP32, at("fp16-master", 3, loss_scale="128")))
    assert "take fp16-master with loss scale 128." in advice.sentence
    assert advice.code.startswith("# Measured with the loss scale 128;")


GRAPH = {"techniques": ("compile", "cuda-graph"), "data_set": "mnist"}
TWO_GPUS = {"world_size": 2, "parallelism": "dp", "device": "cuda:1"}
COMMANDS: dict[str, tuple[list[Trial], str]] = {
    "those that may be faster": (
        [*rounds(FP32, at("tf32", 0.5), gains=(1, 1.01, 1)), at("bf16-mixed", 1.9), at("bf16-true", 3)],
        "castwise run resnet50 --precision fp32,bf16-mixed --batch-size 256",
    ),
    "the reference first": (
        [at("bf16-mixed", 2), FP32, DEFAULT],
        "castwise run resnet50 --precision default,bf16-mixed,fp32 --batch-size 256",
    ),
    "without a reference": (
        [TOO_LARGE, at("bf16-mixed", 1), at("tf32", 2)],
        "castwise run resnet50 --precision tf32,bf16-mixed --batch-size 256",
    ),
    "loop and data": (
        [at("fp32", 1, **GRAPH), at("tf32", 1.9, **GRAPH)],
        "castwise run resnet50 --precision fp32,tf32 --batch-size 256 --techniques compile+cuda-graph --data-set mnist",
    ),
    "on a CPU": (
        [on_cpu("fp32", 1), on_cpu("bf16-mixed", 2)],
        "castwise run resnet50 --precision fp32,bf16-mixed --batch-size 256 --device cpu",
    ),
    "GPUs": (
        [at("fp32", 1, **TWO_GPUS), at("tf32", 1.9, **TWO_GPUS)],
        "castwise run resnet50 --precision fp32,tf32 --batch-size 256 --gpus 2 --parallelism dp --device cuda:1",
    ),
    "a loss scale": (
        [FP32, at("fp16-mixed", 1.9), at("fp16-mixed", 1.9, loss_scale="128")],
        "castwise run resnet50 --precision fp32,fp16-mixed --batch-size 256 --loss-scale dynamic,128",
    ),
    "a path with a space": (
        [at(name, 1, workload="my models/train_me.py:build") for name in ("fp32", "tf32")],
        "castwise run 'my models/train_me.py:build' --precision fp32,tf32 --batch-size 256",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_that_decides(name: str) -> None:
    trials, command = COMMANDS[name]
    advice = advise(*trials)
    assert advice.command == f"{command} --within 1%"
    assert shlex.split(advice.command)[2] == trials[0].spec.workload


def test_a_script_s_command_keeps_what_was_asked_for() -> None:
    script = UserModel(kind="script", path="train.py", name="", units_per_step=2240, unit="tokens")
    named = {"workload": "python train.py --lr 1", "user_model": script}
    counted = {"protocol": fake_spec("fp32").protocol.model_copy(update={"num_steps": 50})}
    advice = advise(*(at(name, 1, **named, **counted) for name in ("as-written", "tf32")))
    options = "--precision as-written,tf32 --steps 50 --units-per-step 2240 --unit tokens --within 1%"
    assert advice.command == f"castwise run {options} -- python train.py --lr 1"


def test_a_call_decides_on_objects() -> None:
    advice = advise(*(at(name, 1, workload="own:Net", device="cpu") for name in ("fp32", "tf32")))
    call = 'castwise.compare(..., precision="fp32,tf32", batch_size=256, device="cpu", within="1%")'
    assert (advice.decision, advice.command) == ("undecided", call)


@pytest.mark.parametrize("status", ["oom", "timeout", "crashed", "diverged", "unsupported"])
def test_failed_trials_are_not_recommended(status: Status) -> None:
    assert advise(*rounds(FP32, at("bf16-mixed", 9, status=status), at("tf32", 2))).precision == "tf32"
    assert advise(fake_trial(status=status, step_seconds=())).decision == "nothing"
    only = advise(at("fp32", 1, status=status), at("bf16-mixed", 2))
    assert (only.decision, only.precision) == ("take", "bf16-mixed")


COMPILED = {"techniques": ("channels-last", "compile")}
# What was measured next to fp32, what to take, its techniques, and why this one.
LOOPS: dict[str, tuple[list[Trial], str | None, tuple[str, ...], str]] = {
    "the fastest loop": (
        [at("bf16-mixed", 3), at("bf16-mixed", 6, **COMPILED)],
        "bf16-mixed",
        COMPILED["techniques"],
        "the fastest",
    ),
    "fewer techniques within 3 %": (
        [at("bf16-mixed", 3), at("bf16-mixed", 3.05, **COMPILED)],
        "bf16-mixed",
        (),
        "bf16-mixed with channels-last+compile +1.7 %: within 3 %, so the simpler one",
    ),
    "the same precision in a faster loop": ([at("fp32", 2, **COMPILED)], "fp32", COMPILED["techniques"], "the fastest"),
    "without float32 weights": (
        [at("bf16-mixed", 2), at("bf16-true", 2.5)],
        "bf16-mixed",
        (),
        "bf16-true +25 %, but keeps no fp32 weights",
    ),
    "one that diverged": (
        [at("bf16-mixed", 2), at("fp16-true", 3, status="diverged")],
        "bf16-mixed",
        (),
        "fp16-true diverged",
    ),
    "the next": ([at("bf16-mixed", 0.5)], "fp32", (), "bf16-mixed, the next, trains 0.50× as fast"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_answer_is_over_all_loops_and_says_why(name: str) -> None:
    others, precision, techniques, why = LOOPS[name]
    advice = advise(*rounds(FP32, *others))
    assert (advice.precision, advice.techniques, advice.why) == (precision, techniques, why)
    assert advice.how_sure == "3 runs each"


def test_an_answer_is_compared_with_the_plain_loop_in_both_references() -> None:
    advice = advise(*rounds(FP32, DEFAULT, at("bf16-mixed", 6, **COMPILED), at("fp32", 3, **COMPILED)))
    assert advice.over_default is not None
    assert advice.over_fp32 is not None
    assert (advice.over_default.value, advice.over_fp32.value) == pytest.approx((4.0, 6.0))
    assert advice.memory_ratio == 1.0


def test_a_disturbed_machine_weakens_the_words() -> None:
    noisy = at("bf16-mixed", 2).model_copy(update={"readings": (fake_reading(cpu_pressure=0.9),) * 6})
    advice = advise(*rounds(FP32, noisy))
    assert (advice.decision, advice.how_sure) == ("take", "3 runs each, busy CPU")
    assert "bf16-mixed looks faster (busy CPU)" in advice.sentence


@pytest.mark.parametrize(("num_blocks", "decision"), [(1, "undecided"), (6, "take")])
def test_one_block_of_a_busy_machine_shows_nothing(num_blocks: int, decision: str) -> None:
    busy = {"readings": (fake_reading(cpu_pressure=0.9),) * num_blocks}
    both = [at(name, speed, device="cpu").model_copy(update=busy) for name, speed in (("fp32", 1), ("tf32", 15))]
    ranks = [(trial.ranks[0].model_copy(update={"blocks": trial.ranks[0].blocks[:num_blocks]}),) for trial in both]
    assert once(*(t.model_copy(update={"ranks": r}) for t, r in zip(both, ranks, strict=True))).decision == decision


def test_one_process_shows_nothing_beside_a_baseline_that_was_once_as_fast() -> None:
    twice = rounds(FP32, at("bf16-mixed", 2.1), gains=(1.0,))
    assert advise(*twice).decision == "take"
    apart = at("fp32", 2.0).model_copy(update={"session_id": "s1"})
    apart = apart.model_copy(update={"spec": apart.spec.model_copy(update={"repeat": 1})})
    assert advise(*twice, apart).decision == "undecided"
    turing = fake_environment((7, 5))
    both = [at(name, speed, environment=turing) for name, speed in (("fp32", 1), ("bf16-mixed", 6))]
    assert once(*both).decision == "undecided", "it is emulated there"


def test_what_alone_was_measured_without_float32_weights_is_said_with_its_speed() -> None:
    sentence = once(FP32, at("bf16-true", 0.8)).sentence
    assert "nothing else keeps as many bits as fp32. bf16-true (0.80×) keeps no float32 weights" in sentence
    eight = at("fp32", 1.2, techniques=("adam-state-8-bit",))
    kept = "faster{} but keeps the optimizer's state in fewer bits: check the accuracy first."
    assert f"(1.20×) was {kept.format('')}" in advise(*rounds(FP32, eight)).sentence
    assert f"(1.20×) looks {kept.format(' (one run)')}" in once(FP32, eight).sentence
    busy = eight.model_copy(update={"readings": (fake_reading(cpu_pressure=0.9),) * 6})
    assert f"looks {kept.format(' (one run, busy CPU)')}" in once(FP32, busy).sentence
    assert once(eight).sentence.endswith(
        "only fp32 with adam-state-8-bit was measured: there is nothing to compare it with."
    )


def test_sums_in_float16_are_not_taken_without_a_verdict() -> None:
    fast = at("fp16-mixed", 1.5, techniques=("fp16-accumulation",))
    advice = once(FP32, at("fp16-mixed", 1.2), fast)
    assert (advice.precision, advice.techniques) in {("fp16-mixed", ()), (None, ())}
    sentence = once(FP32, fast).sentence
    assert (
        "(1.50×) looks faster (one run) but keeps sums of products in fewer bits: check the accuracy first." in sentence
    )


def test_an_answer_prints_as_its_sentence() -> None:
    advice = advise(FP32, at("bf16-mixed", 2))
    assert (str(advice), repr(advice)) == (advice.sentence, f"Advice({advice.sentence!r})")


def test_nothing_to_recommend_has_the_reason() -> None:
    failed = fake_trial(status="crashed", step_seconds=()).model_copy(update={"message": "TypeError: no"})
    assert (advise(failed).decision, advise(failed).why) == ("nothing", "TypeError: no")
    assert "--budget" in advise(FP32).why
    assert advise(FP32, at("bf16-mixed", 2, status="crashed")).why == "bf16-mixed: crashed"


def test_what_is_clear_after_one_process_is_said() -> None:
    half, emulated = once(FP32, at("bf16-mixed", 0.46)), advise(on_cpu("fp32", 1), on_cpu("bf16-mixed", 0.75))
    twice = once(FP32, at("bf16-mixed", 2.1))
    assert (half.decision, emulated.decision, twice.decision) == ("stay", "stay", "take")
    assert (
        "trains 2.10× as fast as fp32, in the same peak allocated memory. At twice the speed or more, one run is eno"
        in twice.sentence
    )
    assert "at 0.46× its speed. At half the speed or less, one run is enough." in half.sentence
    assert "at 0.75× its speed. It is emulated here, and one run shows that it is slower." in emulated.sentence
    assert emulated.limit.count("bf16-mixed") == 1
    for speed in (0.46, 2.1):
        assert "one run" not in advise(*rounds(FP32, at("bf16-mixed", speed))).sentence
        disturbed = at("bf16-mixed", speed).model_copy(update={"readings": (fake_reading(cpu_pressure=0.9),) * 6})
        assert once(FP32, disturbed).decision == "undecided", "equal loops on a busy CPU differ by as much"
        alone = [FP32, at("bf16-mixed", speed)]
        assert advise(*alone).decision == once(*alone).decision, "as in old records, which have no sessions"
        assert advise(on_cpu("fp32", 1), on_cpu("bf16-mixed", 2.1)).decision == "undecided", "not side by side on a CPU"
    slow_block = fake_trial(fake_spec("fp32"), step_seconds=(0.09, 0.1, 0.1, 0.1))
    assert advise(slow_block, at("bf16-mixed", 2.1)).decision == "undecided", "a block of fp32 took 1.9 times as long"
    much = at("bf16-mixed", 9).model_copy(update={"readings": disturbed.readings})
    assert (once(FP32, much).decision, advise(FP32, much).decision) == ("take", "undecided")


def test_blocks_that_differ_too_much_show_nothing() -> None:
    def spread(*seconds: float) -> Trial:
        return fake_trial(fake_spec("bf16-mixed"), step_seconds=seconds)

    assert once(FP32, spread(0.045, 0.046, 0.045, 0.046)).decision == "take"
    assert once(FP32, spread(0.049, 0.05, 0.049, 0.051)).decision == "undecided", "its interval contains 2"
    assert once(FP32, spread(0.029, 0.033, 0.031, 0.034)).decision == "take", "they vary, and are all beyond 2"
    on_a_cpu = fake_trial(
        fake_spec("bf16-mixed", device="cpu"),
        step_seconds=(0.029, 0.033, 0.031, 0.034),
        environment=fake_environment(None, cpu_features=("amx_bf16",)),
    )
    assert once(on_cpu("fp32", 1), on_a_cpu).decision == "undecided", "equal loops on a busy CPU differ by as much"


def test_every_process_has_to_show_that_a_loop_is_faster() -> None:
    assert advise(*rounds(FP32, at("bf16-mixed", 2.1), gains=(1.0, 3.0))).decision == "take"
    assert advise(*rounds(FP32, at("bf16-mixed", 1.1), gains=(1.0, 3.0))).decision == "undecided"


@pytest.mark.parametrize(
    ("baseline", "candidate", "gains", "decision"),
    [
        (on_cpu("fp32", 1), on_cpu("bf16-mixed", 0.6), (1.0, 1.5), "stay"),  # emulated
        (on_cpu("fp32", 1), on_cpu("bf16-mixed", 0.6), (1.0, 2.0), "undecided"),
        (FP32, at("bf16-mixed", 0.4), (1.0, 2.0), "stay"),
        (FP32, at("bf16-mixed", 0.6), (1.0, 1.5), "undecided"),  # no process is enough by itself
    ],
)
def test_a_process_that_agrees_takes_no_decision_back(
    baseline: Trial, candidate: Trial, gains: tuple[float, ...], decision: Decision
) -> None:
    assert advise(*rounds(baseline, candidate, gains=gains)).decision == decision


def test_a_busy_cpu_comes_before_more_rounds() -> None:
    busy = {"readings": (fake_reading(cpu_pressure=0.97),) * 6}
    for trials in (
        [FP32, at("bf16-mixed", 2).model_copy(update=busy)],
        [at("tf32", 1), at("bf16-mixed", 2).model_copy(update=busy)],
    ):
        advice = advise(*trials)
        before, after = advice.sentence.split("(tasks waited for a CPU 97 % of the time)")
        assert "bf16-mixed was" in before
        assert after.endswith(f"run: {advice.command}")
    assert "the CPU" not in advise(FP32, at("bf16-mixed", 2)).sentence


@pytest.mark.parametrize("update", [{}, {"readings": (fake_reading(cpu_pressure=0.97),) * 6}])
def test_after_the_most_rounds_no_command_decides(update: dict[str, object]) -> None:
    bf16 = at("bf16-mixed", 1).model_copy(update=update)
    gains = (1, 1.5, 0.8) * 4
    for pair in ((FP32, bf16), (at("tf32", 1), bf16)):
        advice = advise(*rounds(*pair, gains=gains))
        assert (advice.decision, advice.command) == ("undecided", "")
        assert advice.sentence.endswith(" This machine is too noisy to tell them apart after 12 rounds.")
        assert advise(*rounds(*pair, gains=gains[:11])).command.endswith("--within 1%")


def test_an_interval_that_is_too_wide_is_not_shown_as_numbers() -> None:
    advice = advise(*rounds(FP32, at("bf16-mixed", 1), gains=(1.1, 1.5, 9)))
    assert "bf16-mixed was about 2.46× as fast as" in advice.sentence
    assert "[" not in advice.sentence


def test_advice_is_per_workload_batch_size_and_number_of_gpus() -> None:
    two = {"world_size": 2, "parallelism": "ddp"}
    trials = rounds(FP32)
    trials += rounds(at("fp32", 1, batch_size=8), at("tf32", 2, batch_size=8))
    trials += rounds(at("fp32", 1, workload="dpn92"))
    trials += rounds(at("fp32", 0.9, **two), at("bf16-mixed", 3, **two))
    advice = decide(rows_of_steps(trials))
    assert [(item.workload, item.precision) for item in advice] == [
        ("resnet50", None),
        ("resnet50", "tf32"),
        ("dpn92", None),
        ("resnet50", "bf16-mixed"),
    ]
    assert decide([]) == []


FP8_LOOP = {"techniques": ("compile",), "workload": "gpt2"}


def fp8(speed: float, sqnr: float | None, underflow: float | None = None, **changes: object) -> Trial:
    """Return a trial of FP8 in a compiled loop."""
    trial = at("fp8-tensorwise", speed, **{**FP8_LOOP, **changes})
    float8 = {"recipe": "tensorwise", "num_converted": 8, "left": {}, "min_sqnr_db": sqnr, "min_sqnr_product": "a, b"}
    float8 |= {"max_underflow_share": underflow, "max_underflow_factor": "head, output gradient"}
    return trial.model_copy(update={"facts": fake_facts(float8=float8)})


PLAIN_DEFAULT, MIXED = at("default", 1, workload="gpt2"), at("bf16-mixed", 3, **FP8_LOOP)


@pytest.mark.parametrize(
    ("trials", "taken", "why_not"),
    [
        (rounds(PLAIN_DEFAULT, MIXED, fp8(4, 20.0)), "fp8-tensorwise", ""),
        (rounds(PLAIN_DEFAULT, MIXED, fp8(4, 19.9)), "bf16-mixed", "(an SQNR of 19.9 dB in a, b, under 20 dB)"),
        (rounds(PLAIN_DEFAULT, MIXED, fp8(4, 28.0, 0.1)), "fp8-tensorwise", ""),
        (
            rounds(PLAIN_DEFAULT, MIXED, fp8(4, 28.0, 0.37)),
            "bf16-mixed",
            "(casts make 37 % of the values 0 in head, output gradient)",
        ),
        (rounds(PLAIN_DEFAULT, MIXED, fp8(4, None)), "bf16-mixed", "(its products were not compared with bfloat16's)"),
        (rounds(PLAIN_DEFAULT, MIXED, fp8(3.05, 25.0)), "bf16-mixed", "(not proven faster than bf16-mixed in the same"),
        (
            rounds(PLAIN_DEFAULT, at("bf16-mixed", 3, workload="gpt2"), fp8(4, 25.0)),
            "bf16-mixed",
            "(bf16-mixed was not measured in the same loop)",
        ),
        # Without PyTorch's default, as in `--precision bf16-mixed,fp8-tensorwise --techniques compile`.
        (rounds(MIXED, fp8(4, 25.0)), "fp8-tensorwise", ""),
        (rounds(MIXED, fp8(4, 15.0)), "bf16-mixed", "(an SQNR of 15.0 dB in a, b, under 20 dB)"),
        ([MIXED, fp8(4, 25.0)], None, ""),
    ],
)
def test_fp8_is_taken_if_its_products_are_good_and_it_is_proven_faster(
    trials: list[Trial], taken: str | None, why_not: str
) -> None:
    advice = advise(*trials)
    assert advice.precision == taken
    assert why_not in advice.sentence
    assert ("Not taken: fp8-tensorwise" in advice.sentence) == bool(why_not)
    assert "fp8" not in advice.why or not why_not


def test_the_command_that_decides_about_fp8_measures_bf16_mixed_too() -> None:
    rowwise = fp8(3.9, 25.0).model_copy(
        update={"spec": fp8(3.9, 25.0).spec.model_copy(update={"precision": "fp8-rowwise"})}
    )
    advice = advise(*rounds(MIXED, fp8(4, 25.0)), rowwise)
    assert advice.decision == "undecided"
    assert "--precision bf16-mixed,fp8-tensorwise,fp8-rowwise" in advice.command


def test_a_script_with_autocast_that_is_faster_without_is_told_its_line() -> None:
    facts = fake_facts(own_precision={"autocast bfloat16": ("train.py:25",)}, framework="")
    script = UserModel(kind="script", path="train.py", name="", digest="d")
    measured = [
        trial.model_copy(update={"facts": facts, "spec": trial.spec.model_copy(update={"user_model": script})})
        for trial in rounds(on_cpu("as-written", 1), on_cpu("fp32", 4))
    ]
    advice = advise(*measured)
    assert (advice.decision, advice.precision) == ("take", "fp32")
    assert (advice.code, advice.snippets) == ("# remove the autocast at train.py:25", ())


def test_a_script_in_16_bits_alone_is_not_what_one_stays_with() -> None:
    facts = fake_facts(param_dtypes={"bfloat16": 1}, own_precision={"weights bfloat16": ("train.py:7",)})
    script = UserModel(kind="script", path="train.py", name="", digest="d")
    measured = [
        trial.model_copy(update={"facts": facts, "spec": trial.spec.model_copy(update={"user_model": script})})
        for trial in rounds(at("as-written", 1), at("bf16-mixed", 0.8))
    ]
    sentence = advise(*measured).sentence
    assert "no precision with float32 weights is as fast as your script as written. bf16-mixed comes close" in sentence


def test_a_script_is_compared_with_itself_as_written_and_told_how_to_wait_less() -> None:
    script = UserModel(kind="script", path="train.py", name="", digest="d")
    measured = rounds(*(at(name, speed) for name, speed in (("as-written", 1), ("fp32", 0.9), ("bf16-mixed", 2))))
    for index, trial in enumerate(measured):
        spec = trial.spec.model_copy(update={"workload": "python train.py", "user_model": script})
        blocks = [each.model_copy(update={"data_seconds": 0.4 * each.seconds}) for each in trial.ranks[0].blocks]
        ranks = (trial.ranks[0].model_copy(update={"blocks": tuple(blocks)}),)
        measured[index] = trial.model_copy(update={"spec": spec, "ranks": ranks})
    advice = advise(*measured)
    assert (advice.decision, advice.precision) == ("take", "bf16-mixed")
    assert "2.00× as fast as your script as written (2.22× as fast as fp32)" in advice.sentence
    assert "with applied.autocast" in advice.code
    assert "the step waits 40 % of the time for its next batch" in advice.limit
    assert "(--techniques loader-workers); DataLoader(..., num_workers=min(8, os.cpu_count())" in advice.limit


NOISE = (0.98, 1.01, 1.02)
OTHERS = ("tf32", "fp16-mixed", "bf16-master", "fp16-master")


def test_of_several_that_gain_nothing_the_luckiest_is_not_taken() -> None:
    """Its interval lies above 1, as that of some among several does by chance."""
    lucky = rounds(FP32, at("bf16-mixed", 1.16), gains=(0.96, 1.0, 1.04))
    assert advise(*lucky).decision == "take"
    rest = [
        trial
        for trial in rounds(FP32, *(at(name, 1) for name in OTHERS), gains=(0.999, 1.001, 1.0))
        if trial.spec.precision != "fp32"
    ]
    advice = advise(*lucky, *rest)
    assert (advice.decision, [row.precision for row in advice.rivals]) == ("undecided", ["bf16-mixed"])
    plain = next(row for row in advice.rows if row.precision == "bf16-mixed").speedup_estimate
    assert plain is not None
    assert advice.over_next is not None
    assert advice.over_next.low < 1 < plain.low
    assert (advice.over_next.value, advice.over_next.high) == (plain.value, plain.high)


def test_proven_gains_leave_the_others_the_level_of_fewer() -> None:
    """Holm's procedure: of five, the four that are proven do not widen the interval of the fifth."""
    fifth = rounds(FP32, at("bf16-mixed", 1.16), gains=(0.96, 1.0, 1.04))
    clear = [
        trial
        for trial in rounds(FP32, *(at(name, 1.9) for name in OTHERS), gains=NOISE)
        if trial.spec.precision != "fp32"
    ]
    alone, among = (rows_of_steps(trials) for trials in (fifth, fifth + clear))
    low = {row.precision: ratio.low for row, ratio in _ratios_over(among[0], among[1:])}
    assert low["bf16-mixed"] == among[1].over(among[0]).low == alone[1].over(alone[0]).low


def test_the_luck_of_the_fastest_of_several_is_said() -> None:
    """Each of three was the fastest in one of three rounds, by as much."""
    trials = rounds(FP32)
    for index, name in enumerate(("bf16-mixed", "fp16-mixed", "tf32")):
        for repeat in range(3):
            speed = 2.0 if repeat == index else 1.7
            trial = at(name, speed, repeat=repeat)
            trials.append(trial.model_copy(update={"session_id": f"s{repeat}"}))
    advice = advise(*trials)
    assert advice.decision == "take"
    assert advice.how_sure.endswith(", expect 1.70× (the fastest of several is so by luck, too)"), advice.how_sure
    assert "expect" not in advise(*rounds(FP32, at("bf16-mixed", 1.8), gains=NOISE)).how_sure


def test_a_process_in_another_mode_is_said_with_what_shows_it() -> None:
    def process(repeat: int, seconds: float, clock: float, peak: int = 2**30) -> Trial:
        reading = fake_reading(sm_clock_hertz=clock)
        spec = fake_spec("bf16-mixed", repeat=repeat)
        trial = fake_trial(spec, step_seconds=(seconds,) * 4, readings=(reading,) * 4, peak_bytes=peak)
        return trial.model_copy(update={"session_id": f"s{repeat}"})

    slow = [process(0, 0.02, 1.9e9), process(1, 0.0228, 1.71e9), process(2, 0.0201, 1.9e9)]
    advice = advise(*rounds(FP32), *slow)
    words = "1 of 3 processes of bf16-mixed took 1.14× as long as the others (at 0.90× the clock)"
    assert words in advice.how_sure, advice.how_sure
    larger = [*slow[:1], process(1, 0.017, 1.9e9, 2**31), slow[2]]
    assert "took 0.85× as long as the others (at 2.00× the memory)" in advise(*rounds(FP32), *larger).how_sure
    assert advise(*rounds(FP32), *slow[:1], slow[2]).how_sure == "2 runs each"
