"""The climb on the fake engine, whose techniques buy what the test says."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import CommandLine
from fake_engine import FakeEngine, Fault, fake_environment, fake_spec, step_seconds

from castwise.analysis.statistics import Estimate
from castwise.records.store import load_folder
from castwise.registry.techniques import join
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import SearchSpace, TuningResult, loop_name
from castwise.tune.changes import Change, may_enable
from castwise.tune.render import conclusions, fastest_within
from castwise.tune.render import reasons as said_reasons
from castwise.tune.request import TuneRequest, prepare_tuning
from castwise.tune.rows import each_once, lines_of
from castwise.tune.time_budget import TimeBudget

Gain = Callable[[TrialSpec], float]


def made_up(spec: TrialSpec) -> float:
    """Channels last pays with 16 bits alone, a graph with compilation alone; the rest pays always."""
    gains = {
        "channels-last": 1.6 if "16" in spec.precision else 0.8,
        "cudnn-search": 1.1,
        "fused-optimizer": 1.03,
        "compile": 0.95 if "cuda-graph" not in spec.techniques else 1.2,
        "compile-max-autotune": 0.9,
        "cuda-graph": 1.3 if "compile" in spec.techniques else 1.0,
        "pad-channels-4": 2.0,
    }
    product = 1.0
    for name in spec.techniques:
        product *= gains.get(name, 1.0)
    return product


def engine(gain: Gain = made_up, **traits: object) -> FakeEngine:
    return FakeEngine(exclusive=False, gain=gain, **traits)  # type: ignore[arg-type]


def climb(made: FakeEngine, **request: object) -> TuningResult:
    asked = TuneRequest("resnet50", **request)  # type: ignore[arg-type]
    return prepare_tuning(asked, make_engine=lambda *_: made).run()


def outcomes(climbed: TuningResult) -> dict[str, str]:
    return {each.move.name: each.outcome for each in climbed.attempts}


def test_it_climbs_to_the_fastest_and_sees_what_pays_only_together() -> None:
    made = engine()
    climbed = climb(made)
    assert climbed.ending == "nothing left"
    assert climbed.winner.precision == "bf16-mixed"
    assert climbed.winner.techniques == ("channels-last", "cudnn-search", "fused-optimizer", "compile", "cuda-graph")
    names = [each.move.name for each in climbed.attempts if each.outcome == "taken"]
    assert names == ["bf16-mixed", "channels-last", "cudnn-search", "fused-optimizer", "compile + cuda-graph"]
    assert made.num_open == 0


def test_every_rung_is_proven_over_the_one_below() -> None:
    climbed = climb(engine())
    taken = [each for each in climbed.attempts if each.outcome == "taken"]
    for below, each in itertools.pairwise([climbed.start, *(each.spec for each in taken)]):
        found = next(attempt for attempt in taken if attempt.spec == each)
        assert found.below == below
        assert found.ratio is not None
        assert found.ratio.low > 1
        assert found.ratio.n > 1 or found.ratio.low > 1.1, "what one process shows is far beyond what two differ by"
    assert lines_of(climbed)[-1].total is not None


def test_where_nothing_pays_it_stays_where_it_began() -> None:
    climbed = climb(engine(lambda spec: 0.1 if spec.techniques or spec.precision != "fp32" else 1.0))
    assert climbed.winner == climbed.start
    assert climbed.ending == "nothing left"
    assert "taken" not in outcomes(climbed).values()


def test_a_gain_within_the_margin_is_the_same_and_not_taken() -> None:
    climbed = climb(engine(lambda spec: 1.004 if "cuda-graph" in spec.techniques else 1.0), precisions=("fp32",))
    assert climbed.winner == climbed.start
    assert outcomes(climbed)["cuda-graph"] == "same"


@pytest.mark.parametrize("kind", ["oom", "crash", "timeout", "unsupported"])
def test_what_fails_is_recorded_and_the_climb_goes_on(kind: str) -> None:
    made = engine(faults={"compile": Fault(kind)})
    climbed = climb(made)
    assert climbed.ending == "nothing left"
    assert climbed.winner.techniques == ("channels-last", "cudnn-search", "fused-optimizer")
    assert outcomes(climbed)["compile"] == ("unsupported" if kind == "unsupported" else "failed")
    reason = next(each.reason for each in climbed.attempts if each.move.name == "compile")
    assert "(fake)" in reason or "fake_kernel" in reason
    assert sum("compile" in spec.techniques for spec in made.measured) <= 10, (
        "beside all, beside fewer, alone, not again"
    )


def test_a_longer_time_limit_tries_what_ran_into_the_shorter_one_and_nothing_else(tmp_path: Path) -> None:
    """A network that compiles for four minutes, asked again with --timeout: what was measured stands."""

    def asked(seconds: float, **traits: object) -> tuple[TuningResult, list[TrialSpec]]:
        made = engine(**traits)
        return climb(made, results=tmp_path, timeout_seconds=seconds), made.measured

    before, _ = asked(180.0, faults={"compile": Fault("timeout")})
    assert outcomes(before)["compile"] == "failed"
    assert asked(180.0)[1] == [], "what failed stands"
    after, measured = asked(400.0)
    assert outcomes(after)["compile + cuda-graph"] == "taken"
    beside = [spec for spec in measured if "compile" not in join(spec.techniques)]
    assert {spec.configuration for spec in beside} == {before.winner.configuration}, "what compiles sits beside it"


def refused_without_fused(spec: TrialSpec) -> str | None:
    """Refuse what SGD with a scheduler does, and kernels that find nothing."""
    if "cuda-graph" in spec.techniques and "fused-optimizer" not in spec.techniques:
        return "cuda-graph needs fused-optimizer (fake)"
    return "space-to-depth finds nothing to do (fake)" if "space-to-depth" in spec.techniques else None


def test_what_a_process_refused_is_tried_again_where_the_loop_may_allow_it() -> None:
    gains = {"cuda-graph": 1.5, "fused-optimizer": 1.05, "cudnn-search": 1.3, "space-to-depth": 2.0}
    made = engine(
        lambda spec: math.prod(gains.get(name, 1.0) for name in spec.techniques), refuses=refused_without_fused
    )
    climbed = climb(made, precisions=("fp32",))
    assert {"cuda-graph", "fused-optimizer"} <= set(climbed.winner.techniques)
    lines = [line for line in lines_of(climbed) if line.outcome == "unsupported"]
    assert [line.reason for line in lines if line.tried == "space-to-depth"] == [
        "space-to-depth finds nothing to do (fake)"
    ]
    tries = [spec for spec in made.measured if "space-to-depth" in spec.techniques]
    assert len(tries) == 1, "nothing that was taken could change that"


def test_what_skipped_steps_keep_away_is_tried_where_none_are() -> None:
    below = fake_spec("fp16-mixed", loss_scale="dynamic")
    refused = Change(techniques=("no-step-sync",))
    assert may_enable(Change(precision="bf16-mixed"), below, refused, "it waits")
    assert not may_enable(Change(precision="fp16-master"), below.model_copy(update={"precision": "fp32"}), refused, "")
    assert not may_enable(
        Change(precision="bf16-mixed"), below, Change(techniques=("space-to-depth",)), "finds nothing"
    )
    assert not may_enable(Change(techniques=("cudnn-search",)), below, refused, "it waits")


def test_a_technique_that_its_process_refuses_is_in_no_pair_and_stands_once() -> None:
    made = engine(refuses=lambda spec: "it reads a loss (fake)" if "cuda-graph" in spec.techniques else None)
    climbed = climb(made)
    assert not [spec for spec in made.measured if {"compile", "cuda-graph"} <= set(spec.techniques)]
    assert sum("it reads a loss" in line.reason for line in lines_of(climbed)) == 1
    assert said_reasons(climbed).count("cuda-graph: it reads a loss (fake)") == 1


def test_what_a_process_refuses_stands_in_the_place_of_what_was_known_before() -> None:
    def gain(spec: TrialSpec) -> float:
        return 1.5 if spec.precision == "fp16-mixed" else 1.0

    def refuses(spec: TrialSpec) -> str | None:
        return "your scheduler waits (fake)" if "no-step-sync" in spec.techniques else None

    climbed = climb(engine(gain, refuses=refuses), precisions=("fp32", "fp16-mixed"))
    assert [line.reason for line in lines_of(climbed) if line.tried == "no-step-sync"] == [
        "your scheduler waits (fake)"
    ]


def test_where_a_part_of_a_move_is_taken_all_others_are_open_again() -> None:
    def gain(spec: TrialSpec) -> float:
        """Channels last comes with 16 bits, and is of no use there; what is possible then pays."""
        return (
            (2.0 if spec.precision == "fp16-mixed" else 1.0)
            * (0.9 if "channels-last" in spec.techniques else 1.0)
            * (1.3 if "no-step-sync" in spec.techniques else 1.0)
        )

    climbed = climb(engine(gain), precisions=("fp32", "fp16-mixed"))
    assert climbed.winner.precision == "fp16-mixed"
    assert climbed.winner.techniques == ("no-step-sync",)


def test_without_the_first_loop_there_is_no_climb() -> None:
    climbed = climb(engine(faults={"fp32": Fault("oom")}))
    assert climbed.ending == "failed"
    assert not climbed.attempts


def test_a_loop_that_computes_no_numbers_is_not_taken() -> None:
    climbed = climb(engine(faults={"bf16-mixed": Fault("nan")}))
    assert climbed.winner.precision == "fp16-mixed"


def test_what_cannot_be_had_is_said_with_its_reason() -> None:
    climbed = climb(engine(environment=fake_environment(None)), device="cpu", budget_seconds=1e6)
    assert outcomes(climbed)["cuda-graph"] == "unsupported"
    reasons = {each.move.name: each.reason for each in climbed.attempts if each.outcome == "unsupported"}
    assert "needs a CUDA device" in reasons["cuda-graph"]
    assert "cuda-graph needs a CUDA device; this is cpu" in said_reasons(climbed), "its name once"
    shown = [line.tried for line in lines_of(climbed) if line.outcome == "unsupported"]
    assert len(shown) == len(set(shown)), "each once"


def test_another_model_is_tried_only_where_it_is_allowed() -> None:
    assert "pad-channels-4" not in outcomes(climb(engine()))
    allowed = climb(engine(), numerics="shape")
    assert outcomes(allowed)["pad-channels-4"] == "taken"
    assert "pad-channels-4" in allowed.winner.techniques


def test_true_precisions_are_tried_only_where_they_are_named() -> None:
    assert {spec.precision for spec in climb(engine()).rungs} <= {"fp32", "bf16-mixed"}
    named = climb(engine(), precisions=("fp32", "fp16-true"))
    assert named.winner.precision == "fp16-true"


def test_the_first_precision_named_is_the_plain_loops() -> None:
    assert climb(engine(), precisions=("tf32", "bf16-mixed")).start.precision == "tf32"


def test_all_is_on_record_and_the_same_command_measures_nothing_again(tmp_path: Path) -> None:
    first = engine()
    before = climb(first, results=tmp_path)
    kept, problems = load_folder(tmp_path)
    assert not problems
    assert {trial.spec.key for trial in kept} == {trial.spec.key for trial in before.trials}
    second = engine()
    after = climb(second, results=tmp_path)
    assert second.measured == []
    assert [each.outcome for each in after.attempts] == [each.outcome for each in before.attempts]
    assert climb(third := engine(), results=tmp_path, again=True).winner == before.winner
    assert len(third.measured) == len(first.measured)


def test_it_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = engine(faults={"#30": Fault("interrupt", "run_block")})
    with pytest.raises(KeyboardInterrupt):
        climb(cut, results=tmp_path)
    kept = load_folder(tmp_path)[0]
    assert kept
    rest, whole = engine(), engine()
    recalled: list[int] = []
    monkeypatch.setattr(TimeBudget, "recall", lambda _, trials, start: recalled.append(len(trials)))
    winner = climb(rest, results=tmp_path).winner
    assert recalled == [len(kept)], "what those compiled is on disk"
    assert climb(whole).winner == winner
    assert len(rest.measured) < len(whole.measured)


def test_the_budget_ends_it_with_what_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 5)
    monkeypatch.setattr("castwise.tune.time_budget.time.perf_counter", lambda: float(next(clock)))
    climbed = climb(engine(), budget_seconds=300)
    assert climbed.ending == "budget"
    assert len(climbed.trials) < len(climb(engine(), budget_seconds=1e6).trials)


def test_what_there_was_no_time_for_is_no_failure_and_is_tried_with_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest loop was screened whole; the sitting that has its parts one by one would not have ended in time."""
    asked = {"precisions": ("fp32", "bf16-mixed"), "results": tmp_path}
    with monkeypatch.context() as patched:
        clock = itertools.count(0, 5)
        patched.setattr("castwise.tune.time_budget.time.perf_counter", lambda: float(next(clock)))
        cut = climb(engine(), budget_seconds=700, **asked)
    assert cut.ending == "budget"
    assert outcomes(cut)["bf16-mixed + channels-last"] == "taken"
    (lacking,) = [each for each in cut.attempts if each.move.name == "bf16-mixed"]
    assert (lacking.outcome, lacking.reason, lacking.ratio) == ("not tried", "no time was left for it", None)
    assert not any("bf16-mixed" in reason for reason in said_reasons(cut))
    whole = climb(engine(), budget_seconds=1e6, **asked)
    assert outcomes(whole)["bf16-mixed"] == "taken"
    assert whole.ending == "nothing left"


