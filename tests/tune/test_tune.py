"""`castwise tune` end to end on the fake engine, whose techniques gain what the test says."""

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine, Outcome
from fake_engine import FakeEngine, Fault, fake_environment, fake_facts, fake_spec, fake_trial, machine_with

from castwise.analysis.decide import decide
from castwise.analysis.result_table import rows_of_steps
from castwise.orchestrator.rounds import Rounds, StopRule
from castwise.records.schema import Float8Facts, StepFlops
from castwise.records.store import load_folder
from castwise.registry.techniques import TECHNIQUES
from castwise.spec.trial import TrialSpec
from castwise.tune import search
from castwise.tune.candidates import Change, TriedChange, allowed_techniques, change_between
from castwise.tune.measurements import FIRST_FINAL_REPEAT
from castwise.tune.options import TuneOptions
from castwise.tune.render import conclusions, measured_words, patch, present, reasons
from castwise.tune.result import TuningResult
from castwise.tune.search import prepare_tuning

Gain = Callable[[TrialSpec], float]
Run = Callable[..., Outcome]
GIB = 2.0**30
FASTEST = ("channels-last", "cudnn-search", "fused-optimizer", "compile", "cuda-graph")


def made_up(spec: TrialSpec) -> float:
    """Return more for channels last in 16 bits alone, and for a graph with compilation alone."""
    gains = {
        "channels-last": 1.6 if "16" in spec.precision else 0.8,
        "cudnn-search": 1.1,
        "fused-optimizer": 1.03,
        "compile": 0.95 if "cuda-graph" not in spec.techniques else 1.2,
        "compile-max-autotune": 0.9,
        "cuda-graph": 1.3 if "compile" in spec.techniques else 1.0,
        "pad-channels-4": 2.0,
    }
    return math.prod(gains.get(name, 1.0) for name in spec.techniques)


def engine(gain: Gain = made_up, **traits: object) -> FakeEngine:
    return FakeEngine(exclusive=False, gain=gain, **traits)  # type: ignore[arg-type]


def tune(made: FakeEngine, workload: str = "resnet50", seconds: float = 0.0, **request: object) -> TuningResult:
    """Return the result of a search; each look at the clock takes so many seconds."""
    search = prepare_tuning(TuneOptions(workload, **request), find_machine=machine_with(made))  # type: ignore[arg-type]
    times = itertools.count(0.0, seconds)
    return replace(search, clock=lambda: next(times)).run()


@pytest.fixture
def run(command: CommandLine) -> Run:
    """Return `castwise tune ARGUMENTS --results ...` as a function."""

    def run_tune(*arguments: str | Path, made: FakeEngine | None = None) -> Outcome:
        return command("tune", *arguments, "--results", command.results, engine=made or engine())

    return run_tune


def outcomes(result: TuningResult) -> dict[str, str]:
    return {each.change.name: each.outcome for each in result.tried}


def test_a_winner_with_numbers_in_fewer_bits_names_the_command_that_judges_it(run: Run) -> None:
    done = run("lstm-lm", "--precision", "fp32,fp16-true")
    line = "castwise accuracy lstm-lm --precision fp32,fp16-true --results"
    assert f"Its accuracy is untested: `{line}" in " ".join(done.out.split())
    assert "Its accuracy" not in run("lstm-lm", "--precision", "fp32,fp16-mixed").out


def test_ends_at_the_fastest_with_pairs_that_pay_only_together() -> None:
    made = engine()
    result = tune(made)
    assert (result.ending, result.winner.precision, result.winner.techniques) == ("nothing left", "bf16-mixed", FASTEST)
    assert result.rows[-1]["total_speedup"] is not None
    assert made.num_open == 0
    assert len({trial.session_id for trial in result.trials}) <= 14, "each session starts processes"
    assert sum("compile" in spec.techniques for spec in made.measured) <= 12, "each takes most of a minute"


@pytest.mark.parametrize(
    ("gain", "precisions", "device"),
    [
        (made_up, None, None),
        (made_up, ("fp32", "tf32"), None),
        (lambda spec: 0.5 if spec.techniques else 1.0, ("fp32",), None),
        (made_up, None, "cpu"),
    ],
)
def test_castwise_run_gives_the_same_answer_on_its_trials(
    gain: Gain, precisions: tuple[str, ...] | None, device: str | None
) -> None:
    """But for gains below 3 %, which a search proves and `castwise run` does not advise."""
    made = engine(gain, environment=fake_environment(None) if device else fake_environment())
    result = tune(made, precisions=precisions, device=device)
    (advice,) = decide(rows_of_steps(result.trials))
    assert (advice.precision, advice.techniques) == (result.winner.precision, result.winner.techniques)
    assert advice.decision == ("stay" if result.winner == result.start else "take")


