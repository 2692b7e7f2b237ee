"""Whether a sitting ends within a climb's budget, by what the sittings before it took."""

import pytest
from fake_engine import fake_facts, fake_spec, fake_trial

from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec
from castwise.tune import time_budget as paces
from castwise.tune.time_budget import TimeBudget, limit_of


def loop(*techniques: str, workload: str = "resnet50") -> TrialSpec:
    return fake_spec(workload=workload, techniques=techniques, device="cuda:0")


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> TimeBudget:
    monkeypatch.setattr(paces.time, "perf_counter", lambda: 0.0)
    made = TimeBudget(20.0)
    made.learn(8.0, [loop()] * 4)
    return made


def test_a_search_says_nothing_of_what_other_loops_take(pace: TimeBudget) -> None:
    pace.learn(16.0, [loop(), loop("fused-optimizer"), loop("cudnn-search")])
    assert pace.has_time_for([loop()] * 10, keep=0.0), "ten of two seconds"
    assert not pace.has_time_for([loop()] * 11, keep=0.0)
    assert pace.has_time_for([loop(), loop("cudnn-search")], keep=0.0), "4 s and a search of 10"
    assert not pace.has_time_for([loop("cudnn-search")] * 2, keep=0.0), "one search after another"


def test_a_compilation_says_nothing_of_searches(pace: TimeBudget) -> None:
    pace.learn(16.0, [loop(), loop("compile")])
    assert pace.has_time_for([loop(), loop("compile")], keep=0.0), "16 s again"
    assert not pace.has_time_for([loop(), loop(), loop(), loop(), loop("compile")], keep=0.0), "22 s"
    pace.learn(10.0, [loop("cudnn-search")])
    pace.learn(30.0, [loop("compile", "cudnn-search")])
    assert pace._compile_seconds == 20.0, "the loop's own 2 s and the search's 8 apart"


def test_what_was_compiled_is_on_disk_for_the_loops_that_share_it(pace: TimeBudget) -> None:
    first = [loop(), loop("compiled-update"), loop("compile")]
    pace.learn(18.0, first)
    both = [loop(), loop("compiled-update", "compile", "fused-optimizer")]
    assert not pace.has_time_for(both, keep=0.0), (
        "4 s and one and a half times 12: a process that failed leaves nothing"
    )
    pace.compiled(first)
    assert pace.has_time_for(both, keep=0.0), "4 s and 0.2 of that"
    assert not pace.has_time_for(both, keep=1.7), "and as much again for the proof"
    pace.learn(7.0, both)
    assert pace._again_seconds == 2.0, "what it took, by one and a half"
    assert pace.has_time_for(both, keep=1.0)
    for other in ("channels-last", "batch-norm-kernel"):
        assert not pace.has_time_for([loop(), loop("compile", other)], keep=1.0), "another step"
    bf16 = fake_spec("bf16-mixed", techniques=("compile",), device="cuda:0")
    assert not pace.has_time_for([loop(), bf16], keep=1.0)


def test_a_climb_that_goes_on_knows_what_was_compiled(pace: TimeBudget) -> None:
    def trial(spec: TrialSpec, first_step_seconds: float) -> Trial:
        return fake_trial(spec, facts=fake_facts(first_step_seconds=first_step_seconds))

    crashed = fake_trial(loop("compile", "channels-last")).model_copy(update={"status": "crashed"})
    both = loop("compiled-update", "compile")
    update = trial(loop("compiled-update"), 90.0)
    others = [
        trial(spec.model_copy(update=update), 200.0)
        for spec in (both, loop("compile", "channels-last"))
        for update in ({"workload": "resnet101"}, {"world_size": 2, "parallelism": "ddp"})
    ]
    pace.recall([trial(loop(), 90.0), update, trial(loop("compile"), 3.0), trial(both, 15.0), crashed, *others], loop())
    assert pace._compile_seconds == 10.0, "15 s by one and a half"
    assert pace.has_time_for([both] * 2, keep=0.5), "4 s and 6, and half of it for the proof"
    assert not pace.has_time_for([loop("compile", "channels-last")] * 2), "24 s: what crashed left nothing"


def test_a_phase_may_take_half_of_the_budget_and_three_minutes_at_the_least() -> None:
    assert [limit_of(budget) for budget in (1200.0, 20.0, None)] == [600.0, 180.0, 270.0]


def test_where_no_loop_is_known_alone_a_search_counts_for_all() -> None:
    made = TimeBudget(100.0)
    made.learn(40.0, [loop("cudnn-search")] * 4)
    assert not made.has_time_for([loop()] * 500), "ten seconds each"


def test_what_has_few_kernels_is_guessed_to_compile_soon(pace: TimeBudget) -> None:
    assert not pace.has_time_for([loop("compile")], keep=0.0)
    assert pace.has_time_for([loop("compile", workload="lstm-lm")], keep=0.0)


def test_proofs_are_kept_time_for(pace: TimeBudget) -> None:
    assert pace.has_time_for([loop()] * 5)
    assert not pace.has_time_for([loop()] * 6)