def test_trials_of_before_are_told_from_those_that_the_time_is_of(tmp_path: Path) -> None:
    asked = {"precisions": ("fp32", "bf16-mixed"), "results": tmp_path}
    first = climb(engine(), **asked)
    count = len(first.trials)
    assert (first.num_recorded, len(load_folder(tmp_path)[0])) == (0, count)
    assert took_in(first).startswith(f"{count} trials in ")
    more = climb(made := engine(), results=tmp_path)
    assert len(made.measured) == len(more.trials) - more.num_recorded > 0
    assert took_in(more).startswith(f"{len(more.trials)} trials, {more.num_recorded} of them on record already, in ")
    same = climb(engine(), results=tmp_path)
    assert took_in(same).startswith(f"{len(more.trials)} trials, all of them on record already, in ")
    assert climb(engine(), results=tmp_path, again=True).num_recorded == 0


def took_in(climbed: TuningResult) -> str:
    return next(line for line in conclusions(climbed) if " trials" in line)


def doubtful(spec: TrialSpec) -> float:
    """TF32 is faster in its first process alone; fp16 never is, nor is a search."""
    gains = {"tf32": 0.6 * (1.04, 0.9, 1.06, 0.97)[spec.repeat], "fp16-mixed": 0.41 * 0.95}
    return gains.get(spec.precision, 1.0) * (0.99 if "cudnn-search" in spec.techniques else 1.0)