@pytest.mark.parametrize("gain", [0.1, 1.004])
def test_without_a_gain_the_plain_loop_is_the_fastest(gain: float) -> None:
    result = tune(
        engine(lambda spec: gain if spec.techniques or spec.precision != "fp32" else 1.0), precisions=("fp32",)
    )
    assert (result.winner, result.ending) == (result.start, "nothing left")
    assert outcomes(result)["cuda-graph"] == ("same" if gain > 1 else "slower")


def test_a_longer_timeout_tries_what_ran_into_the_shorter_one(tmp_path: Path) -> None:
    def measured(seconds: float, **traits: object) -> tuple[TuningResult, list[TrialSpec]]:
        made = engine(**traits)  # type: ignore[arg-type]
        return tune(made, results=tmp_path, timeout_seconds=seconds), made.measured

    before, _ = measured(180.0, faults={"compile": Fault("timeout")})
    assert outcomes(before)["compile"] == "failed"
    assert measured(180.0)[1] == [], "what failed is not measured again"
    after, specs = measured(400.0)
    assert outcomes(after)["compile + cuda-graph"] == "accepted"
    others = {spec.techniques for spec in specs if "compile" not in "+".join(spec.techniques)}
    assert others == {before.winner.techniques, ()}, "what it is compared with, and the plain loop at the end"


def test_what_a_process_refused_is_tried_again_if_a_technique_it_named_was_accepted() -> None:
    def refuses(spec: TrialSpec) -> str | None:
        if "cuda-graph" in spec.techniques and "fused-optimizer" not in spec.techniques:
            return "cuda-graph needs fused-optimizer (fake)"
        return "space-to-depth finds nothing to do (fake)" if "space-to-depth" in spec.techniques else None

    gains = {"cuda-graph": 1.5, "fused-optimizer": 1.05, "cudnn-search": 1.3, "space-to-depth": 2.0}
    made = engine(lambda spec: math.prod(gains.get(name, 1.0) for name in spec.techniques), refuses=refuses)
    result = tune(made, precisions=("fp32",))
    assert {"cuda-graph", "fused-optimizer"} <= set(result.winner.techniques)
    assert sum("space-to-depth" in spec.techniques for spec in made.measured) == 1
    assert reasons(result).count("space-to-depth finds nothing to do (fake)") == 1


def test_techniques_for_layers_that_the_model_lacks_are_not_tried(tmp_path: Path) -> None:
    """Without the record of its layers, all are tried."""
    own = tmp_path / "mine.py"
    own.write_text("")
    search = f"{own}:build"
    gpt, unknown = tune(made := engine(layers=("batch norm",)), search), tune(engine(), search)
    for_convolutions = {"channels-last", "cudnn-search", "space-to-depth", "matmul-stem"}
    assert not {name for spec in made.measured for name in spec.techniques} & {*for_convolutions, "max-pool-kernel"}
    assert "not tried, as the model has no max pooling: max-pool-kernel" in reasons(gpt)
    assert set(gpt.without_layers["convolution"]) == for_convolutions
    assert "channels-last" in outcomes(unknown)
    assert not unknown.without_layers


def test_a_technique_that_its_process_refuses_is_in_no_pair() -> None:
    made = engine(refuses=lambda spec: "it reads a loss (fake)" if "cuda-graph" in spec.techniques else None)
    tune(made)
    assert not [spec for spec in made.measured if {"compile", "cuda-graph"} <= set(spec.techniques)]


def test_without_the_plain_loop_there_is_no_search(run: Run) -> None:
    assert run("resnet50", made=engine(faults={"default": Fault("crash")})).code == 1


@pytest.mark.parametrize(
    ("linear", "large", "sqnr", "lost", "torchao", "outcome"),
    [
        (60, None, 25.0, None, "0.18.0", "accepted"),
        (60, None, 25.0, 0.1, "0.18.0", "accepted"),
        (60, 60, 15.0, 0.0, "0.18.0", "failed"),  # its products are too far from bfloat16's
        (60, 60, 25.0, 0.11, "0.18.0", "failed"),  # its casts make too many values 0
        (40, None, 25.0, 0.0, "0.18.0", None),
        (60, 40, 25.0, 0.0, "0.18.0", None),
        (60, 60, 25.0, 0.0, None, None),
    ],
)
def test_fp8_is_tried_on_compiled_linear_layers(
    linear: int, large: int | None, sqnr: float, lost: float | None, torchao: str | None, outcome: str | None
) -> None:
    def gain(spec: TrialSpec) -> float:
        return (1.5 if "compile" in spec.techniques else 1.0) * (1.3 if spec.precision == "fp8-tensorwise" else 1.0)

    products = {"linear": {"bf16": linear}, "attention": {"bf16": 100 - linear}}
    flops = StepFlops(products=products, large_linear_flops=large)
    environment = fake_environment(torchao=torchao)
    float8 = {"min_sqnr_db": sqnr, "max_underflow_share": lost}
    result = tune(made := engine(gain, environment=environment, flops=flops, float8=float8), "gpt2")
    found = outcomes(result)
    assert found.get("fp8-tensorwise", found.get("fp8-tensorwise + fp8-large-layers")) == outcome
    assert all("compile" in spec.techniques for spec in made.measured if spec.precision.startswith("fp8"))
    assert result.winner.precision == ("fp8-tensorwise" if outcome == "accepted" else "bf16-mixed")


