import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeSession, Fault, fake_environment, machine_with

from castwise.errors import DataError, UsageError
from castwise.orchestrator import job as job_module
from castwise.orchestrator import machine as machine_module
from castwise.orchestrator.job import Job, outlook, prepare, prepare_profiles, profile_outlook
from castwise.orchestrator.rounds import Rounds, StopRule
from castwise.orchestrator.runner import NullListener
from castwise.records.schema import Facts, Trial
from castwise.records.store import Store, load_folder
from castwise.registry import datasets
from castwise.registry.precisions import PRECISIONS, Hardware
from castwise.spec.options import RunOptions, WhyOptions
from castwise.spec.trial import CPU_ROUND, CUDA_ROUND
from castwise.spec.user_model import UserModel, UserWorkload
from castwise.tune.options import TuneOptions
from castwise.tune.search import prepare_tuning

ALL = [row.name for row in PRECISIONS]

Prepare = Callable[..., Job]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Return a function that prepares a job in this test's folders, on a fake engine; of one round, unless asked."""
    monkeypatch.setenv(machine_module.COMMIT_VARIABLE, "0123456789ab")
    monkeypatch.setenv(datasets.DATA_VARIABLE, str(tmp_path / "no-data"))

    def make(engine: FakeEngine | None = None, **request: Any) -> Job:
        asked: dict[str, Any] = {"workloads": ("resnet50",), "results": tmp_path / "results", "rounds": 1} | request
        chosen = engine or FakeEngine()
        chosen.exclusive = False  # the configurations of a round share the machine
        how = {name: asked.pop(name) for name in ("rule", "short") if name in asked}
        made = prepare(RunOptions(**asked), NullListener(), machine_with(chosen), **how)
        assert chosen.num_open == len(made.runner.begun), "a session was left open"
        return made

    return make


def precisions(job: Job) -> list[str]:
    return [spec.precision for spec in job.specs]


def statuses(trials: list[Trial]) -> dict[str, str]:
    return {trial.spec.precision: trial.status for trial in trials}


def test_a_job_measures_its_plan_and_returns_it_in_order(job: Prepare, tmp_path: Path) -> None:
    made = job(precisions=("bf16-mixed", "fp32"), batch_sizes=(8, 4))
    trials = made.run()
    assert [trial.spec for trial in trials] == list(made.specs) == list(made.missing)
    assert len(load_folder(tmp_path / "results")[0]) == 4


def test_without_further_options_each_configuration_has_three_processes(job: Prepare) -> None:
    engine = FakeEngine()
    made = job(engine, precisions=("fp32", "tf32"), rounds=None)
    assert made.rule == StopRule(min_rounds=3, max_rounds=5, one_look=True)
    assert [trial.spec.repeat for trial in made.run()] == [0, 1, 2, 0, 1, 2]
    assert len(engine.measured) == 6


def test_unsupported_gpus_are_asked_for_again(job: Prepare, tmp_path: Path) -> None:
    axes = {"precisions": ("fp32",), "world_sizes": (1, 2)}
    trials = job(**axes).run()
    assert [(trial.spec.world_size, trial.status) for trial in trials] == [(1, "ok"), (2, "unsupported")]
    larger = job(FakeEngine(environment=fake_environment(num_gpus=2)), **axes)
    assert [spec.world_size for spec in larger.missing] == [2]
    assert [trial.status for trial in larger.run()] == ["ok", "ok"]


def test_gpus_are_refused_on_a_machine_without_any(job: Prepare) -> None:
    machine = FakeEngine(environment=fake_environment(None), devices=("cpu",))
    with pytest.raises(UsageError, match="2 GPUs are asked for, and this machine has none"):
        job(machine, precisions=("fp32",), world_sizes=(2,))
    (spec,) = job(machine, precisions=("fp32",), world_sizes=(2,), device="cpu").specs
    assert spec.num_processes == 2


def test_a_job_with_one_axis_longer_measures_only_what_is_new(job: Prepare) -> None:
    job(precisions=("fp32", "tf32"), batch_sizes=(4,)).run()
    engine = FakeEngine()
    trials = job(engine, precisions=("O0", "tf32"), batch_sizes=(4, 8)).run()
    assert {(spec.precision, spec.batch_size) for spec in engine.measured} == {("fp32", 8), ("tf32", 8)}
    assert len(trials) == 4


