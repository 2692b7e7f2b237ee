"""What a search decides from measurements alone: no engine, no clock."""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from fake_engine import fake_environment, fake_facts, fake_spec, fake_trial
from fake_gpu import fake_reading
from hypothesis import given, settings
from hypothesis import strategies as st

from castwise.records.schema import Status, StepProfile, TelemetrySummary, Trial
from castwise.registry.techniques import find_technique
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import SearchSpace, TriedChange, change_between
from castwise.tune.decide import Done, Session, TuningSteps, advance
from castwise.tune.measurements import Key, Measurements, Outcome, key_of
from castwise.tune.render import answers, patch_summary
from castwise.tune.result import TuningResult
from castwise.tune.time_budget import TimeLeft

GIB = 2**30
START = fake_spec()
H200 = "NVIDIA H200"


@dataclass
class World:
    """Measures made-up sessions."""

    speed: Callable[[TrialSpec], float]
    held_bytes: Callable[[TrialSpec], float] = lambda _: GIB
    status: Callable[[TrialSpec], Status] = lambda _: "ok"
    seconds: float = 1.0  # for each configuration of a session
    readings: tuple[TelemetrySummary, ...] = ()
    sessions: list[Session] = field(default_factory=list)

    def measure(self, session: Session, measured: Measurements) -> list[Trial]:
        self.sessions.append(session)
        name = secrets.token_hex(6)
        return [self._trial(spec, len(measured.of(spec)), name) for spec in session.specs]

    def _trial(self, spec: TrialSpec, repeat: int, session_id: str) -> Trial:
        spec = spec.model_copy(update={"repeat": repeat})
        status = self.status(spec)
        seconds = (0.04 + spec.batch_size / 256) / self.speed(spec)  # a part of a step does not depend on the batch
        blocks = tuple(seconds * (1 + index % 3 / 1000) for index in range(6)) if status == "ok" else ()
        trial = fake_trial(
            spec, status=status, step_seconds=blocks, peak_bytes=int(self.held_bytes(spec)), readings=self.readings
        )
        return trial.model_copy(update={"session_id": session_id})

    def search(self, space: SearchSpace, budget: float = 1e6, measured: Measurements | None = None) -> Done:
        measured = measured or Measurements()
        steps = TuningSteps(space, measured, TimeLeft(budget, 0.0)).run()
        decision = advance(steps)
        for _ in range(200):
            if isinstance(decision, Done):
                self.measured = measured
                return decision
            measured = measured.plus(self.measure(decision, measured), decision.specs)
            spent = sum(self.seconds * len(session.specs) for session in self.sessions)
            decision = advance(steps, (measured, TimeLeft(budget - spent, self.seconds)))
        raise AssertionError("the search does not end")


def space_of(*techniques: str, precisions: Sequence[str] = ("fp32",), memory_bytes: float = math.inf) -> SearchSpace:
    return SearchSpace(START, tuple(precisions), techniques, fake_environment(), memory_bytes=memory_bytes)


def gains(**factors: float) -> Callable[[TrialSpec], float]:
    """Return a speed that is a product of a factor for the precision and one for each technique."""

    def speed(spec: TrialSpec) -> float:
        product = 1.0
        for name in (spec.precision, *spec.techniques):
            product *= factors.get(name.replace("-", "_"), 1.0)
        return product

    return speed


def winner_of(done: Done) -> TrialSpec:
    return next((each.spec for each in reversed(done.tried) if each.outcome == "accepted" and not each.limited), START)


FACTORS = st.sampled_from([0.5, 0.9, 1.0, 1.03, 1.2, 2.0])
TECHNIQUES = ("channels-last", "cudnn-search", "fused-optimizer", "compile", "cuda-graph")