def test_an_unsupported_change_comes_once() -> None:
    result = tune(engine(environment=fake_environment(None)), device="cpu", budget_seconds=1e6)
    assert sum("cuda-graph" in reason for reason in reasons(result)) == 1
    unsupported = [row["tried"] for row in result.rows if row["outcome"] == "unsupported"]
    assert len(unsupported) == len(set(unsupported))


def test_options_bound_what_is_tried() -> None:
    assert "pad-channels-4" not in outcomes(tune(engine()))
    assert outcomes(tune(engine(), numerics="shape"))["pad-channels-4"] == "accepted"
    assert {spec.precision for spec in tune(engine()).path} <= {"default", "bf16-mixed"}, "true precisions on demand"
    assert tune(engine(), precisions=("fp32", "fp16-true")).winner.precision == "fp16-true"
    assert tune(engine(), precisions=("tf32", "bf16-mixed")).start.precision == "tf32"
    assert tune(engine(), precisions=("default", "bf16-mixed")).start.precision == "default"
    assert "compile" not in allowed_techniques("rounding", fake_spec())
    tries_most = outcomes(tune(engine(), budget_seconds=1e6))
    assert tries_most.keys() - outcomes(tune(engine())).keys() == {"compile-max-autotune"}
    assert "resident-data" not in allowed_techniques("shape", fake_spec()), "steady steps have their data on the device"


def made_up_of_ranks(spec: TrialSpec) -> float:
    """Return the speed where ranks exchange gradients: large buckets gain by themselves only once graphs end there."""
    exchanged = {"bf16-all-reduce": 1.1, "ddp-buckets-100": 1.05 if "compile" in spec.techniques else 1.0}
    gains = {"compile": 1.4, "fsdp-keep-weights": 1.2, "coalesced-reduce": 0.9, "cuda-graph": 1.0, **exchanged}
    return math.prod(gains.get(name, 1.0) for name in spec.techniques)


@pytest.mark.parametrize(
    ("parallelism", "added"),
    [("ddp", ("compile", "ddp-buckets-100", "bf16-all-reduce")), ("fsdp", ("compile", "fsdp-keep-weights"))],
)
def test_several_gpus_are_searched_with_techniques_of_their_own(parallelism: str, added: tuple[str, ...]) -> None:
    made = engine(made_up_of_ranks, environment=fake_environment(num_gpus=4))
    found = tune(made, precisions=("bf16-mixed",), num_gpus=4, parallelism=parallelism)
    assert (found.winner.world_size, found.winner.parallelism, found.winner.techniques) == (4, parallelism, added)
    assert {spec.world_size for spec in made.measured} == {4}


def test_one_gpu_is_not_offered_what_several_have() -> None:
    names = {row.name for row in TECHNIQUES if row.only_on_several_gpus}
    assert not names & {name for tried in tune(engine()).tried for name in tried.change.techniques}


def test_no_script_is_written_for_several_gpus(run: Run, tmp_path: Path) -> None:
    done = run("resnet50", "--gpus", "4", "--emit", tmp_path / "train.py")
    assert done.code == 2
    assert "--emit patch" in done.err


def test_the_patch_for_several_gpus_names_the_wrapper(run: Run) -> None:
    made = engine(made_up_of_ranks, environment=fake_environment(num_gpus=4))
    out = run("resnet50", "--precision", "bf16-mixed", "--gpus", "4", "--emit", "patch", made=made).out
    assert "# add bucket_cap_mb=100 to your call of DistributedDataParallel" in out
    assert "model.register_comm_hook(None, bf16_compress_hook)" in out


def test_it_starts_from_pytorchs_default_and_says_both_ratios(tmp_path: Path) -> None:
    older = tune(engine(), results=tmp_path, precisions=("fp32", "tf32"))
    result = tune(made := engine(), results=tmp_path)
    assert (result.start.precision, older.start.precision) == ("default", "fp32")
    plain = [spec.precision for spec in made.measured if not spec.techniques]
    assert "fp32" not in plain, "an older search has measured it"
    assert {"fp32", "default"}.isdisjoint(each.change.precision for each in result.tried)
    last = next(row for row in result.rows if row["spec"] == result.winner)
    gain = made_up(result.winner) / 0.4  # over fp32, whose step takes 1 and the default's 0.7
    assert (last["total_speedup"], last["fp32_speedup"]) == pytest.approx((0.7 * gain, gain), rel=0.01)
    words = f"{last['total_speedup']:.2f}× PyTorch's default ({last['fp32_speedup']:.2f}× fp32)"
    assert words in conclusions(result)[0]
    assert words in measured_words(result, result.winner)
    (fp32,) = (line for line in conclusions(result) if line.startswith("fp32: "))
    assert "of the step is products" in fp32
    assert [row["tried"] for row in result.rows[:2]] == ["default", "fp32"]