@pytest.mark.parametrize("number", [2, 5, 8])
def test_an_interrupted_job_goes_on_where_it_was_cut_off(job: Prepare, number: int) -> None:
    # Session 1 looks at the machine; sessions 2 and 3 are the first batch size's trials, and so on.
    axes: dict[str, Any] = {"precisions": ("fp32", "bf16-mixed"), "batch_sizes": (2, 4, 8, 16)}
    with pytest.raises(KeyboardInterrupt):
        job(FakeEngine(faults={f"#{number}": Fault("interrupt")}), **axes).run()
    engine = FakeEngine()
    rest = job(engine, **axes)
    left = [size for size in axes["batch_sizes"][(number - 2) // 2 :] for _ in axes["precisions"]]
    assert [spec.batch_size for spec in rest.missing] == left
    assert [trial.status for trial in rest.run()] == ["ok"] * 8
    assert [spec.batch_size for spec in engine.measured] == left


FAULTS = {
    "fp32": Fault("crash"),
    "tf32": Fault("timeout"),
    "fp16-mixed": Fault("oom"),
    "bf16-mixed": Fault("unsupported"),
    "fp16-true": Fault("nan"),
}


@pytest.mark.parametrize(
    ("asked", "has_gpu", "said"),
    [
        ({}, True, ""),
        ({"device": "cuda:0"}, False, ""),
        (
            {},
            False,
            "Will measure fp32, bf16-mixed, fp16-mixed, bf16-true on a CPU for 75 s (--budget changes it). The CPU "
            "emulates fp16-mixed: expect no gain there.",
        ),
        (
            {"workloads": ("python t.py",), "precisions": ("as-written", "bf16"), "budget_seconds": 9.0},
            False,
            "Will measure your script as written, bf16-mixed on a CPU.",
        ),
        (
            {"precisions": ("O2",), "device": "cpu", "rounds": 1},
            True,
            "Will measure fp16-master on a CPU. The CPU emulates fp16-master: expect no gain there.",
        ),
    ],
)  # fmt: skip
def test_what_a_cpu_will_measure_is_known_before_torch_is_there(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], has_gpu: bool, said: str
) -> None:
    monkeypatch.setattr(machine_module, "driver_version", lambda: "580" if has_gpu else None)
    monkeypatch.setattr(job_module, "this_cpu", lambda: Hardware("a CPU", None, ("avx512_bf16",)))
    assert outlook(RunOptions(**asked)) == said


@pytest.mark.parametrize(
    ("asked", "has_gpu", "said"),
    [
        ({}, True, "Will profile default, fp32, tf32, fp16-mixed, bf16-mixed: on an H100 each takes"),
        ({"workloads": ("python t.py",)}, True, "Will profile your script as written, bf16-mixed: "),
        ({"precisions": ("fp32",), "budget_seconds": 9.0}, False, "Will measure fp32 on a CPU."),
    ],
)
def test_what_is_profiled_is_known_before_torch_is_there(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], has_gpu: bool, said: str
) -> None:
    monkeypatch.setattr(machine_module, "driver_version", lambda: "580" if has_gpu else None)
    monkeypatch.setattr(job_module, "this_cpu", lambda: Hardware("a CPU", None, ()))
    assert profile_outlook(WhyOptions(**asked)).startswith(said)


def test_retry_measures_crashed_and_timed_out_trials_again(job: Prepare) -> None:
    job(FakeEngine(faults=FAULTS)).run()
    engine = FakeEngine()
    ends = statuses(job(engine, retry=True).run())
    assert sorted(engine.measured_precisions) == ["default", "fp32", "tf32"], "the baseline shares their session"
    assert (ends["fp32"], ends["tf32"], ends["fp16-mixed"]) == ("ok", "ok", "oom")
    assert job(retry=True).missing == (), "what a retry found stays found"


def test_a_record_stands_under_another_time_limit_unless_it_ran_into_a_shorter_one(job: Prepare) -> None:
    job(FakeEngine(faults=FAULTS), timeout_seconds=5.0).run()
    assert job(timeout_seconds=4.0).missing == ()
    longer = job(timeout_seconds=6.0)
    assert [spec.precision for spec in longer.missing] == ["tf32"]
    longer.run()
    assert job(timeout_seconds=6.0).missing == job(timeout_seconds=9.0).missing == ()


def test_without_precisions_a_job_has_those_of_the_device(job: Prepare) -> None:
    assert precisions(job(FakeEngine(environment=fake_environment((9, 0))))) == ALL
    older = [name for name in ALL if name not in ("default", "tf32")]
    assert precisions(job(FakeEngine(environment=fake_environment((7, 5))))) == older
    assert precisions(job(FakeEngine(environment=fake_environment((3, 7))))) == ["fp32"]
    assert precisions(job(FakeEngine(environment=fake_environment(None)))) == older