def on_doubtful_loop() -> TuningResult:
    tuning = prepare_tuning(TuneRequest("resnet50"), make_engine=lambda *_: engine(doubtful))
    ladder = SearchSpace(("fp32", "tf32", "fp16-mixed"), ("channels-last", "cudnn-search"))
    return replace(tuning, ladder=ladder).run()


def test_what_was_tried_on_a_loop_that_is_no_rung_is_told_over_the_rung_below() -> None:
    climbed = on_doubtful_loop()
    lines = {line.tried: line for line in lines_of(climbed)}
    assert lines["tf32 + channels-last"].outcome == "unproven"
    (tried,) = [each for each in climbed.attempts if each.move.name == "cudnn-search"]
    assert tried.below.precision == "tf32"
    line = lines["tf32 + channels-last + cudnn-search"]
    assert line.ratio is not None
    assert line.ratio.value == line.total == pytest.approx(1.03, abs=0.01), "the rung below is the plain loop"
    assert (line.rung, line.outcome) == (1, "unproven"), "what is nothing's second best"
    assert line.reason == "one process: no interval; tried on tf32, channels-last, which is no rung"
    assert "cudnn-search" not in lines


def test_a_loop_that_was_tried_twice_stands_once_on_a_rung() -> None:
    climbed = on_doubtful_loop()
    names = {each.move.name for each in climbed.attempts}
    assert {"fp16-mixed", "fp16-mixed + channels-last"} <= names, "over the plain loop, and over one that is no rung"
    lines = lines_of(climbed)
    assert sum(line.spec.precision == "fp16-mixed" for line in lines) == 1
    (once,) = [line for line in lines if line.spec.precision == "fp16-mixed"]
    assert (once.tried, once.reason) == ("fp16-mixed + channels-last", "one process: no interval")
    known = replace(once, ratio=Estimate(0.95, 0.94, 0.96, 2))
    assert each_once([once, known]) == [known]
    assert each_once([known, once]) == [known]
    assert each_once([once, replace(known, rung=2)]) == [once, replace(known, rung=2)]
    limited = replace(known, is_limited=True)
    assert each_once([once, limited]) == [once, limited], "the same words on another ladder"
    taken = replace(once, outcome="taken")
    assert each_once([taken, known]) == [taken]