def test_without_tf32_it_starts_from_fp32() -> None:
    result = tune(engine(environment=fake_environment((7, 0))))
    assert (result.start.precision, result.fp32) == ("fp32", None)
    assert "the plain fp32 loop's" in conclusions(result)[0]


def test_the_same_command_measures_nothing_again(tmp_path: Path) -> None:
    first = engine()
    before = tune(first, results=tmp_path)
    kept, problems = load_folder(tmp_path)
    assert not problems
    assert {trial.spec.key for trial in kept} == {trial.spec.key for trial in before.trials}
    assert (before.num_recorded, len(before.trials)) == (0, len(kept))
    second = engine()
    after = tune(second, results=tmp_path)
    assert second.measured == []
    assert after.num_recorded == len(after.trials) == len(kept)
    assert [each.outcome for each in after.tried] == [each.outcome for each in before.tried]
    again = tune(third := engine(), results=tmp_path, again=True)
    assert (again.winner, again.num_recorded) == (before.winner, 0)
    assert len(third.measured) == len(first.measured)


def test_an_interrupted_search_says_what_it_found_and_goes_on(tmp_path: Path) -> None:
    cut = tune(engine(faults={"#30": Fault("interrupt", "run_block")}), results=tmp_path)
    kept = load_folder(tmp_path)[0]
    assert cut.ending == "interrupted"
    assert {trial.spec.key for trial in cut.trials} == {trial.spec.key for trial in kept}
    assert "found before the interruption (" in conclusions(cut)[0]
    rest, whole = engine(), engine()
    assert tune(rest, results=tmp_path).winner == tune(whole).winner
    assert 0 < len(rest.measured) < len(whole.measured)
    assert len(rest.measured) + len(kept) >= len(whole.measured)


# The final session


def with_final(search: float = 1.0, final: float = 1.0) -> Gain:
    """Return gains of two techniques, one of them with a factor on top in the search and one in the final session."""

    def gain(spec: TrialSpec) -> float:
        lucky = (final if spec.repeat >= FIRST_FINAL_REPEAT else search) if "compile" in spec.techniques else 1.0
        gains = {"fused-optimizer": 1.5, "compile": lucky}
        return math.prod(gains.get(name, 1.0) for name in spec.techniques)

    return gain


def two_techniques(made: FakeEngine, seconds: float = 0.0, **request: object) -> TuningResult:
    asked = TuneOptions("resnet50", precisions=("fp32",), **request)  # type: ignore[arg-type]
    search = prepare_tuning(asked, find_machine=machine_with(made))
    space = replace(search.space, techniques=("fused-optimizer", "compile"))
    times = itertools.count(0.0, seconds)
    return replace(search, space=space, clock=lambda: next(times)).run()


def last_row(result: TuningResult) -> dict[str, Any]:
    return next(row for row in reversed(result.rows) if row["spec"] == result.winner)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_total_is_of_fresh_processes_of_start_winner_and_its_predecessor(device: str | None) -> None:
    """What looked twice as fast in the search is a tenth faster in the final session."""
    environment = fake_environment(None) if device else fake_environment()
    result = two_techniques(engine(with_final(search=2.0, final=1.1), environment=environment), device=device)
    row = last_row(result)
    assert set(result.winner.techniques) == {"fused-optimizer", "compile"}
    assert (row["total_speedup"], row["speedup"]) == pytest.approx((1.65, 1.1), rel=0.002)
    assert 1.64 < row["total_speedup_low"] <= row["total_speedup"] <= row["total_speedup_high"] < 1.66
    assert row["num_processes"] == 3
    assert conclusions(result)[0].endswith("proven: 1.65× to 1.65× in the final session.")
    final = [trial for trial in result.trials if trial.spec.repeat >= FIRST_FINAL_REPEAT]
    assert {trial.spec.techniques for trial in final} == {spec.techniques for spec in result.path}
    assert len({trial.session_id for trial in final}) == 3


@pytest.mark.parametrize(("final", "winner"), [(0.9, ("fused-optimizer",)), (0.5, ())])
def test_the_shorter_loop_is_handed_over_if_the_last_change_is_not_confirmed(
    tmp_path: Path, final: float, winner: tuple[str, ...]
) -> None:
    """With 0.5 the loop before was lucky, too."""

    def gain(spec: TrialSpec) -> float:
        is_final = spec.repeat >= FIRST_FINAL_REPEAT
        return 1.0 if is_final and final < 0.9 else with_final(search=1.2, final=final)(spec)

    result = two_techniques(engine(gain), results=tmp_path)
    assert result.winner.techniques == winner
    (compiled,) = [each for each in result.tried if "compile" in each.spec.techniques and each.stage == 1]
    assert (compiled.outcome, compiled.reason) == ("unproven", "not confirmed in the final session")
    assert ("proven: " in conclusions(result)[0]) is bool(winner)
    again = two_techniques(made := engine(gain), results=tmp_path)
    assert (made.measured, again.winner) == ([], result.winner), "the final session leads no later search elsewhere"