@given(
    st.tuples(*[FACTORS] * len(TECHNIQUES)),
    st.sampled_from([1.0, 1.5, 3.0]),
    st.one_of(st.none(), st.floats(0, 90)),
)
@settings(max_examples=40)
def test_search_ends_at_the_fastest_within_the_budget(
    factors: tuple[float, ...], bf16: float, budget: float | None
) -> None:
    speed = gains(
        bf16_mixed=bf16, **{name.replace("-", "_"): gain for name, gain in zip(TECHNIQUES, factors, strict=True)}
    )
    world = World(speed)
    space = space_of(*TECHNIQUES, precisions=("fp32", "bf16-mixed"))
    done = world.search(space, 1e6 if budget is None else budget)
    accepted = [each for each in done.tried if each.outcome == "accepted"]
    assert all(world.measured.is_accepted(each.below, each.spec, math.inf) for each in accepted)
    candidates = [key_of(spec) for session in world.sessions for spec in session.specs[1:]]
    assert len(world.measured.by_key) <= len(candidates) + 1
    if budget is None:
        best = max(1.0, bf16)
        for gain in factors:
            best *= max(1.0, gain)
        assert speed(winner_of(done)) == pytest.approx(best)
        assert done.ending == "nothing left"
    else:
        spent = sum(len(session.specs) for session in world.sessions[1:])
        assert spent <= max(budget, 0.0), "no session begins that would end too late, but for the first"


@given(st.tuples(*[FACTORS] * len(TECHNIQUES)))
@settings(max_examples=20)
def test_nothing_is_screened_twice(factors: tuple[float, ...]) -> None:
    world = World(gains(**{name.replace("-", "_"): gain for name, gain in zip(TECHNIQUES, factors, strict=True)}))
    space = space_of(*TECHNIQUES)
    done = world.search(space)
    again = World(world.speed)
    assert repr(again.search(space, measured=world.measured)) == repr(done), "NaN ends of intervals equal nothing"
    assert again.sessions == [], "what was measured decides the same again"
    seen: set[Key] = set()
    for session in world.sessions:
        if session.purpose.startswith("changes to "):
            new = {key_of(spec) for spec in session.specs[1:]}
            assert len(new & seen) <= 1, "the last accepted configuration alone, next to what compiles"
        seen |= {key_of(spec) for spec in session.specs}


@pytest.mark.parametrize(("gain", "num_sessions"), [(1.03, 2), (1.5, 1)])
def test_small_gains_are_proven_by_further_processes(gain: float, num_sessions: int) -> None:
    world = World(gains(fused_optimizer=gain))
    (accepted,) = [each for each in world.search(space_of("fused-optimizer")).tried if each.outcome == "accepted"]
    assert world.measured.times_together([START, accepted.spec]) == num_sessions
    assert accepted.ratio is not None
    assert (accepted.ratio.n, bool(accepted.reason)) == (num_sessions, num_sessions == 1)


@pytest.mark.parametrize(("later", "outcome"), [(1.5, "accepted"), (1.0, "unproven")])
def test_one_session_proves_nothing_on_a_busy_machine(later: float, outcome: Outcome) -> None:
    """The first session shows a gain of half; the later ones show it again, or none."""

    def speed(spec: TrialSpec) -> float:
        return 1.0 if not spec.techniques else 1.5 if spec.repeat == 0 else later

    world = World(speed, readings=(fake_reading(cpu_pressure=0.97),) * 6)
    (found,) = world.search(space_of("fused-optimizer")).tried
    assert found.outcome == outcome
    assert found.ratio is not None
    assert found.ratio.n > 1


@pytest.mark.parametrize(("budget", "outcome"), [(1e6, "accepted"), (11.0, "unproven")])
def test_time_that_is_left_goes_into_proving_a_gain(budget: float, outcome: Outcome) -> None:
    """Three sessions, which differ, do not show whether it is one; eight do."""

    def speed(spec: TrialSpec) -> float:
        return (1.5, 1.05, 1.15, 1.1, 1.1, 1.1, 1.1, 1.1)[spec.repeat] if spec.techniques else 1.0

    world = World(speed, readings=(fake_reading(cpu_pressure=0.97),) * 6)
    (found,) = world.search(space_of("fused-optimizer"), budget).tried
    assert found.outcome == outcome