@pytest.mark.parametrize(("seconds", "budget"), [(0.009, 160.0), (0.011, 540.0)])
def test_a_short_step_has_a_short_climb_unless_a_budget_is_named(seconds: float, budget: float) -> None:
    plain = fake_spec()
    made = engine(gain=lambda _: step_seconds(plain) / seconds)
    climb = prepare_tuning(TuneRequest("resnet50"), make_engine=lambda *_: made)
    climb.run()
    assert climb._pace.budget_seconds == budget
    named = prepare_tuning(TuneRequest("resnet50", budget_seconds=7.0), make_engine=lambda *_: made)
    named.run()
    assert named._pace.budget_seconds == 7.0


def test_the_fastest_within_a_memory_limit_is_another_loop() -> None:
    climbed = climb(engine())
    peaks = sorted({line.peak_bytes for line in lines_of(climbed) if line.peak_bytes})
    assert fastest_within(climbed, peaks[0] - 1) is None
    tight = fastest_within(climbed, peaks[0] + 2**22)
    assert tight is not None
    assert tight.peak_bytes == peaks[0]


def test_it_takes_few_sittings_and_few_that_compile() -> None:
    """Each sitting costs the start of its processes, each compilation most of a minute on a GPU."""
    made = engine()
    climbed = climb(made)
    assert len({trial.session_id for trial in climbed.trials}) <= 14
    assert len(made.measured) <= 42
    assert sum("compile" in spec.techniques for spec in made.measured) <= 12


def sittings_of(climbed: TuningResult, *specs: TrialSpec) -> int:
    """Return how often these loops sat side by side."""
    return len(set.intersection(*({trial.session_id for trial in climbed.of(spec)} for spec in specs)))


@pytest.mark.parametrize(("gain", "count"), [(1.03, 2), (1.5, 1)])
def test_a_small_gain_is_proven_by_further_processes_and_a_large_one_by_the_first(gain: float, count: int) -> None:
    made = engine(lambda spec: gain if spec.techniques else 1.0)
    tuning = prepare_tuning(TuneRequest("resnet50"), make_engine=lambda *_: made)
    climbed = replace(tuning, ladder=SearchSpace(("fp32",), ("fused-optimizer",))).run()
    (taken,) = [each for each in climbed.attempts if each.outcome == "taken"]
    assert sittings_of(climbed, climbed.start, taken.spec) == count
    assert taken.ratio is not None
    assert taken.ratio.value == pytest.approx(gain, rel=0.01)
    assert taken.ratio.n == count
    assert taken.reason == ("one process each: the interval is of its turns" if count == 1 else "")


def needs(spec: TrialSpec) -> float:
    """Return made-up memory, of the engine's for the precision: speed has its price here."""
    return 2.0 if "cudnn-search" in spec.techniques else 1.0


def test_a_second_climb_stays_within_the_memory_limit() -> None:
    """The fast loop holds too much from the search on; the climb under the limit goes on without it."""
    made = engine(holds=needs)
    limit = 1.5 * 2**30
    climbed = climb(made, memory_bytes=limit)
    assert "cudnn-search" in climbed.winner.techniques
    within = fastest_within(climbed, limit, 256)
    assert within is not None
    assert set(within.spec.techniques) == {"channels-last", "fused-optimizer", "compile", "cuda-graph"}
    assert any(each.outcome == "too large" for each in climbed.attempts if each.limited)
    assert len(made.measured) < 62


def test_a_loop_that_fits_is_climbed_to_even_where_it_is_slower() -> None:
    """Nothing at float32 fits but the one that costs time."""

    def gain(spec: TrialSpec) -> float:
        return 0.7 if "channels-last" in spec.techniques else 1.0

    made = engine(gain, holds=lambda spec: 0.4 if "channels-last" in spec.techniques else 1.0)
    climbed = climb(made, precisions=("fp32",), memory_bytes=2**30)
    within = fastest_within(climbed, 2**30, 256)
    assert climbed.winner == climbed.start
    assert within is not None
    assert within.spec.techniques == ("channels-last",)


GRAPH_ALONE = SearchSpace(("fp32",), ("cuda-graph",))


def shrunk(made: FakeEngine, limit: float, **request: object) -> TuningResult:
    """Climb over one technique, which pays, within a limit."""
    asked = TuneRequest("resnet50", memory_bytes=limit, **request)  # type: ignore[arg-type]
    return replace(prepare_tuning(asked, make_engine=lambda *_: made), ladder=GRAPH_ALONE).run()


def graph_pays(spec: TrialSpec) -> float:
    return 1.5 if "cuda-graph" in spec.techniques else 1.0