def test_a_winner_that_crashes_in_the_final_session_is_not_handed_over() -> None:
    def refuses(spec: TrialSpec) -> str | None:
        return "no (fake)" if "compile" in spec.techniques and spec.repeat >= FIRST_FINAL_REPEAT else None

    result = two_techniques(engine(with_final(2.0, 2.0), refuses=refuses))
    assert result.winner.techniques == ("fused-optimizer",)


def test_nothing_faster_has_no_final_session() -> None:
    result = two_techniques(engine(lambda spec: 0.5 if spec.techniques else 1.0))
    assert max(trial.spec.repeat for trial in result.trials) < FIRST_FINAL_REPEAT


def test_an_interrupted_final_session_is_said_and_goes_on(tmp_path: Path) -> None:
    whole = two_techniques(made := engine(with_final(2.0, 2.0)))
    number = len(made.sessions) - 1
    cut = two_techniques(
        engine(with_final(2.0, 2.0), faults={f"#{number}": Fault("interrupt", "run_block")}), results=tmp_path
    )
    assert (cut.ending, cut.winner) == ("interrupted", whole.winner)
    assert "not measured again" in conclusions(cut)[0]
    rest = two_techniques(more := engine(with_final(2.0, 2.0)), results=tmp_path)
    assert last_row(rest)["total_speedup_low"] is not None
    assert {spec.repeat >= FIRST_FINAL_REPEAT for spec in more.measured} == {True}


def test_a_longer_search_with_another_winner_has_a_final_session_of_its_own(tmp_path: Path) -> None:
    """The processes of the earlier one, in which compilation was the last change, do not count for its comparisons."""
    two_techniques(engine(with_final(2.0, 2.0)), results=tmp_path)
    gains = {"fused-optimizer": 1.5, "compile": 2.0, "cudnn-search": 1.1}
    made = engine(lambda spec: math.prod(gains.get(name, 1.0) for name in spec.techniques))
    search = prepare_tuning(TuneOptions("resnet50", precisions=("fp32",), results=tmp_path), None, machine_with(made))
    space = replace(search.space, techniques=("fused-optimizer", "compile", "cudnn-search"))
    result = replace(search, space=space).run()
    assert len(result.winner.techniques) == 3
    sessions = [{trial.session_id for trial in result.measured.final.of(spec)} for spec in result.final_specs]
    assert len(set.intersection(*sessions)) == 3
    assert len({trial.spec.key for trial in result.trials}) == len(result.trials), "no process took another's place"


def test_no_time_is_left_for_a_search_without_its_final_session() -> None:
    """A look at the clock takes 5 s, and so does each process: there is time for a candidate, and none for proof."""
    ample, scarce = (two_techniques(engine(with_final(2.0, 2.0)), 5.0, budget_seconds=s) for s in (1000.0, 25.0))
    assert last_row(ample)["total_speedup_low"] is not None
    assert (scarce.was_compared, scarce.ending) == (False, "budget")


@pytest.mark.parametrize("budget", [0.001, 60.0, 150.0])
def test_a_search_ends_within_its_budget(tmp_path: Path, budget: float) -> None:
    """A session takes five seconds, of which a share is predicted for each configuration."""
    result = tune(engine(), seconds=5.0, budget_seconds=budget, results=tmp_path)
    assert result.ending == "budget"
    not_tried = [each for each in result.tried if each.outcome == "not tried"]
    assert all(each.ratio is None for each in not_tried)
    until = "before the budget ended" if result.was_compared else "No change was compared with the plain loop"
    assert f"{until} ({len(not_tried)} changes were not tried)" in conclusions(result)[0]
    more = tune(made := engine(), results=tmp_path, budget_seconds=1e6)
    assert (more.ending, more.winner.techniques) == ("nothing left", FASTEST)
    assert len(made.measured) == len(more.trials) - more.num_recorded > 0


def test_a_short_budget_is_for_the_plain_loop_alone_and_a_deadline_for_each_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules: list[StopRule] = []

    class Noting(Rounds):
        def __init__(self, runner: Any, specs: Any, rule: StopRule, *others: Any) -> None:
            rules.append(rule)
            super().__init__(runner, specs, rule, *others)

    monkeypatch.setattr(search, "Rounds", Noting)
    result = tune(engine(), seconds=5.0, budget_seconds=12.0)
    assert ([trial.spec for trial in result.trials], result.ending) == ([result.start], "budget")
    tune(engine(), seconds=5.0, budget_seconds=300.0)
    assert len(rules) > 2
    assert all(rule.budget_seconds is not None and rule.budget_seconds <= 300.0 for rule in rules)


def graph_pays(spec: TrialSpec) -> float:
    return 1.5 if "cuda-graph" in spec.techniques else 1.0