def test_a_speed_up_that_the_speeds_of_all_sessions_deny_is_not_claimed() -> None:
    """In its one session a technique was three times as fast as a plain loop that other sessions found as fast."""

    def timed(spec: TrialSpec, repeat: int, session: str, seconds: float) -> Trial:
        spec = spec.model_copy(update={"repeat": repeat})
        return fake_trial(spec, step_seconds=(seconds,) * 6).model_copy(update={"session_id": session})

    fused = fake_spec(techniques=("fused-optimizer",))
    first, *others = (timed(START, repeat, f"s{repeat}", 0.3 if repeat == 0 else 0.1) for repeat in range(4))
    beside = timed(fused, 0, "s0", 0.1)
    quiet = Measurements().plus([first, beside])
    assert quiet.is_accepted(START, fused, math.inf)
    drifted = quiet.plus(others)
    assert not drifted.is_accepted(START, fused, math.inf)
    assert not drifted.is_answered(START, fused)
    tried = TriedChange(0, change_between(START, fused), START, fused, drifted.ratio(START, fused), "accepted")
    result = TuningResult(START, (tried,), (first, *others, beside), "nothing left", 1.0)
    row = result.rows[-1]
    assert (row["speedup"], row["total_speedup"]) == (None, None)
    assert not [line for line in [*answers(result), patch_summary(result, fused)] if "×" in line]


@pytest.mark.parametrize(("speed", "is_tried"), [(1.0, False), (200.0, True)])
def test_what_can_save_next_to_nothing_of_a_step_is_not_tried(speed: float, is_tried: bool) -> None:
    world = World(gains(fp32=speed, cuda_graph=1.5))  # a step takes a quarter of a second, divided by it
    done = world.search(space_of("cuda-graph", "cuda-graph-8"))
    assert ("cuda-graph-8" in {name for each in done.tried for name in each.change.techniques}) is is_tried


@pytest.mark.parametrize(("gpu", "step_seconds", "is_worth"), [(H200, 0.02, False), (H200, 0.01, True), ("?", 1, True)])
def test_a_gain_is_bounded_by_the_traffic_of_memory(gpu: str, step_seconds: float, is_worth: bool) -> None:
    facts, environment = fake_facts(num_parameters=25_000_000), fake_environment(gpu=gpu)
    trial = fake_trial(START, step_seconds=(step_seconds,), facts=facts, environment=environment)
    measured = Measurements().plus([trial])
    assert measured.can_gain(find_technique("compiled-update"), START) is is_worth
    assert measured.can_gain(find_technique("fused-optimizer"), START)


def test_fp32_is_measured_next_to_the_default() -> None:
    start = fake_spec("default")
    space = SearchSpace(start, ("default", "tf32"), (), fake_environment(), fp32=START)
    session = advance(TuningSteps(space, Measurements(), TimeLeft(1e6)).run())
    assert isinstance(session, Session)
    assert [spec.precision for spec in session.specs] == ["default", "fp32"]


def test_emulated_precisions_come_last() -> None:
    """The fake CPU has no instructions for 16-bit numbers; bfloat16 changes the loop less."""
    world = World(gains(fused_optimizer=1.2, compile=1.2))
    start = START.model_copy(update={"device": "cpu"})
    techniques = ("channels-last", "fused-optimizer", "compile")
    space = SearchSpace(start, ("fp32", "fp16-mixed", "bf16-mixed"), techniques, fake_environment(None))
    assert world.search(space).ending == "nothing left"
    sessions = [session for session in world.sessions if session.purpose.startswith("changes to ")]
    precisions = [session.specs[-1].precision for session in sessions]
    assert precisions == sorted(precisions, key=["fp32", "bf16-mixed", "fp16-mixed"].index)
    assert "compile" in sessions[precisions.index("bf16-mixed")].specs[0].techniques


def test_what_no_time_was_left_for_is_a_result() -> None:
    world = World(gains(fused_optimizer=1.2))
    done = world.search(space_of("fused-optimizer", "compile", "cuda-graph", precisions=("fp32", "tf32")), budget=16)
    assert done.ending == "budget"
    not_tried = {each.change.name for each in done.tried if each.outcome == "not tried"}
    assert not_tried == {"compile", "compile + cuda-graph"}