def test_where_no_loop_fits_the_winner_does_on_a_smaller_batch() -> None:
    """Made-up loops hold 0.5 GiB and 8 MiB a sample: 1.5 GiB at batch 128, 2.5 at 256."""
    made = engine(graph_pays, fixed_bytes=2**29)
    climbed = shrunk(made, 2 * 2**30)
    assert climbed.winner.batch_size == 256
    within = fastest_within(climbed, 2 * 2**30)
    assert within is not None
    assert within.spec.techniques == ("cuda-graph",)
    assert within.spec.batch_size == 184, "the largest multiple of 8 on the line that leaves the allocator a little"
    assert within.outcome == "taken"
    assert within.tried == "batch 184 (within the limit)"
    assert within.is_limited
    assert fastest_within(climbed, 2 * 2**30, 256) is None
    sizes = [each for each in climbed.attempts if each.move.batch_size]
    assert [(each.spec.batch_size, each.outcome) for each in sizes] == [(184, "taken"), (128, "second best")]
    assert all(each.limited and each.below == climbed.winner for each in sizes)
    assert climbed.ending == "nothing left"
    assert {spec.batch_size for spec in climbed.rungs} == {256}, "the ladder is on one batch"


def test_a_smaller_batch_is_compared_by_units_a_second() -> None:
    climbed = shrunk(engine(graph_pays, fixed_bytes=2**29), 2 * 2**30)
    (taken,) = [each for each in climbed.attempts if each.outcome == "taken" and each.limited]
    assert taken.ratio is not None
    assert taken.ratio.value == pytest.approx((184 / 0.0194) / (256 / 0.0266), rel=0.01)
    line = fastest_within(climbed, 2 * 2**30)
    assert line is not None
    assert line.total == pytest.approx(1.5 * taken.ratio.value, rel=0.01)
    assert line.throughput == pytest.approx(1.5 * 184 / 0.0194, rel=0.01)


def test_where_half_the_batch_is_as_good_no_other_is_tried() -> None:
    """Half the batch was measured to tell what bounds the winner; nothing promises more within this limit."""
    made = engine(graph_pays, fixed_bytes=2**29)
    within = fastest_within(shrunk(made, 1.55 * 2**30), 1.55 * 2**30)
    assert within is not None
    assert within.spec.batch_size == 128
    assert {spec.batch_size for spec in made.measured} == {128, 256}


def test_a_quarter_and_less_is_foretold_from_the_whole_and_the_half() -> None:
    made = engine(graph_pays, fixed_bytes=2**29)
    limit = 0.6 * 2**30
    within = fastest_within(shrunk(made, limit), limit)
    assert within is not None
    assert within.spec.batch_size == 11
    assert {spec.batch_size for spec in made.measured} == {11, 128, 256}, "in one trial more"


def test_what_was_foretold_too_large_is_followed_by_a_smaller_one() -> None:
    """The allocator keeps more on this batch than the line says."""
    made = engine(graph_pays, fixed_bytes=2**29, holds=lambda spec: 1.1 if 128 < spec.batch_size < 256 else 1.0)
    climbed = shrunk(made, 2 * 2**30)
    within = fastest_within(climbed, 2 * 2**30)
    assert within is not None
    assert within.spec.batch_size == 168
    outcome = {each.spec.batch_size: each.outcome for each in climbed.attempts if each.limited}
    assert outcome == {168: "taken", 184: "too large", 128: "second best"}


def test_a_smaller_batch_that_fails_is_a_recorded_result() -> None:
    class Refusing(FakeEngine):
        """Fails on one batch alone."""

    made = Refusing(exclusive=False, gain=graph_pays, fixed_bytes=2**29)
    key = next(t.spec.key for t in shrunk(made, 2 * 2**30).trials if t.spec.batch_size == 184)
    climbed = shrunk(engine(graph_pays, fixed_bytes=2**29, faults={key: Fault("crash")}), 2 * 2**30)
    outcome = {each.spec.batch_size: each.outcome for each in climbed.attempts if each.limited}
    assert outcome[184] == "failed"
    within = fastest_within(climbed, 2 * 2**30)
    assert within is not None
    assert 128 < within.spec.batch_size < 184


def test_trials_on_smaller_batches_are_on_record(tmp_path: Path) -> None:
    limit = 2 * 2**30
    before = shrunk(engine(graph_pays, fixed_bytes=2**29), limit, results=tmp_path)
    after = shrunk(again := engine(graph_pays, fixed_bytes=2**29), limit, results=tmp_path)
    assert again.measured == []
    assert [(each.spec, each.outcome) for each in after.attempts] == [
        (each.spec, each.outcome) for each in before.attempts
    ]
    tighter = shrunk(again, 1.8 * 2**30, results=tmp_path)
    assert {spec.batch_size for spec in again.measured} == {160, 256}, (
        "another limit takes one trial, and its neighbour"
    )
    assert fastest_within(tighter, 1.8 * 2**30) is not None


def test_a_loop_that_holds_more_the_next_time_is_not_measured_again(tmp_path: Path) -> None:
    """What the allocator holds differs from process to process: another guess follows from the same command."""
    made = engine(graph_pays, fixed_bytes=2**29)
    seen = made.measured
    made.holds = lambda spec: 1.3 if spec.batch_size == 256 and seen[-1].batch_size not in (128, 256) else 1.0
    before = shrunk(made, 2 * 2**30, results=tmp_path)
    after = shrunk(again := engine(graph_pays), 2 * 2**30, results=tmp_path)
    assert again.measured == []
    outcomes = [{each.spec.configuration: each.outcome for each in climbed.attempts} for climbed in (before, after)]
    assert outcomes[0] == outcomes[1]


def test_a_limit_that_nothing_meets_ends_with_what_is_needed() -> None:
    made = engine(graph_pays, fixed_bytes=2**29)
    climbed = shrunk(made, 2**29)
    assert fastest_within(climbed, 2**29) is None
    assert {spec.batch_size for spec in made.measured} == {1, 128, 256}
    said = "No loop that was tried fits into 512 MiB; the least is 522 MiB, by fp32, cuda-graph, batch 1."
    assert said in conclusions(climbed, 2**29)
    assert climbed.ending == "nothing left"