@pytest.mark.parametrize("capability", [(7, 5), None])
def test_pytorch_s_default_is_measured_everywhere_if_it_is_named(
    job: Prepare, capability: tuple[int, int] | None
) -> None:
    engine = FakeEngine(environment=fake_environment(capability))
    assert precisions(job(engine, precisions=("default", "fp32"))) == ["default", "fp32"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"precisions": ("fp33",)}, "Did you mean fp32"),
        ({"seed": -1}, "A seed is a whole number from 0"),
        ({"seed": 2**63}, "A seed is a whole number from 0"),
        ({"data_set": "mnits"}, "No data set named 'mnits'. Did you mean mnist?"),
        ({"device": "gpu"}, "No device 'gpu'. Write cpu, cuda or cuda:N."),
        ({"seconds": 0.0}, "A time of 0 seconds is impossible"),
        ({"seconds": -1.0}, "A time of -1 seconds is impossible"),
        ({"seconds": math.nan}, "A time of nan seconds is impossible"),
        ({"timeout_seconds": math.inf}, "A time limit of inf seconds is impossible"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_can_be_refused_is_refused_before_any_process_starts(
    job: Prepare, tmp_path: Path, request_: dict[str, object], message: str
) -> None:
    engine = FakeEngine()
    with pytest.raises(UsageError) as refusal:
        job(engine, **request_)
    assert message in str(refusal.value)
    assert engine.sessions == []
    assert not (tmp_path / "results").exists()


def test_a_zoos_models_are_looked_up_before_anything_is_measured(job: Prepare) -> None:
    assert precisions(job(workloads=("torchvision:alexnet",), precisions=("fp32",))) == ["fp32"]
    engine = FakeEngine()
    with pytest.raises(UsageError, match=r"No model 'torchvision:alexnut' \(fake\)"):
        job(engine, workloads=("resnet50", "torchvision:alexnut"))
    assert engine.measured == []
    assert engine.num_open == 0


@pytest.mark.parametrize(
    ("asked", "capability", "device"),
    [
        (None, (9, 0), "cuda:0"),
        ("cuda", (9, 0), "cuda:0"),
        ("cuda:1", (9, 0), "cuda:1"),
        ("cpu", (9, 0), "cpu"),
        (None, None, "cpu"),
        ("cpu", None, "cpu"),
    ],
)
def test_the_device_is_the_one_asked_for_or_the_first_gpu(
    job: Prepare, asked: str | None, capability: tuple[int, int] | None, device: str
) -> None:
    engine = FakeEngine(environment=fake_environment(capability), devices=("cpu", "cuda", "cuda:1"))
    made = job(engine, device=asked, precisions=("fp32",))
    assert [spec.device for spec in made.specs] == [device]
    assert made.specs[0].protocol == (CPU_ROUND if device == "cpu" else CUDA_ROUND)


def test_seconds_and_timeout_go_into_the_protocol(job: Prepare) -> None:
    protocol = job(seconds=4.0, timeout_seconds=7.0).specs[0].protocol
    assert (protocol.max_seconds, protocol.timeout_seconds) == (4.0, 7.0)
    assert protocol.block_seconds * protocol.num_blocks == pytest.approx(4.0)
    assert protocol.num_blocks == CUDA_ROUND.num_blocks


def test_a_bare_job_suits_a_gpu(job: Prepare) -> None:
    made = job(workloads=None)
    assert {spec.workload for spec in made.specs} == {"resnet50"}
    assert precisions(made) == ALL
    assert made.notes == ()
    made = job(workloads=None, precisions=("O1",), batch_sizes=(2,), data_set="synthetic")
    assert [(spec.workload, spec.precision, spec.batch_size) for spec in made.specs] == [("resnet50", "fp16-mixed", 2)]


def test_a_bare_job_on_a_cpu_takes_mnist_or_says_that_it_does_not(job: Prepare, tmp_path: Path) -> None:
    engine = FakeEngine(environment=fake_environment(None))
    made = job(engine, workloads=None, data_dir=tmp_path / "data")
    assert {(spec.workload, spec.data_set) for spec in made.specs} == {("mnist-cnn", "synthetic")}
    assert precisions(made) == ["fp32", "bf16-mixed", "fp16-mixed", "bf16-true"]
    (note,) = made.notes
    assert note.startswith("Synthetic images stand in for MNIST's: MNIST is not in ")
    assert "could not be downloaded" in note
    assert "\n" not in note
    assert {trial.facts.data_note for trial in made.run() if trial.facts} == {note}


def test_a_bare_job_takes_mnist_where_it_is(job: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "verify", lambda data_set, data_dir: None)
    made = job(FakeEngine(environment=fake_environment(None)), workloads=None)
    assert {spec.data_set for spec in made.specs} == {"mnist"}
    assert made.notes == ()


def test_a_data_set_that_is_asked_for_and_missing_is_refused(job: Prepare, tmp_path: Path) -> None:
    engine = FakeEngine()
    with pytest.raises(DataError, match="Downloading it failed too: URLError: no network"):
        job(engine, workloads=("mnist-cnn",), data_set="mnist", data_dir=tmp_path / "data")
    assert engine.measured == []
    assert engine.num_open == 0


def test_without_a_results_folder_nothing_is_kept_or_taken(job: Prepare, tmp_path: Path) -> None:
    job(precisions=("fp32",)).run()
    made = job(precisions=("fp32",), results=None)
    assert len(made.missing) == 1
    made.run()
    assert len(load_folder(tmp_path / "results")[0]) == 1


def test_a_record_made_under_other_defaults_answers_another_question(job: Prepare, tmp_path: Path) -> None:
    engine = FakeEngine()
    made = job(engine, precisions=("fp32",), results=tmp_path)
    (trial,) = made.run()
    other = trial.spec.model_copy(update={"protocol": trial.spec.protocol.model_copy(update={"num_blocks": 3})})
    store = Store(tmp_path / "other")
    store.save(trial.model_copy(update={"spec": other}))
    again = job(FakeEngine(), precisions=("fp32",), results=tmp_path / "other")
    assert [spec.precision for spec in again.missing] == ["fp32"]


@pytest.mark.parametrize(
    ("device", "rounds", "budget"),
    [
        ("cpu", {"within": 0.01}, 75.0),
        ("cpu", {"budget_seconds": 9.0}, 9.0),
        ("cpu", {"budget_seconds": 9.0, "rounds": 2}, 9.0),
        ("cpu", {"rounds": 2}, None),
        ("cpu", {"within": 0.01, "rounds": StopRule.max_rounds}, None),
        ("cuda", {"within": 0.01}, None),
        ("cpu", {}, 75.0),
        ("cuda", {}, None),
    ],
)
def test_rounds_on_a_cpu_end_by_a_budget_unless_their_number_is_named(
    device: str, rounds: dict[str, Any], budget: float | None, job: Prepare
) -> None:
    rule = job(device=device, **{"rounds": None, **rounds}).rule
    assert rule is not None
    assert rule.budget_seconds == (budget and pytest.approx(budget, abs=1))


@pytest.mark.parametrize(("budget", "seconds", "left"), [(60.0, 10.0, 50.0), (60.0, 50.0, 30.0), (None, 10.0, 65.0)])
def test_what_imports_take_is_part_of_a_budget(
    budget: float | None, seconds: float, left: float, job: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("castwise.orchestrator.job.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("castwise.orchestrator.job.import_once", lambda _: now.append(now.pop() + seconds))
    rule = job(device="cpu", rounds=None, budget_seconds=budget).rule
    assert rule is not None
    assert rule.budget_seconds == pytest.approx(left)


@pytest.mark.parametrize(
    ("techniques", "is_preloaded"), [(None, False), (("none", "fused-optimizer"), False), (("none", "compile"), True)]
)
def test_the_compiler_is_imported_once_for_loops_that_need_it(
    techniques: tuple[str, ...] | None, is_preloaded: bool, job: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = list[str]()
    monkeypatch.setattr("castwise.orchestrator.job.import_once", imported.extend)
    job(techniques=techniques)
    assert imported == ["castwise.trial.preload_compiler"] * is_preloaded


class SlowSession(FakeSession):
    _engine: "Slow"

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        facts = super().warm_up(step_seconds)
        seconds = (facts.warm_up_steps - 1) * self.spec.batch_size * self._engine.sample_seconds
        return facts.model_copy(update={"warm_up_seconds": seconds})

    def inspect(self, model: UserModel, *limits: Any) -> UserWorkload:
        return super().inspect(model, *limits).model_copy(update={"same_precisions": self._engine.same})


@dataclass
class Slow(FakeEngine):
    """Takes a hundredth of a second for a sample of a warm-up step."""

    session_class: Any = SlowSession
    sample_seconds: float = 0.01
    same: tuple[str, ...] = ()


def test_a_slow_cpu_gets_a_smaller_batch_unless_one_is_named(job: Prepare) -> None:
    asked: dict[str, Any] = {"workloads": ("mnist-cnn",), "rounds": None, "device": "cpu"}
    asked |= {"precisions": ("bf16-mixed", "fp32")}
    quick, slow = Slow(sample_seconds=1e-6), Slow()
    usual, smaller = job(quick, **asked), job(slow, **asked)
    (usual_batch,), (batch,) = ({spec.batch_size for spec in each.specs} for each in (usual, smaller))
    assert usual.notes == ()
    assert batch < usual_batch
    assert batch * slow.sample_seconds < 75 / 100, "a share of the budget"
    (note,) = smaller.notes
    assert f"batch {batch}," in note
    assert str(usual_batch) in note
    assert {spec.batch_size for spec in job(slow, **asked, batch_sizes=(usual_batch,)).specs} == {usual_batch}


def test_a_smaller_batch_that_is_on_record_is_taken_again(job: Prepare) -> None:
    asked: dict[str, Any] = {"workloads": ("mnist-cnn",), "rounds": None, "device": "cpu", "precisions": ("fp32",)}
    first = job(Slow(), **asked)
    first.run()
    quick = Slow(sample_seconds=1e-6)
    assert [spec.batch_size for spec in job(quick, **asked).specs] == [spec.batch_size for spec in first.specs]


def test_what_is_the_same_as_a_script_as_written_is_not_measured(job: Prepare, tmp_path: Path) -> None:
    engine = Slow(same=("default", "fp32"), exclusive=False)
    (tmp_path / "train.py").write_text("")
    made = job(engine, workloads=(f"python {tmp_path / 'train.py'}",), precisions=("fp32", "bf16-mixed"), device="cpu")
    assert precisions(made) == ["as-written", "bf16-mixed"]
    assert "fp32" in made.notes[0]
    made.run()
    looking = engine.sessions[1]
    assert looking.calls[1] == "inspect"
    assert looking.spec.precision == "as-written", "the process that has looked at the script goes on"


def test_a_script_is_measured_on_one_gpu_and_on_several(job: Prepare, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("")
    asked: dict[str, Any] = {"workloads": (f"torchrun --nproc-per-node 2 {file}",), "device": "cpu"}
    made = job(Slow(exclusive=False), precisions=("bf16-mixed",), world_sizes=(1, 2), **asked)
    assert [(spec.num_gpus, spec.precision) for spec in made.specs] == [
        (count, name) for count in (1, 2) for name in ("as-written", "bf16-mixed")
    ]
    with pytest.raises(UsageError, match="--units-per-step counts what one number of GPUs trains on"):
        job(Slow(), world_sizes=(1, 2), units_per_step=64, **asked)
    with pytest.raises(UsageError, match="0 GPUs are impossible"):
        job(Slow(), world_sizes=(0,), **asked)


def test_each_comparison_has_its_share_of_the_budget_and_none_begins_without_any(
    job: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("castwise.orchestrator.job.time.perf_counter", lambda: now[0])
    made = job(device="cpu", precisions=("fp32", "bf16-mixed"), batch_sizes=(8, 16, 32), budget_seconds=20.0)
    run = Rounds.run

    def take_long(rounds: Rounds) -> list[Trial]:
        trials = run(rounds)
        now[0] += 12.0
        rounds.session_seconds = 12.0
        return trials

    monkeypatch.setattr(Rounds, "run", take_long)
    assert {trial.spec.batch_size for trial in made.run()} == {8}


def test_why_takes_two_precisions_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    for precisions, taken in ((None, ["as-written", "bf16-mixed"]), (("fp32",), ["as-written", "fp32"])):
        made = FakeEngine(exclusive=False)
        job = prepare_profiles(WhyOptions(("python train.py",), precisions), NullListener(), machine_with(made))
        assert [spec.precision for spec in job.specs] == taken


@pytest.mark.parametrize("command", ["run", "why", "tune"])
def test_the_first_steps_of_a_script_have_no_more_time_than_the_budget(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    made, listener = FakeEngine(exclusive=False), NullListener()
    for options in ({}, {"budget_seconds": 30.0}, {"budget_seconds": 30.0, "timeout_seconds": 7.0}):
        if command == "run":
            prepare(RunOptions(("python train.py",), **options), listener, machine_with(made))
        elif command == "why":
            prepare_profiles(WhyOptions(("python train.py",), **options), listener, machine_with(made))
        else:
            prepare_tuning(TuneOptions("python train.py", **options), listener, machine_with(made))
    without, with_budget, with_both = made.limits
    assert 15.0 <= with_budget <= 30.0 < without
    assert with_both == 7.0