def test_what_is_not_proven_is_not_accepted() -> None:
    """TF32 is faster in its first process alone; what was tried on it is compared with the plain loop."""

    def speed(spec: TrialSpec) -> float:
        noise = (1.04, 0.9, 1.06, 0.97)[spec.repeat % 4] if spec.precision == "tf32" else 1.0
        return noise * (0.99 if "cudnn-search" in spec.techniques else 1.0)

    world = World(speed)
    done = world.search(space_of("cudnn-search", precisions=("fp32", "tf32")))
    assert winner_of(done) == START
    outcomes = {each.change.name: each for each in done.tried}
    assert outcomes["tf32"].outcome == "unproven"
    tried_on_it = outcomes["tf32 + cudnn-search"]
    assert (tried_on_it.stage, tried_on_it.below, tried_on_it.outcome) == (0, START, "slower")
    assert world.measured.times_together([START, outcomes["tf32"].spec]) <= 4


@pytest.mark.parametrize("status", ["oom", "crashed", "timeout", "unsupported", "diverged"])
def test_a_failure_is_a_result_and_the_search_goes_on(status: Status) -> None:
    world = World(
        gains(fused_optimizer=1.2, compile=3.0), status=lambda spec: status if "compile" in spec.techniques else "ok"
    )
    done = world.search(space_of("fused-optimizer", "compile"))
    assert (done.ending, winner_of(done).techniques) == ("nothing left", ("fused-optimizer",))
    (failed,) = [each for each in done.tried if each.change.name == "compile"]
    assert failed.outcome == ("unsupported" if status == "unsupported" else "failed")
    assert sum("compile" in spec.techniques for session in world.sessions for spec in session.specs) == 1


def test_the_path_is_proven_before_the_first_compilation() -> None:
    world = World(gains(fused_optimizer=1.03, cudnn_search=1.03, compile=1.2))
    world.search(space_of("fused-optimizer", "cudnn-search", "compile"))
    first = next(i for i, each in enumerate(world.sessions) if any("compile" in s.techniques for s in each.specs))
    top = START.model_copy(update={"techniques": ("cudnn-search", "fused-optimizer")})
    earlier = [set(map(key_of, session.specs)) for session in world.sessions[:first]]
    assert sum(key_of(top) in keys for keys in earlier) == 2


# Memory


def held(**shares: float) -> Callable[[TrialSpec], float]:
    """Return memory that is proportional to the batch, with a factor for each technique, and half a GiB on top."""
    factor = gains(**shares)
    return lambda spec: GIB * (0.5 + 2 * spec.batch_size / 256 * factor(spec))


def test_a_change_that_only_saves_memory_is_accepted_if_memory_is_the_limit() -> None:
    """Two changes cost time and save memory; only both together fit."""
    world = World(gains(chunked_loss=0.9, fused_optimizer=0.8), held_bytes=held(chunked_loss=0.7, fused_optimizer=0.6))
    start = fake_spec(workload="lstm-lm")
    space = SearchSpace(
        start, ("fp32",), ("chunked-loss", "fused-optimizer"), fake_environment(), memory_bytes=1.5 * GIB
    )
    done = world.search(space)
    assert winner_of(done) == START or not winner_of(done).techniques, "without a limit they do not pay"
    limited = [
        each for each in done.tried if each.limited and each.outcome == "accepted" and each.spec.batch_size == 256
    ]
    assert set(limited[-1].spec.techniques) == {"chunked-loss", "fused-optimizer"}
    assert world.measured.held_bytes(limited[-1].spec) <= 1.5 * GIB


@pytest.mark.parametrize("memory_bytes", [math.inf, 1.5 * GIB])
def test_checkpointing_is_tried_for_a_memory_limit_alone(memory_bytes: float) -> None:
    """It is tried although nothing that was tried for speed saves memory."""
    world = World(gains(activation_checkpointing=0.8, compile=1.5), held_bytes=held(activation_checkpointing=0.4))
    done = world.search(space_of("activation-checkpointing", "compile", memory_bytes=memory_bytes))
    assert winner_of(done).techniques == ("compile",)
    checkpointed = [each for each in done.tried if "activation-checkpointing" in each.spec.techniques]
    assert bool(checkpointed) == math.isfinite(memory_bytes)
    assert all(each.limited for each in checkpointed)
    whole = [each.spec for each in checkpointed if each.outcome == "accepted" and each.spec.batch_size == 256]
    assert [spec.techniques for spec in whole[-1:]] == [("activation-checkpointing", "compile")] * bool(checkpointed)