def test_smaller_batches_wait_for_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 5)
    monkeypatch.setattr("castwise.tune.time_budget.time.perf_counter", lambda: float(next(clock)))
    made = engine(graph_pays, fixed_bytes=2**29)
    climbed = shrunk(made, 2 * 2**30, budget_seconds=200)
    assert climbed.ending == "budget"
    assert {spec.batch_size for spec in made.measured} == {128, 256}, "half the plain loop's tells what bounds it"
    assert "No loop that was tried fits" in conclusions(climbed, 2 * 2**30)[1]


def test_where_techniques_cannot_reach_the_limit_the_first_batch_is_not_climbed_again() -> None:
    made = engine(holds=lambda spec: 0.95 if spec.techniques else 1.0, fixed_bytes=2**29)
    climbed = climb(made, memory_bytes=0.8 * 2**30)
    unlimited = climb(plain := engine(holds=lambda spec: 0.95 if spec.techniques else 1.0, fixed_bytes=2**29))
    assert climbed.winner == unlimited.winner
    cells, others = ({spec.configuration for spec in each.measured if spec.batch_size == 256} for each in (made, plain))
    assert cells == others
    assert len(made.measured) - len(plain.measured) == 2, "the smaller batch, and its neighbour"


def test_a_larger_batch_is_a_move_where_it_is_asked_for() -> None:
    def gain(spec: TrialSpec) -> float:
        return 1.3 if spec.batch_size > 256 else 1.0

    assert {spec.batch_size for spec in climb(engine(gain)).rungs} == {256}
    climbed = climb(engine(gain), larger_batches=True, precisions=("fp32",))
    assert climbed.winner.batch_size == 512
    taken = next(each for each in climbed.attempts if each.outcome == "taken")
    assert taken.move.name == "batch 512"
    assert taken.ratio is not None
    assert taken.ratio.value == pytest.approx(1.3, rel=0.1)
    line = lines_of(climbed)[1]
    assert line.total == pytest.approx(taken.ratio.value, rel=0.05), "by images a second, not by steps"


def test_epochs_are_tuned_with_the_reading_of_their_data() -> None:
    made = engine(load_seconds=0.001)
    asked = TuneRequest("mnist-cnn", data_set="synthetic:mnist")
    climbed = prepare_tuning(asked, make_engine=lambda *_: made).run()
    assert {trial.spec.kind for trial in climbed.trials} == {"training"}
    assert climbed.start.recipe is not None
    assert climbed.start.recipe.loader.num_workers == 2, "as the source reads it"
    assert next(each for each in climbed.attempts if each.outcome == "taken").move.name == "resident-data"
    assert "resident-data" in climbed.winner.techniques
    assert "bound by its input for" in conclusions(climbed)[-2]
    assert all(len(trial.ranks[0].epochs) >= 4 for trial in climbed.trials if trial.status == "ok")


def test_a_larger_loader_is_found_where_data_cannot_lie_on_the_device() -> None:
    made = engine(load_seconds=0.001, faults={"resident-data": Fault("oom")})
    asked = TuneRequest("mnist-cnn", data_set="synthetic:mnist", precisions=("fp32",))
    climbed = prepare_tuning(asked, make_engine=lambda *_: made).run()
    assert "loader-workers" in climbed.winner.techniques


def test_training_needs_a_source(command: CommandLine) -> None:
    done = command("tune", "resnet152", "--training", "--results", command.results, engine=engine())
    assert done.code == 2
    assert "No suite trains resnet152" in done.err
    done = command("tune", "resnet50", "--data-set", "synthetic:mnist", "--results", command.results, engine=engine())
    assert done.code == 2


def test_it_says_in_words_what_was_reached(command: CommandLine) -> None:
    done = command("tune", "resnet50", "--memory", "1.5GiB", "--results", command.results, engine=engine())
    assert done.code == 0
    assert "taken" in done.out
    best = "bf16-mixed, channels-last+cudnn-search+fused-optimizer+compile+cuda-graph"
    assert f"The fastest loop: {best}" in done.out
    assert f"The fastest within 1.50 GiB: {best}" in done.out
    assert "not bound by launches" in done.out
    assert "TF32, which moves the same bytes, is 1.67 times as fast" in done.out


LIMITED = ("tune", "resnet50", "--memory", "1.5GiB", "--precision", "fp32")


@pytest.mark.parametrize("output", ["table", "json", "markdown", "csv"])
def test_a_loop_on_a_smaller_batch_is_named_in_every_format(command: CommandLine, output: str) -> None:
    made = engine(graph_pays)
    done = command(*LIMITED, "--format", output, "--results", command.results, engine=made)
    assert done.code == 0
    assert "batch 184 (within the limit)" in done.out
    said = (
        "The fastest within 1.50 GiB: fp32, cuda-graph, batch 184: 14,2",
        "Batch 184 in the place of 256 is another training: the noise of gradients and the statistics of batch norm "
        "differ; on batch 256 no loop that was tried fits.",
    )
    if output in ("table", "markdown"):
        assert all(sentence in done.out for sentence in said)
        assert "1.44 GiB  taken" in done.out or "| 1.44 GiB | taken |" in done.out, "as the limit counts it"
    if output == "json":
        document = json.loads(done.out)
        assert document["memory_limit_bytes"] == 1.5 * 2**30
        assert document["fastest"]["batch_size"] == 256
        assert document["fastest_within_memory"]["batch_size"] == 184
        assert document["fastest_within_memory"]["techniques"] == ["cuda-graph"]
        assert document["fastest_within_memory_on_this_batch"] is None
        (row,) = [row for row in document["rows"] if row["batch_size"] == 184]
        assert row["outcome"] == "taken"
        assert row["peak_reserved_bytes"] <= 1.5 * 2**30 < document["rows"][0]["peak_reserved_bytes"]
        assert any(said[1] in sentence for sentence in document["sentences"])


