"""A plan as a file, its shards on several machines, and their records joined."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CommandLine, Outcome
from fake_engine import FAKE_DIGEST, FakeEngine, fake_environment, fake_spec, fake_trial
from hypothesis import given
from hypothesis import strategies as st

from castwise._version import __version__
from castwise.errors import UsageError
from castwise.records.store import Store, load_folder
from castwise.spec.plan_file import PlanFile, parse_shard, read_plan

REQUEST = ("resnet50", "--precision", "fp32,bf16-mixed", "--batch-size", "8,16,32", "--rounds", "1")
TWO_NODES, MEET = ("--nodes-per-trial", "2"), ("--rendezvous", "localhost:1", "--node-rank", "1")
Edit = Callable[[dict[str, object]], object]


@pytest.fixture
def plan(command: CommandLine, tmp_path: Path) -> Path:
    """Return the file of a plan with three comparisons of two precisions each."""
    file = tmp_path / "plan.json"
    found = command.run(*REQUEST, "--plan-only", file)
    assert (found.code, found.out) == (0, "")
    assert "6 configurations in 3 comparisons on cuda:0" in found.err
    assert found.engine.sessions == [], "no machine is looked at"
    return file


def measure(command: CommandLine, plan: Path, *arguments: str | Path, **engine: object) -> Outcome:
    made = FakeEngine(exclusive=False, **engine)  # type: ignore[arg-type]
    return command("run", "--plan", plan, *arguments, engine=made)


def test_shards_on_two_machines_are_the_plan_once(command: CommandLine, plan: Path, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        machine = fake_environment(host=f"node{number % 2}")
        results = tmp_path / f"results{number % 2}"
        found = measure(command, plan, "--shard", f"{number}/3", "--results", results, environment=machine)
        assert found.code == 0
        assert len({spec.comparison for spec in found.engine.measured}) == 1, "a comparison is of one machine"
        assert len(found.engine.measured) == 2
    merged = tmp_path / "all"
    joined = command("merge", tmp_path / "results0", tmp_path / "results1", "-o", merged)
    assert joined.code == 0
    assert "6 records, 6 of them new" in joined.err
    trials, problems = load_folder(merged)
    assert problems == []
    assert sorted(trial.spec.key for trial in trials) == sorted(spec.key for spec in read_plan(plan).specs)
    again = command("merge", tmp_path / "results0", merged, "-o", merged)
    assert "6 records, 0 of them new" in again.err


def test_a_shard_goes_on_from_its_records(command: CommandLine, plan: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    assert measure(command, plan, "--shard", "1/3", "--results", results).engine.measured
    again = measure(command, plan, "--shard", "1/3", "--results", results)
    assert again.engine.measured == []
    rest = measure(command, plan, "--results", results)
    assert len(rest.engine.measured) == 4


def test_a_shard_without_a_comparison_says_so(command: CommandLine, plan: Path, tmp_path: Path) -> None:
    found = measure(command, plan, "--shard", "4/4", "--results", tmp_path / "results")
    assert (found.code, found.out) == (0, "")
    assert "nothing to measure: the plan has 3 comparisons" in found.err
    assert found.engine.sessions == []


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=12), num_shards=st.integers(1, 15))
def test_shards_hold_whole_comparisons_evenly(counts: list[int], num_shards: int) -> None:
    precisions = ("fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16-true")
    specs = [fake_spec(name, batch_size=size) for size, count in enumerate(counts, 1) for name in precisions[:count]]
    plan = PlanFile(options={}, specs=tuple(specs))
    shards = plan.shards(num_shards)
    assert sorted(spec.key for shard in shards for spec in shard) == sorted(spec.key for spec in specs)
    for spec in specs:
        assert sum(any(each.comparison == spec.comparison for each in shard) for shard in shards) == 1
    sizes = list(map(len, shards))
    assert max(sizes) - min(sizes) <= max(counts)


def test_a_plan_for_all_precisions_leaves_out_what_a_machine_lacks(command: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    command.run("resnet50", "--rounds", "1", "--plan-only", file)
    old = measure(command, file, "--results", tmp_path / "old", environment=fake_environment((7, 0)))
    assert old.code == 0
    measured = set(old.engine.measured_precisions)
    assert "fp16-mixed" in measured
    assert "tf32" not in measured
    assert {spec.precision for spec in read_plan(file).specs} > measured


def test_a_users_file_must_be_the_one_that_was_planned(command: CommandLine, tmp_path: Path) -> None:
    model, file = tmp_path / "train_me.py", tmp_path / "plan.json"
    model.write_text("def build(): ...\n")
    planned = command.run(f"{model}:build", "--precision", "fp32", "--rounds", "1", "--plan-only", file)
    assert planned.code == 0
    assert planned.engine.measured == []
    assert str(tmp_path) not in json.dumps(json.loads(file.read_text())["specs"]), "records name no folder"
    assert measure(command, file, "--results", tmp_path / "results").code == 0
    file.write_text(file.read_text().replace(FAKE_DIGEST, "ffffffffffff"))
    other = measure(command, file, "--results", tmp_path / "other")
    assert other.code == 2
    assert "not those that the plan was made of" in other.error_lines[-1]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan.update(castwise="0.0.1"), f"made by castwise 0.0.1, and this is castwise {__version__}"),
        (lambda plan: plan.pop("specs"), "is no plan of castwise (specs:"),
        (lambda plan: plan.update(specs=[]), "has no trials"),
        (lambda plan: plan["options"].update(batch_size=[8]), "it has no resnet50 fp32 batch 16"),
    ],
    ids=["version", "no plan", "empty", "edited"],
)
def test_a_plan_that_cannot_be_carried_out(
    edit: Edit, message: str, command: CommandLine, plan: Path, tmp_path: Path
) -> None:
    document = json.loads(plan.read_text())
    edit(document)
    plan.write_text(json.dumps(document))
    found = measure(command, plan, "--results", tmp_path / "results")
    assert found.code == 2
    assert message in found.error_lines[-1]
    assert found.engine.measured == []
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plan", "no-such.json"), "'no-such.json' cannot be read"),
        (("resnet50", "--shard", "1/2"), "Name its file with --plan"),
        (("resnet50", "--plan", "plan.json"), "Leave WORKLOAD out"),
        (("--plan", "plan.json", "--precision", "fp32"), "Leave --precision out"),
        (("--plan", "plan.json", "--plan-only", "plan.json"), "Give one of the two"),
        (("--plan-only", "new.json"), "it needs a workload"),
        (("resnet50", "--precision", "fp31", "--plan-only", "new.json"), "No precision named 'fp31'"),
        (("resnet50", "--on", "pbs"), "'pbs' is none of them"),
        (("resnet50", "--nodes", "2"), "go with --on slurm"),
        (("resnet50", "--on", "ray", "--partition", "gpu"), "are options of Slurm"),
        (("--plan", "plan.json", "--shard", "1/2", "--on", "slurm"), "Leave --shard, --plan-only and --rendezvous out"),
        (("resnet50", "--on", "slurm", "--format", "json"), "castwise export"),
        (("--on", "ray"), "it needs a workload"),
        (("resnet50", "--on", "slurm", "--price-kwh", "0.3"), "prints no prices"),
        (("resnet50", "--on", "slurm", "--per", "gpu-model"), "goes with --on ray"),
        (("resnet50", "--gpus", "3", *TWO_NODES, *MEET), "3 GPUs cannot be shared by 2 nodes"),
        (("resnet50", *TWO_NODES, *MEET), "One GPU is not on 2 nodes"),
        (("resnet50", "--gpus", "2", *TWO_NODES, "--parallelism", "dp", *MEET), "with ddp or fsdp"),
        (("resnet50", "--gpus", "2", *TWO_NODES), "needs --rendezvous"),
        (("resnet50", "--gpus", "2", "--node-rank", "0"), "go together"),
        (("resnet50", "--gpus", "2", "--rendezvous", "a:1", "--node-rank", "0"), "Give --nodes-per-trial"),
        (("resnet50", "--gpus", "2", *TWO_NODES, "--rendezvous", "node1", "--node-rank", "1"), "not 'node1'"),
    ],
)
@pytest.mark.usefixtures("plan")
def test_options_that_exclude_each_other(
    arguments: tuple[str, ...], message: str, command: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = command.run(*arguments)
    assert found.code == 2
    assert message in found.error_lines[-1]
    assert found.engine.sessions == []


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3"])
def test_what_is_no_shard(text: str) -> None:
    assert parse_shard("2/8") == (2, 8)
    with pytest.raises(UsageError, match=f"not '{text}'"):
        parse_shard(text)


def test_a_gpu_plan_needs_a_gpu(command: CommandLine, plan: Path, tmp_path: Path) -> None:
    engine = FakeEngine(environment=fake_environment(None), devices=("cpu",))
    found = command("run", "--plan", plan, "--results", tmp_path / "results", engine=engine)
    assert found.code == 2
    assert "'cuda:0' cannot be opened" in found.error_lines[-1]


@pytest.mark.parametrize(
    ("planned", "arguments", "message"),
    [
        (("--device", "cpu"), ("--pack",), "--pack is for trials that leave GPUs"),
        (("--gpus", "2", "--nodes-per-trial", "2"), ("--nodes", "1"), "--nodes 1 is fewer than the 2"),
        (("--gpus", "2", "--nodes-per-trial", "2"), ("--per", "node"), "--per node measures each node alone"),
    ],
)
def test_a_plan_that_cannot_be_divided_so(
    planned: tuple[str, ...], arguments: tuple[str, ...], message: str, command: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    assert command.run(*REQUEST, *planned, "--plan-only", file).code == 0
    found = command.run("--plan", file, "--on", "ray", *arguments)
    assert found.code == 2
    assert message in found.error_lines[-1]


# merge


def test_records_that_conflict_are_refused_with_both_names(command: CommandLine, tmp_path: Path) -> None:
    for name, seconds in (("one", 0.1), ("two", 0.2)):
        Store(tmp_path / name).save(fake_trial(step_seconds=(seconds,)))
    found = command("merge", tmp_path / "one", tmp_path / "two", "-o", tmp_path / "all")
    assert found.code == 2
    (file,) = [each.relative_to(tmp_path / "one") for each in (tmp_path / "one").rglob("*.json")]
    assert str(tmp_path / "one" / file) in found.err
    assert str(tmp_path / "two" / file) in found.err
    assert not (tmp_path / "all").exists()


def test_a_folder_that_another_goes_on_from_is_no_conflict(command: CommandLine, tmp_path: Path) -> None:
    first = fake_trial(step_seconds=(0.1,))
    second = first.model_copy(update={"started_at": "2001-01-01T00:00:00.000+00:00"})  # with --again
    Store(tmp_path / "one").save(first)
    for trial in (first, second):
        Store(tmp_path / "two").save(trial)
    found = command("merge", tmp_path / "one", tmp_path / "two", "-o", tmp_path / "all")
    assert "2 records, 2 of them new" in found.err
    (kept,) = Store(tmp_path / "all").load(first.environment)[0].values()
    assert kept == second, "the newest counts"


def test_machines_have_folders_of_their_own(command: CommandLine, tmp_path: Path) -> None:
    for name in ("one", "two"):
        Store(tmp_path / name).save(fake_trial(environment=fake_environment(host=name)))
    (tmp_path / "two" / "notes.json").write_text("{}")
    found = command("merge", tmp_path / "one", tmp_path / "two", "-o", tmp_path / "all")
    assert found.code == 0
    assert "Left out: " in found.err
    assert len(list((tmp_path / "all").iterdir())) == 2


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_merge(name: str, command: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = command("merge", tmp_path / name, "-o", tmp_path / "all")
    assert found.code == 2
    assert str(tmp_path / name) in found.err


def test_ray_that_is_not_installed(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    found = command.run(*REQUEST, "--on", "ray")
    assert (found.code, found.err) == (2, "castwise: --on ray needs Ray: pip install 'castwise[ray]'.\n")