def test_a_plain_loop_that_runs_out_of_memory_is_made_to_fit() -> None:
    """Nothing runs in float32 but with chunked-loss; then compilation pays, which ran out of memory without it."""
    world = World(
        gains(chunked_loss=0.9, compile=1.5),
        status=lambda spec: "ok" if "chunked-loss" in spec.techniques else "oom",
    )
    start = fake_spec(workload="lstm-lm")
    done = world.search(SearchSpace(start, ("fp32",), ("chunked-loss", "compile"), fake_environment()))
    assert done.ending == "nothing left"
    accepted = [each for each in done.tried if each.outcome == "accepted"]
    assert set(accepted[-1].spec.techniques) == {"chunked-loss", "compile"}
    assert world.search(SearchSpace(start, ("fp32",), ("compile",), fake_environment())).ending == "failed"


def test_a_plain_loop_that_crashes_ends_the_search() -> None:
    world = World(gains(), status=lambda _: "crashed")
    done = world.search(space_of("compile"))
    assert (done.ending, done.tried, len(world.sessions)) == ("failed", (), 1)


def test_a_second_search_stays_within_the_limit() -> None:
    world = World(gains(cudnn_search=1.5, fused_optimizer=1.2), held_bytes=held(cudnn_search=2.0))
    limit = 3 * GIB
    done = world.search(space_of("cudnn-search", "fused-optimizer", memory_bytes=limit))
    assert "cudnn-search" in winner_of(done).techniques
    limited = [each for each in done.tried if each.limited]
    same_batch = [each.spec for each in limited if each.outcome == "accepted" and each.spec.batch_size == 256]
    assert same_batch == [START.model_copy(update={"techniques": ("fused-optimizer",)})]


@pytest.mark.parametrize(("limit", "batch_size"), [(2.0, 184), (1.55, 128), (0.6, 11), (0.4, None)])
def test_the_winner_fits_on_a_smaller_batch_if_any_fits(limit: float, batch_size: int | None) -> None:
    world = World(gains(cuda_graph=1.5), held_bytes=held())
    done = world.search(space_of("cuda-graph", memory_bytes=limit * GIB))
    assert done.ending == "nothing left"
    fitting = [each.spec for each in done.tried if each.limited and each.outcome == "accepted"]
    assert [spec.batch_size for spec in fitting] == ([batch_size] if batch_size else [])
    assert all(spec.techniques == ("cuda-graph",) for spec in fitting)
    assert {spec.batch_size for spec in done.used} <= {256, 128, batch_size or 1}, "predicted from these two"


def test_a_batch_that_holds_more_than_predicted_is_followed_by_a_smaller_one() -> None:
    memory = held()
    world = World(
        gains(cuda_graph=1.5), held_bytes=lambda spec: memory(spec) * (1.1 if 128 < spec.batch_size < 256 else 1)
    )
    done = world.search(space_of("cuda-graph", memory_bytes=2 * GIB))
    outcomes = {each.spec.batch_size: each.outcome for each in done.tried if each.limited}
    assert outcomes == {168: "accepted", 184: "too large", 128: "second best"}


def test_larger_batches_are_compared_by_units_per_second() -> None:
    world = World(lambda spec: 1.3 if spec.batch_size > 256 else 1.0)
    space = SearchSpace(START, ("fp32",), (), fake_environment(), larger_batches=True)
    done = world.search(space)
    assert winner_of(done).batch_size == 512
    (accepted,) = [each for each in done.tried if each.outcome == "accepted"]
    assert accepted.ratio is not None
    assert accepted.ratio.value == pytest.approx(1.3, rel=0.05)


def test_a_loop_that_holds_less_is_compared_with_more_at_once() -> None:
    def held_bytes(spec: TrialSpec) -> float:
        return (1 if spec.precision == "bf16-mixed" else 6) * GIB

    world = World(gains(bf16_mixed=2.0), held_bytes=held_bytes)
    cheap = ("channels-last", "cudnn-search", "fused-optimizer", "cuda-graph")
    world.search(space_of(*cheap, precisions=("fp32", "bf16-mixed")))
    sizes: dict[str, list[int]] = {}
    for session in world.sessions:
        sizes.setdefault(session.purpose, []).append(len(session.specs))
    assert set(sizes["changes to fp32"]) == {2}
    assert sizes["changes to bf16-mixed"][0] == 1 + len(cheap)