@pytest.mark.parametrize("output", ["json", "markdown", "csv"])
def test_other_formats_have_the_rungs_too(command: CommandLine, output: str) -> None:
    done = command("tune", "resnet50", "--format", output, "--results", command.results, engine=engine())
    assert done.code == 0
    assert "compile + cuda-graph" in done.out
    if output == "json":
        document = json.loads(done.out)
        assert document["fastest"]["techniques"][-2:] == ["compile", "cuda-graph"]
        assert document["ending"] == "nothing left"
        assert document["trials"]
        assert (document["memory_limit_bytes"], document["num_recorded"]) == (None, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("resnet5",), "No workload named 'resnet5'"),
        (("resnet50", "--memory", "much"), "--memory takes an amount of memory above 0"),
        (("resnet50", "--budget", "-1"), "--budget takes a duration above 0"),
        (("resnet50", "--precision", "fp31"), "No precision named 'fp31'"),
        (("resnet50", "--timeout", "0"), "--timeout takes a duration above 0"),
    ],
)
def test_bad_input_is_one_line_and_no_trial(command: CommandLine, arguments: tuple[str, ...], words: str) -> None:
    done = command("tune", *arguments, "--results", command.results, engine=engine())
    assert done.code == 2
    assert words in done.err
    assert len(done.error_lines) == 1
    assert done.engine.measured == []


