"""`castwise accuracy` on the fake engine: pairs, verdicts, the stop rule, resuming, bad input and what is printed."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import CommandLine, Outcome
from fake_engine import FakeEngine, Fault, fake_environment, fake_epoch, fake_run, fake_spec, fake_training
from fake_records import steady

import castwise
from castwise.accuracy import search
from castwise.accuracy.advice import with_accuracy
from castwise.accuracy.render import sentences, verdict_text
from castwise.accuracy.result import AccuracyResult, runs_of
from castwise.analysis.decide import decide
from castwise.analysis.result_table import rows_of_runs, rows_of_steps
from castwise.orchestrator.runner import NullListener
from castwise.records.schema import Trial
from castwise.show.training_table import flat_row
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel, UserWorkload, locate


@pytest.fixture(autouse=True)
def _data_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "provide", lambda *_: None)


def learning(spread: float = 0.0005, **shifts: float) -> Callable[[TrialSpec], float]:
    """Return how a seed and a precision change a score: a shift, and a spread of their own."""

    def learns(spec: TrialSpec) -> float:
        draw = random.Random(f"{spec.seed} {spec.precision}")
        shared = random.Random(spec.seed).gauss(0, 0.01)
        return shared + draw.gauss(shifts.get(spec.precision.replace("-", "_"), 0.0), spread)

    return learns


def asked(command: CommandLine, *arguments: str, engine: FakeEngine | None = None) -> Outcome:
    engine = engine or FakeEngine(learns=learning())
    return command("accuracy", "mnist-cnn", *arguments, "--results", command.results, engine=engine)


_STATES = ("--suite", "fast-wikitext2", "--precision", "fp32,bf16-sr", "--optimizer-state", "fp32,8-bit")


def kinds(done: Outcome) -> dict[str, str]:
    assert done.code == 0, done.err
    return {row["precision"]: row["verdict"] for row in json.loads(done.out)["precisions"]}


def test_each_precision_has_a_verdict_and_stops_with_it(command: CommandLine) -> None:
    shifts = {"fp16_mixed": -0.02, "tf32": 0.02}
    engine = FakeEngine(learns=learning(**shifts), faults={"bf16-true": Fault("nan")})
    precisions = ("--precision", "bf16-mixed,fp32,fp16-mixed,tf32,bf16-true")
    done = asked(command, *precisions, "--format", "json", engine=engine)
    found = kinds(done)
    assert found == {
        "fp32": "baseline",
        "tf32": "better",
        "bf16-mixed": "as good",
        "fp16-mixed": "worse",
        "bf16-true": "diverged 5 of 5",
    }
    assert Counter(spec.precision for spec in engine.measured) == dict.fromkeys(found, 5), "5 pairs decide all of them"
    line = f"castwise why mnist-cnn --precision fp16-mixed,bf16-true --results {command.results} --numerics"
    lost = f"`{line}` shows in which layers numbers are lost."
    assert lost in json.loads(done.out)["sentences"]
    words = " ".join(json.loads(done.out)["sentences"])
    assert (
        "wrong in at most 5 % of cases (one or more of seven in up to 21 %), in up to 14 % if differences are" in words
    )
    assert "5 pairs cannot rule out that up to 45 % of runs collapse." in words, "0.55 ** 5 is 0.05"
    alone = asked(command, "--precision", "fp32,bf16-true", engine=engine)
    assert "is wrong in" not in alone.out, "that no pair has a score is certain"


def test_an_undecided_precision_gets_more_seeds(command: CommandLine) -> None:
    engine = FakeEngine(learns=learning(0.003))
    done = asked(command, "--precision", "fp32,bf16-mixed,tf32", "--seeds", "30", "--format", "json", engine=engine)
    counts = Counter(spec.precision for spec in engine.measured)
    assert max(counts.values()) > 5
    assert counts["fp32"] == max(counts.values()), "as many as the precision that needs most"
    assert set(kinds(done).values()) <= {"baseline", "as good", "not enough runs"}


def test_pairs_share_their_seed_and_differ_in_precision_alone(command: CommandLine) -> None:
    engine = FakeEngine(learns=learning())
    asked(command, "--precision", "fp32,fp16-mixed", engine=engine)
    pairs: dict[int, list[TrialSpec]] = {}
    for spec in engine.measured:
        pairs.setdefault(spec.seed, []).append(spec)
    assert sorted(pairs) == list(range(5))
    assert {each.comparison for each in pairs[0]} == {pairs[0][0].comparison}
    orders = [[spec.precision for spec in pair] for pair in pairs.values()]
    assert orders[0] == orders[1][::-1], "they take turns"
    assert all(spec.recipe is not None and spec.recipe.validate_each_epoch for spec in engine.measured)
    assert {spec.data_set for spec in engine.measured} == {"mnist"}


def test_the_same_command_goes_on_from_records_and_measures_nothing_twice(command: CommandLine) -> None:
    first = asked(command, "--precision", "fp32,bf16-mixed")
    again = asked(command, "--precision", "fp32,bf16-mixed")
    assert len(first.engine.measured) == 10
    assert again.engine.measured == []
    assert [line for line in again.out.splitlines() if "is as good as" in line] == [
        line for line in first.out.splitlines() if "is as good as" in line
    ]
    assert "10 trials, all of them on record already" in again.out


def test_the_headline_says_that_runs_were_cut_short(command: CommandLine) -> None:
    done = asked(
        command, "--suite", "fast-mnist", "--epochs", "2", "--max-steps", "20", "--precision", "fp32,bf16-mixed"
    )
    assert "2 of 14 epochs of 20 steps" in done.out.splitlines()[0]


def test_the_answer_says_by_how_much_and_how_fast_in_80_columns(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castwise.show.console._PIPED_WIDTH", 80)
    done = asked(command, "--precision", "fp32,bf16-mixed,fp16-mixed")
    assert "bf16-mixed is as good as fp32: " in done.out
    assert "over 5 pairs of runs, usual margin 0.3 points." in done.out
    assert "It reaches fp32's accuracy 2.5" in done.out, "its steps are 2.5 times as fast, and as many are needed"
    table = done.out.splitlines()[:5]
    assert max(map(len, table)) <= 80
    assert "left out" not in done.out
    for kind in ("markdown", "csv"):
        assert "as good" in asked(command, "--precision", "fp32,bf16-mixed", "--format", kind).out


def test_scores_that_never_differ_prove_nothing(command: CommandLine) -> None:
    words = "Every run has the same score, whatever its seed"
    for epochs, learns in (("1", lambda _: 0.5), ("2", learning())):
        engine = FakeEngine(learns=learns)
        done = asked(command, "--precision", "fp32,bf16-mixed", "--epochs", epochs, engine=engine)
        assert (words in done.out) is (epochs == "1")


def test_optimizer_states_are_judged_beside_fp32_with_plain_state(command: CommandLine) -> None:
    def learns(spec: TrialSpec) -> float:
        is_worse = spec.precision == "bf16-sr" and spec.techniques
        return learning(0.0005)(spec) - 0.02 * bool(is_worse)

    engine = FakeEngine(fake_environment(torchao="0.18.0"), learns=learns)
    kept = ("--results", command.results)
    done = command("accuracy", "lstm-lm", *_STATES, *kept, "--format", "json", engine=engine)
    found = {(row["precision"], row["techniques"]): row["verdict"] for row in json.loads(done.out)["precisions"]}
    assert found == {
        ("fp32", "none"): "baseline",
        ("fp32", "adam-state-8-bit"): "as good",
        ("bf16-sr", "none"): "as good",
        ("bf16-sr", "adam-state-8-bit"): "worse",
    }
    for ending in ("table", "markdown"):
        words = " ".join(command("accuracy", "lstm-lm", *_STATES, *kept, "--format", ending, engine=engine).out.split())
        assert "bf16-sr with adam-state-8-bit is worse than fp32: " in words
    assert "fp32 with adam-state-8-bit | 5" in words
    page = command.results.parent / "page.html"
    assert command("report", command.results, "-o", page).code == 0
    assert "fp32 with adam-state-8-bit as good" in page.read_text()
    alone = command(
        "accuracy", "lstm-lm", *_STATES[:3], "fp32", *_STATES[4:5], "8-bit", *kept, "--format", "json", engine=engine
    )
    assert [row["verdict"] for row in json.loads(alone.out)["precisions"]] == ["baseline", "as good"]
    assert len(engine.measured) == 20, "the baseline has the plain state, whether it is named or not"


def test_sums_in_float16_are_judged_beside_fp32_without_them(command: CommandLine) -> None:
    done = asked(command, "--precision", "fp32,fp16-mixed", "--techniques", "fp16-accumulation", "--format", "json")
    assert kinds(done) == {"fp32": "baseline", "fp16-mixed": "as good"}
    assert [row["techniques"] for row in json.loads(done.out)["precisions"]] == ["none", "fp16-accumulation"]


def test_perplexity_is_judged_in_per_cent(command: CommandLine) -> None:
    engine = FakeEngine(learns=learning(0.002, bf16_mixed=-0.1))
    arguments = ("accuracy", "lstm-lm", "--precision", "fp32,tf32,bf16-mixed", "--format", "json")
    done = command(*arguments, "--results", command.results, engine=engine)
    assert kinds(done) == {"fp32": "baseline", "tf32": "as good", "bf16-mixed": "worse"}
    rows = {row["precision"]: row for row in json.loads(done.out)["precisions"]}
    assert rows["bf16-mixed"]["difference"] == pytest.approx(-0.105, abs=0.005), "1 - exp(0.1)"
    assert "points" not in done.out
    engine = FakeEngine(learns=learning(0.002, bf16_mixed=-800.0))
    done = command(*arguments[:-2], "--again", "--results", command.results, engine=engine)
    assert "bf16-mixed is worse than fp32: <−1000 [<−1000, <−1000] %" in " ".join(done.out.split())


def test_a_run_that_crashes_ends_its_precision_alone(command: CommandLine) -> None:
    engine = FakeEngine(learns=learning(), faults={"fp16-mixed": Fault("oom")})
    done = asked(command, "--precision", "fp32,fp16-mixed,bf16-mixed", engine=engine)
    assert done.code == 1
    assert "fp16-mixed gave no score: CUDA out of memory" in done.out
    assert "bf16-mixed is as good as fp32" in done.out
    assert sum(spec.precision == "fp16-mixed" for spec in engine.measured) == 1


def test_without_the_baseline_nothing_is_compared(command: CommandLine) -> None:
    engine = FakeEngine(faults={"fp32": Fault("oom")})
    done = asked(command, "--precision", "fp32,bf16-mixed", engine=engine)
    assert done.code == 1
    assert "fp32, the baseline, gave no score" in done.out
    assert len(engine.measured) == 2
    engine = FakeEngine(faults={"fp32": Fault("nan"), "bf16-mixed": Fault("nan")})
    done = asked(command, "--precision", "fp32,bf16-mixed", "--again", engine=engine)
    assert "fp32, the baseline, diverged in every run" in done.out
    assert "cannot be compared" not in done.out, "the line above says so already"
    assert done.out.count("diverged 2 of 2") == 1
    assert done.code == 1
    assert len(engine.measured) == 4
    assert "as good" not in done.out


def test_too_few_seeds_say_how_many_would_do(command: CommandLine) -> None:
    done = asked(command, "--precision", "fp32,bf16-mixed", "--seeds", "2", engine=FakeEngine(learns=learning(0.002)))
    assert "bf16-mixed is undecided compared with fp32" in done.out
    assert "would do: --seeds " in done.out


def test_a_budget_ends_between_seeds_and_one_that_is_too_short_is_refused(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=5)
    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    done = asked(command, "--precision", "fp32,bf16-mixed", "--budget", "45s")
    assert "The budget ended." in done.out
    assert 2 < len(done.engine.measured) < 10
    clock = itertools.count(step=50)
    done = asked(command, "--precision", "fp32,tf32", "--budget", "40s", "--again")
    assert (done.code, done.engine.measured) == (2, []), "before data are looked for"
    assert "A budget of 40 s is too short: getting ready took 50 s" in done.error_lines[-1]
    clock = itertools.count(step=5)
    asked(command, "--precision", "fp32,fp16-mixed")
    for path in command.results.rglob("*fp*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "duration_seconds": 1000.0}))
    done = asked(command, "--precision", "fp32,fp16-mixed", "--budget", "100s")
    assert (done.code, done.engine.measured) == (0, []), "what is on record takes no time"
    done = asked(command, "--precision", "fp32,tf32", "--budget", "100s")
    assert "two runs of each of 2 precisions take about 20" in done.err
    for path in command.results.rglob("*fp*.json"):  # the second precision is slow, and not yet trained with seed 1
        record = json.loads(path.read_text())
        if record["spec"]["precision"] == "fp32":
            path.write_text(json.dumps({**record, "duration_seconds": 1.0}))
        elif record["spec"]["seed"] == 1:
            path.unlink()
    done = asked(command, "--precision", "fp32,fp16-mixed", "--budget", "100s")
    assert "two runs of each of 2 precisions take about 10" in done.err
    assert not done.engine.measured


@pytest.mark.parametrize(("budget", "is_refused"), [("5min", True), ("2h", False)])
def test_a_budget_that_not_even_one_precision_fits_into_is_refused_during_its_first_run(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch, budget: str, is_refused: bool
) -> None:
    clock = itertools.count(step=60)  # a minute for half an epoch, and 20 epochs
    monkeypatch.setattr(search, "monotonic", lambda: next(clock))
    done = asked(command, "--precision", "fp32,bf16-mixed", "--seeds", "2", "--budget", budget)
    assert (done.code == 2) == is_refused
    if is_refused:
        assert len(done.engine.measured) == 1
        assert done.engine.num_open == 0
        assert "A budget of 5 min 00 s is too short: one run of fp32 takes about" in done.error_lines[-1]


def test_first_steps_that_compile_do_not_tell_what_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, checked = [0.0], list[float]()
    monkeypatch.setattr(search, "monotonic", lambda: now[0])
    run = search._WatchedRun(NullListener(), lambda spec, run_seconds, left: checked.append(run_seconds))
    run.started(fake_spec(), 1, 1)
    steps = [(0.0, 0), (12.0, 1), (12.0, 2), (12.0, 3), *((1.0, 3 + 50 * each) for each in range(1, 20))]
    for seconds, done in steps:  # of 3,000 steps: the first three compile, then 50 take a second
        now[0] += seconds
        run.phase("epoch 1 of 2", done / 3000)
    assert checked
    assert max(checked) == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("resnet50",), "No suite trains 'resnet50' on real data"),
        (("mnist-cnn", "--margin", "0"), "--margin takes a share"),
        (("mnist-cnn", "--seeds", "1"), "1 seed tells nothing about the spread"),
        (("mnist-cnn", "--precision", "fp32"), "Name at least two precisions"),
        (("mnist-cnn", "--precision", "fp32,bf17"), "bf17"),
        (("mnist-cnn", "--data-set", "cifar10"), "'mnist-cnn' is trained on mnist, not on 'cifar10'"),
        (("mnist-cnn", "--techniques", "none,tuned"), "--techniques is one loop here"),
        (("mnist-cnn", "--precision", "fp32,fp16-mixed", "--loss-scale", "x"), "'x' is no loss scale"),
        (("mnist-cnn", "--precision", "fp32,bf16-mixed", "--loss-scale", "x"), "'x' is no loss scale"),
        (("mnist-cnn", "--device", "gpu"), "No device 'gpu'"),
        (("mnist-cnn", "--precision", "fp32", "--optimizer-state", "fp32"), "Name at least two precisions"),
        (("mnist-cnn", "--precision", "fp32", "--optimizer-state", "3-bit"), "No optimizer state named '3-bit'"),
        (("lstm-lm", *_STATES), "adam-state-8-bit needs torchao 0.18: pip install 'castwise[fp8]'."),
        (("mnist-cnn", "--optimizer-state", "8-bit"), "adam-state-8-bit fits Adam, AdamW; torch has no such Adadelta"),
    ],
)
def test_bad_input_is_one_line(command: CommandLine, arguments: tuple[str, ...], words: str) -> None:
    done = command("accuracy", *arguments)
    assert done.code == 2
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not done.engine.measured


def test_a_users_own_model_needs_a_training_set_and_validate(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text("def build():\n    return 1\n")
    arguments = ("accuracy", f"{file}:build", "--precision", "fp32,bf16-mixed", "--epochs", "3")
    done = command(*arguments)
    assert (done.code, len(done.error_lines)) == (2, 1)
    assert "does not return both training_set and validate" in done.err
    done = command(*arguments, "--suite", "fast-mnist")
    assert (done.code, len(done.error_lines)) == (2, 1)
    assert "--suite is for workloads of castwise" in done.err
    own = UserWorkload(model=locate(f"{file}:build"), batch_size=16, can_be_judged=True)
    monkeypatch.setattr(search, "inspect_user_model", lambda *_: own)
    done = command(*arguments, "--results", command.results, engine=FakeEngine(learns=learning()))
    assert "own.py:build on its training set, 3 epochs" in done.out
    assert "bf16-mixed is as good as fp32" in done.out
    assert {spec.user_model for spec in done.engine.measured} == {own.model}
    worse = FakeEngine(learns=learning(bf16_mixed=-0.02))
    done = command(*arguments, "--results", command.results, "--again", engine=worse)
    line = f"castwise why {file}:build --precision bf16-mixed --results {command.results} --numerics"
    assert line in " ".join(done.out.split())


def test_a_users_score_is_judged_by_a_share_of_the_baselines() -> None:
    runs = []
    for precision, gap in (("fp32", 0.0), ("bf16-mixed", 0.02), ("bf16-true", 0.5)):
        for seed in range(5):
            spec = fake_training(precision, {"epochs": 1, "validate_each_epoch": True}, seed=seed)
            epoch = fake_epoch(spec).model_copy(update={"score": 20.0 + seed + gap + 0.001 * (seed % 2)})
            runs.append(fake_run(spec, epoch))
    later = fake_training("fp32", {"epochs": 1, "validate_each_epoch": True}, seed=5)
    runs.append(fake_run(later, fake_epoch(later).model_copy(update={"score": 2000.0})))
    (baseline, mixed, narrow) = runs_of(runs, None, None, 5)  # lower is better: no facts say otherwise
    assert (baseline.metric.name, baseline.metric.baseline) == ("score", pytest.approx(22.0004))
    assert mixed.verdict is not None
    assert narrow.verdict is not None
    assert (mixed.verdict.kind, narrow.verdict.kind) == ("as good", "worse"), "the margin is 1 % of 22"
    assert [flat_row(run)["final_score"] for run in rows_of_runs(runs[:2])] == [20.0, 21.001]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, "bf16-mixed diverged in 2 of 8 runs. fp32 did in 1. That may be chance: more --seeds tell."),
        (8, "bf16-mixed diverged in 8 of 8 runs. fp32 did in 1."),
    ],
)
def test_the_baselines_own_divergence_is_told(count: int, words: str) -> None:
    runs = []
    for precision, seed in itertools.product(("fp32", "bf16-mixed"), range(8)):
        spec = fake_training(precision, {"epochs": 1, "validate_each_epoch": True}, seed=seed)
        ended = {"score": 20.0 + seed, "num_steps": 24}
        status = "diverged" if seed < (1 if precision == "fp32" else count) else "ok"
        run = fake_run(spec, fake_epoch(spec).model_copy(update=ended)).model_copy(update={"status": status})
        runs.append(run)
    assert sentences(AccuracyResult(runs_of(runs, None, None)))[0] == words


def test_two_runs_that_both_diverged_are_less_accurate_though_too_few_for_a_verdict() -> None:
    runs = []
    for precision, seed in itertools.product(("fp32", "bf16-mixed"), range(2)):
        spec = fake_training(precision, {"epochs": 1, "validate_each_epoch": True}, seed=seed)
        status = "diverged" if precision == "bf16-mixed" else "ok"
        runs.append(fake_run(spec, fake_epoch(spec)).model_copy(update={"status": status}))
    (_, found) = runs_of(runs, None, None)
    assert (verdict_text(found), found.is_less_accurate) == ("diverged 2 of 2", True)


def test_near_zero_the_margin_is_a_share_of_the_spread_between_seeds() -> None:
    runs = []
    for precision, seed in itertools.product(("fp32", "bf16-mixed"), range(5)):
        spec = fake_training(precision, {"epochs": 1, "validate_each_epoch": True}, seed=seed)
        score = {"score": 2.0 * (seed - 2) + (0.001 if precision == "fp32" else 0.0)}
        runs.append(fake_run(spec, fake_epoch(spec).model_copy(update=score)))
    found = runs_of(runs, None, None)
    assert found[0].metric.baseline == pytest.approx(8**0.5)
    assert found[1].verdict is not None
    assert found[1].verdict.kind == "as good", "0.001 is less than 1 % of the spread, and as much as the mean"
    assert any("near 0" in words for words in sentences(AccuracyResult(found)))


def test_a_worse_precision_that_skipped_many_steps_is_told_so() -> None:
    runs = []
    for precision, seed in itertools.product(("fp32", "fp16-mixed"), range(5)):
        spec = fake_training(precision, {"epochs": 1, "validate_each_epoch": True}, seed=seed)
        skipped = 2 if precision == "fp16-mixed" else 0
        change = {"score": 20.0 + seed + 5 * skipped, "skipped_steps": skipped, "num_steps": 24}
        runs.append(fake_run(spec, fake_epoch(spec).model_copy(update=change)))
    words = sentences(AccuracyResult(runs_of(runs, None, None)))
    assert "fp16-mixed skipped 8.3 % of its steps, until its loss scale fitted." in " ".join(words)


def test_a_command_that_was_stopped_leaves_records_that_can_be_read(command: CommandLine) -> None:
    asked(command, "--precision", "fp32,bf16-mixed", "--seeds", "2")
    (second,) = (
        path for path in command.results.rglob("*fp32*.json") if json.loads(path.read_text())["spec"]["seed"] == 1
    )
    second.unlink()  # every other seed begins with the last precision, and ends with the baseline
    assert "mnist-cnn" in command("report", command.results, "--format", "table").out
    done = command.run("mnist-cnn", "--precision", "fp32,bf16-mixed", "--rounds", "3")
    assert "Accuracy: untested: `castwise accuracy" in done.out


def test_a_missing_data_set_is_one_line(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    command = CommandLine(command.monkeypatch, command.capsys, command.results)
    command.monkeypatch.setenv("CASTWISE_DATA", str(command.results.parent / "no-data"))
    done = command("accuracy", "mnist-cnn")
    assert done.code != 0
    assert len(done.err.strip().splitlines()) == 1
    assert not done.engine.measured


def test_the_answer_of_run_names_the_verdict_or_the_command_that_finds_one(command: CommandLine) -> None:
    measure = ("mnist-cnn", "--precision", "fp32,bf16-mixed", "--rounds", "3")
    before = command.run(*measure)
    line = f"castwise accuracy mnist-cnn --precision fp32,bf16-mixed --results {command.results}"
    assert f"Accuracy: untested: `{line}` tells." in " ".join(before.out.split())
    judged = asked(command, "--precision", "fp32,bf16-mixed")
    after = command.run(*measure)
    assert "Accuracy: as good as fp32: " in after.out
    (difference,) = set(re.findall(r"fp32: (\S+ \[.*?\])", " ".join(judged.out.split())))
    assert difference in " ".join(after.out.split()), "the 5 % are divided among the looks that were planned"
    (advice,) = json.loads(command.run(*measure, "--format", "json").out)["advice"]
    assert advice["accuracy"].startswith("as good as fp32: ")
    assert "Accuracy: as good as fp32" in command.run(*measure, "--format", "markdown").out
    other = command.run("resnet50", "--precision", "fp32,bf16-mixed", "--rounds", "3")
    assert "Accuracy: untested." in other.out, "no recipe trains it"
    page = command("report", command.results, "--format", "table")
    assert "accuracy as good as fp32" in " ".join(page.out.split())


def test_the_answer_of_run_knows_runs_that_diverged_and_the_loss_scale(command: CommandLine) -> None:
    measure, precisions = ("mnist-cnn", "--precision", "fp32,fp16-mixed", "--rounds", "3"), "fp32,fp16-mixed"
    static = ("--loss-scale", "8")
    line = f"castwise accuracy mnist-cnn --precision {precisions} --loss-scale 8"
    assert line in " ".join(command.run(*measure, *static).out.split())
    asked(command, "--precision", precisions, *static, engine=FakeEngine(learns=learning(fp16_mixed=-0.02)))
    assert "Accuracy: worse than fp32" in command.run(*measure, *static).out
    page = " ".join(command("report", command.results, "--format", "markdown").out.split())
    assert "fp16-mixed with loss scale 8" in page
    file = command.results.parent / "page.html"
    assert command("report", command.results, "-o", file).code == 0
    assert "fp16-mixed, loss scale 8 worse" in file.read_text()
    assert "Accuracy: untested" in command.run(*measure).out, "with dynamic scaling"
    diverges = FakeEngine(learns=learning(), faults={"fp16-mixed": Fault("nan")})
    asked(command, "--precision", precisions, engine=diverges)
    (advice,) = json.loads(command.run(*measure, "--format", "json").out)["advice"]
    assert advice["accuracy"] == "diverged 5 of 5, compared with fp32"


def test_few_seeds_get_the_verdict_that_run_gives_of_their_records(command: CommandLine) -> None:
    kinds_of_run, kinds_here = [], []
    for shift in (-0.0018, -0.0025, -0.0032, -0.0045):  # near the margin of 0.003, and near a clear difference
        engine = FakeEngine(learns=learning(0.0009, bf16_mixed=shift))
        arguments = ("--precision", "default,bf16-mixed", "--seeds", "5", "--format", "json", "--again")
        kinds_here.append(kinds(asked(command, *arguments, engine=engine))["bf16-mixed"])
        done = command.run("mnist-cnn", "--precision", "default,bf16-mixed", "--rounds", "3", "--format", "json")
        kinds_of_run.append(json.loads(done.out)["advice"][0]["accuracy"].partition(":")[0])
    assert [re.split(" (?:as|than) default|, compared", words)[0] for words in kinds_of_run] == kinds_here
    assert len(set(kinds_here)) > 1


def test_the_answers_of_run_and_report_say_that_they_take_the_usual_margin(command: CommandLine) -> None:
    command.run("mnist-cnn", "--precision", "fp32,bf16-mixed", "--rounds", "3")
    judged = asked(command, "--precision", "fp32,bf16-mixed", "--margin", "0.525%")
    assert "pairs of runs, margin 0.525 points" in " ".join(judged.out.split())
    done = command.run("mnist-cnn", "--precision", "fp32,bf16-mixed", "--rounds", "3")
    assert "pairs of runs, usual margin 0.3 points" in " ".join(done.out.split())
    page = command.results.parent / "page.html"
    assert command("report", command.results, "-o", page).code == 0
    assert "Shaded is the usual margin of 0.3 points" in page.read_text()


def test_the_answer_of_run_about_a_users_own_model_names_the_command_or_what_is_missing(
    command: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def build():\n    return 1\n")
    name = f"{tmp_path}/own.py:build"
    measure = (name, "--precision", "fp32,bf16-mixed", "--rounds", "3")
    done = command.run(*measure, engine=FakeEngine(higher_is_better=False))
    line = f"castwise accuracy {name} --precision fp32,bf16-mixed --results {command.results}"
    assert f"Accuracy: untested: `{line}` tells." in " ".join(done.out.split())
    done = command.run(*measure, "--again")
    assert "Accuracy: untested: your function returns no training_set and validate(model)." in done.out


def test_runs_of_a_file_before_it_was_edited_say_nothing() -> None:
    old, new = (UserModel(kind="file", path="own.py", name="build", digest=digest) for digest in ("old", "new"))
    changes: dict[str, object] = {"workload": "own.py:build", "data_set": "synthetic"}
    rounds = itertools.product(("fp32", "bf16-mixed"), range(3))
    steps = [steady(precision, repeat, **changes, user_model=new) for precision, repeat in rounds]
    (item,) = decide(rows_of_steps(steps))
    for model, expected in ((new, "as good as fp32"), (old, "untested: your function")):
        runs = []
        for precision, seed in itertools.product(("fp32", "bf16-mixed"), range(5)):
            spec = fake_training(precision, {"epochs": 1, "validate_each_epoch": True}, seed=seed)
            spec = spec.model_copy(update={**changes, "user_model": model})
            runs.append(fake_run(spec, fake_epoch(spec).model_copy(update={"score": 20.0 + seed + 0.001 * (seed % 2)})))
        assert with_accuracy(item, [*steps, *runs]).accuracy.startswith(expected)


def test_the_answer_of_run_rests_on_the_longest_runs_and_says_if_they_were_short(command: CommandLine) -> None:
    measure = ("mnist-cnn", "--precision", "fp32,bf16-mixed", "--rounds", "3")
    worse = FakeEngine(learns=learning(bf16_mixed=-0.02))
    short = ("--suite", "fast-mnist", "--epochs", "2", "--max-steps", "1")
    asked(command, "--precision", "fp32,bf16-mixed", *short, engine=worse)
    assert "worse than fp32 in runs of 2 of 14 epochs of 1 step: " in " ".join(command.run(*measure).out.split())
    page = " ".join(command("report", command.results, "--format", "markdown").out.split())
    assert "accuracy worse than fp32 in runs of 2 of 14 epochs of 1 step" in page
    asked(command, "--precision", "fp32,bf16-mixed", "--suite", "fast-mnist", "--seeds", "2")
    assert "Accuracy: not enough runs, compared with fp32: " in command.run(*measure).out, "of the whole recipe"


def test_what_is_in_fewer_bits_is_taken_with_a_verdict_alone(command: CommandLine) -> None:
    measure = ("lstm-lm", "--precision", "fp32,bf16-true", "--rounds", "3")
    before = " ".join(command.run(*measure).out.split())
    line = f"castwise accuracy lstm-lm --precision fp32,bf16-true --results {command.results}"
    assert f"keeps no float32 weights. The accuracy of bf16-true is untested: `{line}` tells." in before
    judge = ("accuracy", "lstm-lm", "--precision", "fp32,bf16-true", "--results", command.results)
    for shift, expected in (
        (-0.1, "The accuracy of bf16-true is worse than fp32: "),
        (0.0, "take bf16-true. It trains"),
    ):
        command(*judge, "--again", engine=FakeEngine(learns=learning(0.002, bf16_true=shift)))
        assert expected in " ".join(command.run(*measure).out.split())


def test_a_state_in_fewer_bits_that_saves_memory_is_named_with_the_command_that_judges_it() -> None:
    def held(trial: Trial, share: float) -> Trial:
        ranks = tuple(rank.model_copy(update={"peak_allocated_bytes": int(2**30 * share)}) for rank in trial.ranks)
        return trial.model_copy(update={"ranks": ranks})

    loops = (("fp32", 1.0, ()), ("bf16-mixed", 0.8, ()), ("bf16-mixed", 0.6, ("adam-state-8-bit",)))
    rounds = itertools.product(loops, range(3))
    steps = [held(steady(name, n, workload="lstm-lm", techniques=own), share) for (name, share, own), n in rounds]
    (advice,) = decide(rows_of_steps(steps), judge=partial(with_accuracy, trials=steps))
    assert (advice.precision, advice.techniques) == ("bf16-mixed", ())
    line = "castwise accuracy lstm-lm --precision fp32,bf16-mixed --optimizer-state 8-bit"
    assert (
        "bf16-mixed with adam-state-8-bit (1.00×, 0.75× the memory) keeps the optimizer's state in fewer bits. "
        f"The accuracy of bf16-mixed with adam-state-8-bit is untested: `{line}` tells."
    ) in advice.sentence


def test_a_report_takes_a_less_accurate_precision_with_a_warning_alone(command: CommandLine) -> None:
    command.run("mnist-cnn", "--precision", "fp32,bf16-mixed", "--rounds", "3")
    page = " ".join(command("report", command.results, "--format", "markdown").out.split())
    assert "if its lower accuracy will do" not in page
    asked(command, "--precision", "fp32,bf16-mixed", engine=FakeEngine(learns=learning(bf16_mixed=-0.02)))
    page = " ".join(command("report", command.results, "--format", "markdown").out.split())
    assert re.search("take bf16-mixed, [^.]*[0-9.]+× as fast as fp32, if its lower accuracy will do", page)


def test_a_report_takes_the_fastest_training_runs_that_are_no_less_accurate(command: CommandLine) -> None:
    precisions = "fp32,bf16-mixed,fp16-mixed"
    asked(command, "--precision", precisions)
    page = " ".join(command("report", command.results, "--format", "markdown").out.split())
    fastest = re.search("take (bf16-mixed|fp16-mixed)", page)
    assert fastest is not None
    assert "no less accurate" not in page
    shift = {fastest[1].replace("-", "_"): -0.02}
    asked(command, "--precision", precisions, "--again", engine=FakeEngine(learns=learning(**shift)))
    page = " ".join(command("report", command.results, "--format", "markdown").out.split())
    (other,) = {"bf16-mixed", "fp16-mixed"} - {fastest[1]}
    assert f"take {other}" in page
    assert "the fastest that is no less accurate" in page


def test_in_python_it_is_a_function(command: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = FakeEngine(learns=learning())
    monkeypatch.setattr("castwise.orchestrator.machine.ForkserverEngine", lambda data_dir, commit: engine)
    found = castwise.accuracy("mnist-cnn", precision=["fp32", "bf16-mixed"], margin="0.3%", results=tmp_path / "kept")
    assert found.runs[1].verdict is not None
    assert found.runs[1].verdict.kind == "as good"
    assert "bf16-mixed is as good as fp32" in str(found)
    assert found.to_dict()["metric"] == "accuracy"
    assert "Is the accuracy as good as in fp32?" in found._repr_html_()
    assert repr(found) == "Accuracies(mnist-cnn: {'bf16-mixed': 'as good'})"