def test_where_few_fit_a_precision_far_ahead_is_what_the_others_are_compared_with() -> None:
    small = fake_environment().model_copy(update={"gpu_memory_bytes": 5 * GIB})
    names = ("fp32", "fp16-mixed", "bf16-mixed", "bf16-master")
    space = SearchSpace(START, names, (), small)
    speed = gains(fp16_mixed=2.0, bf16_mixed=2.2, bf16_master=2.5)
    world = World(speed, held_bytes=lambda spec: GIB if "16" in spec.precision else 2 * GIB)
    done = world.search(space)
    assert winner_of(done).precision == "bf16-master"
    with_start = [session for session in world.sessions if session.specs[0] == START]
    measured_next_to_start = {spec.precision for session in with_start for spec in session.specs[1:]}
    assert "bf16-mixed" not in measured_next_to_start, "its session would wait for the slow steps of fp32"


@pytest.mark.parametrize(("gain", "is_tried_again"), [(1.003, False), (1.006, True)])
def test_a_small_gain_is_tried_again_once_it_is_worth_more(gain: float, is_tried_again: bool) -> None:
    world = World(gains(fused_optimizer=gain, channels_last=2.0))
    world.search(space_of("channels-last", "fused-optimizer"))
    tried = {spec.techniques for session in world.sessions for spec in session.specs}
    assert (("channels-last", "fused-optimizer") in tried) is is_tried_again, "it saves the same time of half the step"


def test_what_is_compiled_beside_a_great_gain_is_compiled_on_top_of_it_alone() -> None:
    world = World(gains(compile=2.0, compiled_update=1.2), held_bytes=lambda _: 6 * GIB)
    assert winner_of(world.search(space_of("compiled-update", "compile"))).techniques == ("compiled-update", "compile")
    assert ("compiled-update",) not in {spec.techniques for session in world.sessions for spec in session.specs}


def test_fewer_configurations_share_a_small_device() -> None:
    world = World(gains(), held_bytes=lambda _: 6 * GIB)
    world.search(space_of("channels-last", "cudnn-search", "fused-optimizer"))
    assert max(len(session.specs) for session in world.sessions[1:]) == 2


def test_what_is_against_the_causes_of_the_plain_loop_comes_first() -> None:
    step = fake_trial(START).ranks[0].blocks[0]
    busy = step.seconds / step.num_steps
    for classes, first in (({"optimizer": busy}, "fused-optimizer"), ({"layout_conversion": busy}, "channels-last")):
        profile = StepProfile(device_type="cuda", num_steps=3, seconds=busy, busy_seconds=busy, class_seconds=classes)
        trial = fake_trial(START).model_copy(update={"profile": profile})
        measured = Measurements().plus([trial])
        steps = TuningSteps(space_of("channels-last", "fused-optimizer"), measured, TimeLeft(1e6, 1.0))
        decision = advance(steps.run())
        assert isinstance(decision, Session)
        assert next(spec.techniques for spec in decision.specs if spec.techniques) == (first,)


def test_a_loop_that_joined_late_is_compared_until_its_gain_is_known() -> None:
    """Nothing else is in doubt: the change between is in as many sessions as a small gain is worth."""
    path = [START.model_copy(update={"techniques": TECHNIQUES[:number]}) for number in range(3)]
    speeds, measured = dict.fromkeys(map(key_of, path), 1.0), Measurements()
    world = World(lambda spec: speeds[key_of(spec)])
    for session, between in ((path[:2], 1.05), (path, 1.0), (path, 1.02)):
        speeds |= {key_of(path[1]): between, key_of(path[2]): 1.09 * between}
        measured = measured.plus(world.measure(Session(tuple(session), ""), measured), session)
    settling = TuningSteps(space_of(*TECHNIQUES), measured, TimeLeft(1e6, 1.0))._settle(path)
    assert next(settling).specs == (path[0], path[2])
    for _ in range(2):
        measured = measured.plus(world.measure(Session((path[0], path[2]), ""), measured), (path[0], path[2]))
    with pytest.raises(StopIteration):
        settling.send((measured, TimeLeft(1e6, 1.0)))