def small_batch(made: FakeEngine, limit: float, **request: object) -> TuningResult:
    """Search over one technique, which pays, within a limit; a loop holds 1.5 GiB at batch 128, 2.5 at 256."""
    made.fixed_bytes = 2**29
    asked = TuneOptions("resnet50", precisions=("fp32",), memory_bytes=limit, **request)  # type: ignore[arg-type]
    search = prepare_tuning(asked, find_machine=machine_with(made))
    return replace(search, space=replace(search.space, techniques=("cuda-graph",))).run()


def test_within_a_limit_the_winner_has_a_smaller_batch(tmp_path: Path) -> None:
    limit = 2 * GIB
    result = small_batch(made := engine(graph_pays), limit, results=tmp_path)
    within = result.fastest_within_memory()
    assert within is not None
    assert (within["techniques"], within["batch_size"], within["outcome"]) == ("cuda-graph", 184, "accepted")
    assert within["tried"] == "batch 184 (within the limit)"
    assert within["throughput_per_second"] == pytest.approx(1.5 * 184 / 0.0194, rel=0.01)
    assert within["total_speedup"] == pytest.approx(1.5 * (184 / 0.0194) / (256 / 0.0266), rel=0.01), (
        "by units per second"
    )
    assert result.fastest_within_memory(256) is None
    assert {spec.batch_size for spec in result.path} == {256}
    small_batch(again := engine(graph_pays), limit, results=tmp_path)
    assert again.measured == []
    tighter = small_batch(again, 1.8 * GIB, results=tmp_path)
    assert {spec.batch_size for spec in again.measured} == {160, 256}
    assert tighter.chosen is not None
    assert len(made.measured) > 3


def test_a_smaller_batch_that_fails_is_a_result() -> None:
    limit = 2 * GIB
    key = next(
        trial.spec.key for trial in small_batch(engine(graph_pays), limit).trials if trial.spec.batch_size == 184
    )
    result = small_batch(engine(graph_pays, faults={key: Fault("crash")}), limit)
    assert {each.spec.batch_size: each.outcome for each in result.tried if each.limited}[184] == "failed"
    within = result.fastest_within_memory()
    assert within is not None
    assert 128 < within["batch_size"] < 184


@pytest.mark.parametrize("rejected", ["inexact", "crashed"])
def test_what_the_search_rejected_is_not_recommended(rejected: str) -> None:
    """A loop in FP8 is the fastest, and it alone fits: but its products are wrong, or its second process crashed."""
    sqnr = 5.0 if rejected == "inexact" else 25.0
    float8 = Float8Facts(recipe="tensorwise", num_converted=1, left={}, min_sqnr_db=sqnr)
    plain = fake_trial(fake_spec("bf16-mixed"), step_seconds=(0.1,) * 6, peak_bytes=2**30)
    spec = fake_spec("fp8-tensorwise", techniques=("compile",))
    fp8 = fake_trial(spec, step_seconds=(0.05,) * 6, peak_bytes=2**20, facts=fake_facts(float8=float8))
    crashed = fake_trial(spec.model_copy(update={"repeat": 1}), status="crashed", step_seconds=())
    trials = (plain, fp8) if rejected == "inexact" else (plain, fp8, crashed)
    tried = TriedChange(0, change_between(plain.spec, spec), plain.spec, spec, None, "failed")
    for limit, taken in ((None, plain.spec), (2**30, plain.spec), (2**29, None)):
        result = TuningResult(plain.spec, (tried,), trials, "nothing left", 1.0, memory_bytes=limit)
        assert result.chosen == result.simplest == taken
        assert limit is None or "fp8" not in "".join(conclusions(result))


def test_epochs_are_tuned_with_the_reading_of_their_data() -> None:
    result = tune(engine(load_seconds=0.001), "mnist-cnn", data_set="synthetic:mnist")
    assert {trial.spec.kind for trial in result.trials} == {"training"}
    assert result.start.recipe is not None
    assert result.start.recipe.loader.num_workers == 2, "as the source reads it"
    assert "resident-data" in result.winner.techniques
    assert all(len(trial.ranks[0].epochs) >= 4 for trial in result.trials if trial.status == "ok")
    made = engine(load_seconds=0.001, faults={"resident-data": Fault("oom")})
    other = tune(made, "mnist-cnn", data_set="synthetic:mnist", precisions=("fp32",))
    assert "loader-workers" in other.winner.techniques, "if the data does not fit on the device"


def test_a_faster_loop_that_is_not_proven_within_the_budget_is_named() -> None:
    found = tune(engine(), precisions=("fp32", "tf32"))
    unproven = tuple(replace(each, outcome="unproven") for each in found.tried if each.outcome == "accepted")
    done, stopped = (replace(found, tried=unproven, ending=ending) for ending in ("nothing left", "budget"))
    assert len(conclusions(stopped)) == len(conclusions(done)) + 1


# The command