def test_the_winner_is_written_as_a_script(command: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    done = command("tune", "resnet50", "--emit", file, "--results", command.results, engine=engine())
    assert done.code == 0
    text = file.read_text()
    assert "torch.compile(compute_loss" in text
    assert "step = StepGraph(train, DEVICE, None)" in text
    assert "Measured by castwise" in text
    compile(text, "train.py", "exec")


def test_the_script_of_a_user_s_model_calls_their_function_where_it_lies(command: CommandLine, tmp_path: Path) -> None:
    own, file = tmp_path / "mine.py", tmp_path / "train.py"
    own.write_text("")  # which the made-up engine does not run
    done = command("tune", f"{own}:build", "--emit", file, "--results", command.results, engine=engine())
    assert done.code == 0, done.err
    text = file.read_text()
    assert f"sys.path.insert(0, {str(tmp_path)!r})" in text
    assert "returned = importlib.import_module('mine').build" in text
    assert "Measured by castwise" in text
    compile(text, "train.py", "exec")


def test_the_script_is_that_of_the_loop_that_fits(command: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    done = command(*LIMITED, "--emit", file, "--results", command.results, engine=engine(graph_pays))
    assert done.code == 0
    assert "the fastest loop within 1.50 GiB as a script" in done.err
    text = file.read_text()
    assert "BATCH_SIZE, UNIT = 184, 'images'" in text
    assert "Measured by castwise 0.0: 14,2" in text


def test_without_a_loop_that_fits_there_is_no_script(command: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    arguments = ("tune", "resnet50", "--memory", "1MiB", "--precision", "fp32", "--emit", file)
    done = command(*arguments, "--results", command.results, engine=engine(graph_pays))
    assert done.code == 1
    assert "is not written: no loop that was tried fits into 1.00 MiB" in done.err
    assert not file.exists()


@pytest.mark.parametrize("workload", ["fastai-resnet18", "mine.py:build", "transformers:bert"])
def test_what_has_no_script_is_refused_before_anything_is_measured(
    command: CommandLine, tmp_path: Path, workload: str
) -> None:
    arguments = (workload, "--emit", tmp_path / "train.py", "--results", command.results)
    done = command("tune", *arguments, engine=engine())
    assert done.code == 2
    assert done.engine.sessions == []


def test_a_climb_that_cannot_begin_is_a_failure(command: CommandLine) -> None:
    made = engine(faults={"fp32": Fault("oom")})
    done = command("tune", "resnet50", "--results", command.results, engine=made)
    assert done.code == 1
    assert "the plain loop itself could not be measured" in done.out


def test_a_loops_name_says_precision_and_techniques() -> None:
    assert loop_name(climb(engine()).start) == "fp32, plain loop"


def test_of_loops_that_are_to_sit_together_those_are_measured_that_there_is_time_for() -> None:
    made = engine()
    tuning = prepare_tuning(TuneRequest("resnet50"), make_engine=lambda *_: made)
    tuning.__dict__["_pace"] = TimeBudget(None)
    tuning.__dict__["_has_time_for"] = lambda specs, keep=1.0: (
        not any("cudnn-search" in each.techniques for each in specs)
    )
    specs = [
        tuning.start.model_copy(update={"techniques": (name,)})
        for name in ("cudnn-search", "compile", "fused-optimizer")
    ]
    assert not tuning._screen(tuning.start, specs), "time was lacking for one"
    assert {spec.techniques for spec in made.measured} == {(), ("compile",), ("fused-optimizer",)}
    assert len({trial.session_id for trial in tuning.known}) == 1


@pytest.mark.parametrize(("proven", "pair"), [((), (0, 3)), ((1,), (1, 3)), ((1, 2), (2, 3)), ((3,), None)])
def test_where_time_is_short_the_top_is_proven_over_the_last_rung_that_is(
    monkeypatch: pytest.MonkeyPatch, proven: tuple[int, ...], pair: tuple[int, int] | None
) -> None:
    made = prepare_tuning(TuneRequest("resnet50"), make_engine=lambda *_: engine())
    names = ("channels-last", "cudnn-search", "fused-optimizer")
    loops = [made.start.model_copy(update={"techniques": names[:count]}) for count in range(4)]
    sat: list[list[TrialSpec]] = []
    monkeypatch.setattr(made, "_ratio", lambda below, spec: Estimate(1.05, 0.9, 1.2, 2))
    monkeypatch.setattr(made, "_is_answered", lambda below, spec: False)
    monkeypatch.setattr(made, "_is_rung", lambda below, spec, limit: loops.index(spec) in proven or bool(sat))
    monkeypatch.setattr(made, "_has_time_for", lambda specs, keep: len(specs) <= 2)
    monkeypatch.setattr(made, "_sit_again", lambda specs: sat.append(list(specs)))
    made._prove(loops, None)
    assert sat == ([] if pair is None else [[loops[pair[0]], loops[pair[1]]]])


def beside(monkeypatch: pytest.MonkeyPatch, *, width: int, most: int) -> set[tuple[str, ...]]:
    """Return the loops that sit where one compiles, on one that is no rung, with room for and time for so many."""
    made = engine()
    tuning = prepare_tuning(TuneRequest("resnet50"), make_engine=lambda *_: made)
    tuning.__dict__["_pace"] = TimeBudget(None)
    monkeypatch.setattr(tuning, "_width", lambda _: width)
    monkeypatch.setattr(tuning, "_has_time_for", lambda specs, keep=1.0: len(specs) <= most)
    current, compiled = (
        tuning.start.model_copy(update={"techniques": names}) for names in (("cudnn-search",), ("compile",))
    )
    assert tuning._screen(current, [compiled], tuning.start)
    return {spec.techniques for spec in made.measured}


@pytest.mark.parametrize(("width", "most", "is_beside"), [(2, 3, True), (1, 3, False), (2, 2, False)])
def test_the_last_rung_sits_beside_what_compiles_where_there_is_room_and_time(
    monkeypatch: pytest.MonkeyPatch, width: int, most: int, is_beside: bool
) -> None:
    found = beside(monkeypatch, width=width, most=most)
    assert found == {("cudnn-search",), ("compile",), *([()] if is_beside else [])}


def climb_that_compiling_ends(gain: Gain, monkeypatch: pytest.MonkeyPatch) -> TuningResult:
    """Climb over what costs little and what compiles; the first sitting that compiles takes all the time there is."""
    made = engine(gain)
    tuning = prepare_tuning(TuneRequest("resnet50", precisions=("fp32",)), make_engine=lambda *_: made)
    tuning = replace(tuning, ladder=SearchSpace(("fp32",), ("cudnn-search", "fused-optimizer", "compile")))
    has_time = lambda _, keep=1.0: not any("compile" in spec.techniques for spec in made.measured)  # noqa: E731
    monkeypatch.setattr(tuning, "_has_time_for", has_time)
    return tuning.run()


def test_what_was_reached_is_proven_before_anything_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def gain(spec: TrialSpec) -> float:
        return 1.03 ** len({"cudnn-search", "fused-optimizer"} & set(spec.techniques))

    climbed = climb_that_compiling_ends(gain, monkeypatch)
    assert set(climbed.winner.techniques) == {"cudnn-search", "fused-optimizer"}
    assert sittings_of(climbed, *climbed.rungs[-2:]) == 2


def test_what_compiles_sits_beside_the_last_rung_where_the_loop_below_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def gain(spec: TrialSpec) -> float:
        searched = (1.04, 0.9, 1.06, 0.97)[spec.repeat] if "cudnn-search" in spec.techniques else 1.0
        return searched * (1.5 if "compile" in spec.techniques else 1.0)

    climbed = climb_that_compiling_ends(gain, monkeypatch)
    assert climbed.rungs == [climbed.start, climbed.winner]
    assert set(climbed.winner.techniques) == {"cudnn-search", "compile"}
    assert sittings_of(climbed, climbed.start, climbed.winner) == 1


def test_what_was_faster_and_is_not_proven_in_time_is_named() -> None:
    climbed = on_doubtful_loop()
    assert not any("Measured faster" in line for line in conclusions(climbed)), "nothing was left to try: it is noise"
    (said,) = (line for line in conclusions(replace(climbed, ending="budget")) if "Measured faster" in line)
    assert "tf32, channels-last+cudnn-search: " in said
    assert "--budget" in said


def test_kernels_that_pay_in_a_compiled_loop_are_found() -> None:
    def gain(spec: TrialSpec) -> float:
        compiled = "compile" in spec.techniques
        kernels = 1.0 if "batch-norm-kernel" not in spec.techniques else (1.2 if compiled else 0.6)
        return kernels * (1.5 if compiled else 1.0)

    tuning = prepare_tuning(TuneRequest("resnet50", precisions=("bf16-mixed",)), make_engine=lambda *_: engine(gain))
    ladder = SearchSpace(("bf16-mixed",), ("channels-last", "batch-norm-kernel", "compile"))
    climbed = replace(
        tuning, ladder=ladder, start=tuning.start.model_copy(update={"techniques": ("channels-last",)})
    ).run()
    assert climbed.winner.techniques == ("channels-last", "batch-norm-kernel", "compile")
    assert [each.move.name for each in climbed.attempts if each.outcome == "taken"] == ["compile", "batch-norm-kernel"]