def test_every_format_names_the_fastest_within_the_limit(run: Run) -> None:
    def output(form: str) -> str:
        options = ("--memory", "1.5GiB", "--precision", "fp32", "--format", form)
        done = run("resnet50", *options, made=engine(graph_pays))
        assert done.code == 0
        return done.out

    document = json.loads(output("json"))
    assert document["memory_limit_bytes"] == 1.5 * 2**30
    assert (document["fastest"]["batch_size"], document["fastest_within_memory"]["batch_size"]) == (256, 184)
    assert document["fastest_within_memory_on_this_batch"] is None
    (row,) = [row for row in document["rows"] if row["batch_size"] == 184]
    assert row["peak_reserved_bytes"] <= 1.5 * 2**30 < document["rows"][0]["peak_reserved_bytes"]
    assert (document["ending"], document["num_recorded"], row["outcome"]) == ("nothing left", 0, "accepted")
    assert document["trials"]
    for form in ("table", "markdown", "csv"):
        assert row["tried"] in output(form)


def test_the_table_has_the_accepted_changes_and_lines_count_the_others(run: Run) -> None:
    done = run("resnet50")
    result = tune(engine())
    lines = [line.rstrip() for line in done.out.splitlines()]
    table = lines[1 : next(number for number, line in enumerate(lines) if line.startswith("Fake GPU, torch"))]
    names = [row["tried"] for row in result.rows if row["outcome"] in (None, "accepted")]
    assert [line.partition("  ")[0] for line in table[1:]] == names
    assert all(len(line) <= 80 for line in table)
    assert {"×", "default", "fp32", "before"} <= set(table[0].split())
    assert lines[len(table) + 2 :][-1].endswith("Next: the same command with --emit train.py")
    for outcome in ("slower", "unsupported"):
        names = [name for name, each in outcomes(result).items() if each == outcome]
        assert sum(line.startswith(f"{outcome}: ") for line in lines) == 1
    everything = run("resnet50", "--wide")
    assert all(row["tried"] in everything.out for row in result.rows)


def test_changes_that_may_be_faster_are_named_up_to_five() -> None:
    result = tune(engine())
    unproven = replace(result, tried=tuple(replace(each, outcome="unproven") for each in result.tried))
    last = {row["tried"]: row["speedup"] for row in unproven.rows if row["outcome"] == "unproven"}
    faster = {name for name, speedup in last.items() if speedup is None or speedup > 1}
    text = present(unproven).text("markdown")
    *found, counted = [line for line in text.splitlines() if line.startswith("- unproven: ")]
    assert len(found) == 5
    assert all(any(f"unproven: {name}" in line for name in faster) for line in found)
    assert f"- second best or unproven: {len(faster) - 5} more with --verbose" in text
    assert f"unproven: {len(last) - len(faster)} change" in counted, (
        "those that measured slower are not said to be more"
    )


def test_no_sentence_calls_a_loop_the_fastest_that_was_not_proven() -> None:
    found = tune(engine(), precisions=("fp32", "tf32"))
    none = replace(found, tried=tuple(replace(each, outcome="unproven") for each in found.tried))
    assert conclusions(none)[0].startswith("No change was proven faster. Keep the plain loop: fp32")
    assert conclusions(found)[0].startswith("The fastest loop: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("resnet50", "--memory", "much"), "--memory takes an amount of memory of 1 MiB or more"),
        (("resnet50", "--precision", "fp31"), "No precision named 'fp31'"),
        (("resnet50", "--emit", "nowhere/train.py"), "no folder 'nowhere'"),
        (("resnet152", "--training"), "No suite trains resnet152"),
        (("resnet50", "--data-set", "synthetic:mnist"), "No suite trains resnet50"),
    ],
)
def test_bad_input_is_one_line_and_no_trial(run: Run, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert words in done.err
    assert len(done.error_lines) == 1
    assert done.engine.measured == []


def test_tune_alone_takes_a_short_job(run: Run) -> None:
    done = run("--precision", "fp32")
    assert done.code == 0, done.err
    assert {spec.workload for spec in done.engine.measured} == {"mnist-cnn"}


def test_the_script_of_a_user_model_imports_their_file(run: Run, tmp_path: Path) -> None:
    own, file = tmp_path / "mine.py", tmp_path / "train.py"
    own.write_text("")  # which the fake engine does not run
    done = run(f"{own}:build", "--emit", file)
    assert done.code == 0, done.err
    text = file.read_text()
    assert str(tmp_path) not in text
    assert "from mine import build" in text
    compile(text, "train.py", "exec")


def test_a_script_is_written_over_castwise_s_own_alone(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("mine")
    done = run("resnet50", "--precision", "fp32", "--emit", file)
    assert (done.code, file.read_text(), done.engine.measured) == (2, "mine", [])
    assert done.error_lines == [f"castwise: '{file}' exists already, and is left as it is. Name another file."]
    file.unlink()
    assert [run("resnet50", "--precision", "fp32", "--emit", file).code for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(("limit", "code"), [("1.5GiB", 0), ("1MiB", 1)])
def test_the_script_is_that_of_the_loop_that_fits(run: Run, tmp_path: Path, limit: str, code: int) -> None:
    file = tmp_path / "train.py"
    done = run("resnet50", "--memory", limit, "--precision", "fp32", "--emit", file, made=engine(graph_pays))
    assert done.code == code
    assert file.exists() == (code == 0)
    if code == 0:
        text = file.read_text()
        assert 'BATCH_SIZE = torch.device("cuda:0"), 184' in text
        assert "Measured by castwise" in text
        compile(text, "train.py", "exec")


def test_the_patch_says_what_to_change_and_what_it_bought(run: Run) -> None:
    done = run("resnet50", "--emit", "patch")
    assert done.code == 0, done.err
    compile(done.out, "patch", "exec")
    heading, _, changes = done.out.partition("\n")
    assert re.fullmatch(
        r"# resnet50: bf16-mixed, channels-last.*: [\d,.]+ images/s, [\d.]+× PyTorch's default.*; \d+ trials in .*\.",
        heading,
    )
    assert 'castwise.apply(model, optimizer, precision="bf16-mixed", techniques="channels-last' in done.out
    assert "channels-last: 1.60×" in done.out
    assert "# castwise tune resnet50 --emit train.py writes this loop, with " in done.out
    assert "cuda-graph" in done.out
    assert "× before" not in done.out, "the table"
    table = run("resnet50")
    patch, _, ending = table.out.partition("What to change in your loop:\n")[2].rpartition("\n\n")
    assert [line.strip() for line in patch.splitlines()] == [line.strip() for line in changes.splitlines()]
    assert "Next: " in ending


def test_the_patch_of_a_script_names_its_own_call(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nFake([], lr=0.1, momentum=0.9)\n")
    result = tune(engine(), f"python {script}")
    fused = Change(techniques=("fused-optimizer",)).on(result.start)
    assert "# add fused=True to your call of Fake at train.py:2" in patch(result, fused)


def test_a_patch_without_a_faster_loop_says_so(run: Run) -> None:
    slow = engine(lambda spec: 0.5 if spec.techniques or spec.precision != "fp32" else 1.0)
    done = run("resnet50", "--emit", "patch", "--precision", "fp32", made=slow)
    assert done.out.startswith("# resnet50: keep your loop (fp32). Nothing was proven faster; ")


def test_the_simplest_loop_is_named_and_emitted(run: Run, tmp_path: Path) -> None:
    gains = {"compile": 1.1, "cuda-graph": 1.1, "fused-optimizer": 1.5}
    made = engine(lambda spec: math.prod(gains.get(name, 1.0) for name in spec.techniques))
    result = tune(made, precisions=("fp32",))
    assert {*gains} <= {*result.winner.techniques}
    found = result.simplest
    assert found is not None
    assert found.techniques == ("fused-optimizer",)
    assert any(
        line.startswith("The simplest loop within 25% of it: fp32, fused-optimizer") for line in conclusions(result)
    )
    file = tmp_path / "train.py"
    done = run("resnet50", "--precision", "fp32", "--emit", file, "--simple", made=made)
    assert done.code == 0, done.err
    assert file.read_text().startswith('"""resnet50, fp32, fused-optimizer: batch')


def test_there_is_no_script_if_nothing_was_compared(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    done = run("resnet50", "--budget", "0.001s", "--emit", file, "--format", "json")
    assert (done.code, file.exists()) == (1, False)
    document = json.loads(done.out)
    assert document["fastest"] is None
    assert "No change was compared with the plain loop" in document["sentences"][0]
    assert "is not written: nothing was compared" in done.err


def test_there_is_no_script_of_the_plain_loop(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    slow = engine(lambda spec: 0.5 if spec.techniques else 1.0)
    done = run("resnet50", "--precision", "fp32", "--emit", file, made=slow)
    assert (done.code, file.exists()) == (0, False)
    assert f"{file} is not written: the fastest loop is the plain one. Keep yours." in done.err


@pytest.mark.parametrize("number", [3, 30])
def test_an_interrupt_keeps_what_was_measured(run: Run, tmp_path: Path, number: int) -> None:
    """The third session's process is of the first measurements, without which there is nothing to say."""
    file = tmp_path / "train.py"
    done = run("resnet50", "--emit", file, made=engine(faults={f"#{number}": Fault("interrupt", "run_block")}))
    assert (done.code, file.exists()) == (130, False)
    assert ("it was interrupted" in done.out) is ("the same command goes on" in done.err) is (number == 30)
    assert ("Interrupted before anything was measured." in done.err) is (number == 3)
    assert "Interrupted" in done.err


@pytest.mark.parametrize("workload", ["fastai-resnet18", "mine.py:build", "transformers:bert"])
def test_what_has_no_script_is_refused_before_a_trial(run: Run, tmp_path: Path, workload: str) -> None:
    done = run(workload, "--emit", tmp_path / "train.py")
    assert done.code == 2
    assert done.engine.sessions == []
