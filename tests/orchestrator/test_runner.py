import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import PHASES, FakeEngine, Fault, fake_environment, fake_spec, fake_trial, step_seconds
from noting import NotingEngine

from castwise.analysis.steady_metrics import final_loss
from castwise.errors import StoreError
from castwise.orchestrator.runner import Listener, NullListener, TrialRunner, status_of, unsupported_reason
from castwise.records.schema import Block, RankSamples, Trial
from castwise.records.store import Store, load_folder, stem_of
from castwise.registry.precisions import PRECISIONS
from castwise.spec.recipe import Recipe
from castwise.spec.trial import MeasurementProtocol, TrialSpec

SPECS = tuple(fake_spec(row.name) for row in PRECISIONS)

# How each fault ends: the record's status, and a word of its message.
ENDS = [
    (Fault("oom"), "oom", "out of memory"),
    (Fault("oom", "warm_up"), "oom", "out of memory"),
    (Fault("oom", "run_block", block=2), "oom", "out of memory"),
    (Fault("crash"), "crashed", "illegal memory access"),
    (Fault("crash", "finish"), "crashed", "illegal memory access"),
    (Fault("timeout"), "timeout", "took longer than"),
    (Fault("timeout", "run_block", block=1), "timeout", "took longer than"),
    (Fault("unsupported"), "unsupported", "not implemented for"),
    (Fault("nan"), "diverged", "the loss was nan"),
    (Fault("inf", block=3), "diverged", "the loss was inf"),
]


class Diary:
    """A listener that writes everything down."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, object]] = []

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        self.entries.append(("started", (spec.precision, index, count)))

    def phase(self, name: str, done: float) -> None:
        self.entries.append((name, done))

    def ended(self, trial: Trial) -> None:
        self.entries.append(("ended", trial.status))

    def remark(self, line: str) -> None:
        self.entries.append(("remark", line))


def runner(engine: FakeEngine, store: Store | None = None, listener: Listener | None = None) -> TrialRunner:
    return TrialRunner(engine, store, engine.environment, listener or NullListener())


def test_trial_contents() -> None:
    engine = FakeEngine()
    (trial,) = runner(engine).run([fake_spec("fp16-mixed")])
    assert trial.environment == engine.environment
    assert trial.facts is not None
    assert trial.facts.ready_seconds == engine.sessions[0].ready_seconds
    assert len(trial.ranks[0].blocks) == trial.spec.protocol.num_blocks
    assert trial.ranks[0].peak_allocated_bytes
    assert trial.message == trial.log == ""
    assert trial.duration_seconds >= 0
    assert trial.started_at.endswith("+00:00")


PROFILED = MeasurementProtocol(num_blocks=4, profile_steps=3)


def test_steps_are_profiled_after_all_else_if_they_are_to_be(tmp_path: Path) -> None:
    engine = FakeEngine()
    asked, plain = replace(runner(engine), traces=tmp_path).run([fake_spec(protocol=PROFILED), fake_spec()])
    assert asked.profile is not None
    assert asked.profile.num_steps == 3
    assert Trial.model_validate_json(asked.model_dump_json()) == asked
    assert engine.sessions[0].calls[-2:] == ["finish", "profile"]
    assert engine.sessions[0].trace == tmp_path / f"{stem_of(asked.spec)}.json"
    assert plain.profile is None
    assert "profile" not in engine.sessions[1].calls
    assert asked.spec.key != plain.spec.key


@pytest.mark.parametrize("kind", ["crash", "timeout", "oom"])
def test_a_profile_that_fails_costs_no_figure(kind: str) -> None:
    (trial,) = runner(FakeEngine(faults={"fp32": Fault(kind, "profile")})).run([fake_spec(protocol=PROFILED)])
    assert (trial.status, len(trial.ranks[0].blocks)) == ("ok", 4)
    assert trial.ranks[0].peak_allocated_bytes
    assert trial.profile is not None
    assert trial.profile.num_steps == 0
    assert trial.profile.missing.startswith("the profile failed: ")


def test_a_trial_that_failed_is_not_profiled() -> None:
    engine = FakeEngine(faults={"fp32": Fault("crash")})
    (trial,) = runner(engine).run([fake_spec(protocol=PROFILED)])
    assert trial.profile is None


@pytest.mark.parametrize(("fault", "status", "word"), ENDS, ids=lambda value: str(value)[:40])
def test_every_outcome_is_a_record_and_the_run_goes_on(fault: Fault, status: str, word: str, tmp_path: Path) -> None:
    engine, store = FakeEngine(faults={"bf16-mixed": fault}), Store(tmp_path)
    trials = runner(engine, store).run(SPECS)
    ends = {trial.spec.precision: trial for trial in trials}
    failed = ends.pop("bf16-mixed")
    assert failed.status == status
    assert word in failed.message
    assert "\n" not in failed.message
    assert failed.environment == engine.environment
    assert bool(failed.log) == (status != "diverged")
    # What was timed before the fault is kept.
    assert (failed.facts is not None) == (fault.strikes_in in ("run_block", "finish") or status == "diverged")
    if fault.strikes_in == "run_block" and status != "diverged":
        assert len(failed.ranks[0].blocks if failed.ranks else ()) == fault.block
    assert {trial.status for trial in ends.values()} == {"ok"}
    assert engine.num_open == 0
    recorded, problems = store.load(engine.environment)
    assert problems == []
    assert {key: repr(trial) for key, trial in recorded.items()} == {t.spec.key: repr(t) for t in trials}


def test_process_that_dies_on_open_is_a_record(tmp_path: Path) -> None:
    engine = FakeEngine(faults={"#4": Fault("crash", "open")})
    statuses = [trial.status for trial in runner(engine, Store(tmp_path)).run(SPECS)]
    assert statuses == ["crashed" if index == 3 else "ok" for index in range(len(SPECS))]
    assert len(load_folder(tmp_path)[0]) == len(SPECS)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [1, 7])
def test_interrupt_keeps_records_and_leaves_no_process(phase: str, number: int, tmp_path: Path) -> None:
    engine, store = FakeEngine(faults={f"#{number}": Fault("interrupt", phase)}), Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        runner(engine, store).run(SPECS)
    assert engine.num_open == 0
    trials, problems = load_folder(tmp_path)
    assert {trial.spec for trial in trials} == set(SPECS[: number - 1])
    assert problems == []
    assert not list(tmp_path.rglob(".*"))


class Blocking(NullListener):
    """Puts a file in the place of a folder once a trial runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def phase(self, name: str, done: float) -> None:
        if self.folder.is_dir():
            shutil.rmtree(self.folder)
            self.folder.write_text("in the way")


@pytest.mark.parametrize("is_late", [False, True])
def test_failing_store_leaves_no_process(is_late: bool, tmp_path: Path) -> None:
    engine, store = FakeEngine(), Store(tmp_path)
    folder = store.machine_folder(engine.environment)
    if not is_late:
        folder.write_text("in the way")
    with pytest.raises(StoreError):
        runner(engine, store, Blocking(folder)).run(SPECS)
    assert len(engine.sessions) == is_late
    assert engine.num_open == 0


def test_listener_receives_phases_in_order() -> None:
    diary = Diary()
    runner(FakeEngine(faults={"tf32": Fault("oom")}), listener=diary).run([fake_spec(), fake_spec("tf32")])
    names = [name for name, _ in diary.entries]
    first, second = names[: names.index("ended") + 1], names[names.index("ended") + 1 :]
    assert first == ["started", "starting", "setting up", "warming up", *["timing"] * 20, "ended"]
    assert second == ["started", "starting", "setting up", "ended"]
    assert [value for name, value in diary.entries if name == "started"] == [("fp32", 1, 2), ("tf32", 2, 2)]
    assert [value for name, value in diary.entries if name == "ended"] == ["ok", "oom"]
    done = [value for name, value in diary.entries[: len(first)] if name not in ("started", "ended")]
    assert done == sorted(done)  # type: ignore[type-var]
    assert 0 <= done[0] <= done[-1] <= 1  # type: ignore[operator]


@pytest.mark.parametrize(
    ("protocol", "num_blocks"),
    [
        (MeasurementProtocol(num_blocks=7, block_seconds=0.001, max_seconds=1e6), 7),
        # Steps of 26.6 ms: timing ends after the block in which more than 0.1 s have passed.
        (MeasurementProtocol(num_blocks=20, block_seconds=0.001, max_seconds=0.1), 4),
        (MeasurementProtocol(num_blocks=20, block_seconds=0.001, max_seconds=1e-9, min_blocks=1), 1),
    ],
)
def test_number_of_blocks(protocol: MeasurementProtocol, num_blocks: int) -> None:
    spec = fake_spec(protocol=protocol)
    assert step_seconds(spec) == pytest.approx(0.0266)
    (trial,) = runner(FakeEngine()).run([spec])
    assert len(trial.ranks[0].blocks) == num_blocks


def judged(*losses: float, loss_scale: str = "dynamic", scale: float | None = None) -> Trial:
    """Return a trial of 10 steps a block as `status_of` leaves it; `scale` is the loss scale after each block."""
    blocks = tuple(Block(seconds=1, num_steps=10, loss=loss, loss_scale=scale) for loss in losses)
    trial = fake_trial(fake_spec("fp16-mixed", loss_scale=loss_scale), step_seconds=())
    return status_of(trial.model_copy(update={"ranks": (RankSamples(blocks=blocks),)}))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_last_loss_diverged(loss: float) -> None:
    trial = judged(1.0, loss)
    assert trial.status == "diverged"
    assert trial.message == f"the loss was {loss} 20 steps after warm-up: its speed means nothing"
    assert judged(loss, 1.0).status == "ok"


@pytest.mark.parametrize(("name", "told"), [("dynamic", True), ("dynamic-apex", True), ("128", False)])
def test_divergence_names_the_dynamic_scale(name: str, told: bool) -> None:
    assert ("loss scale 0.5" in judged(math.nan, loss_scale=name, scale=0.5).message) == told


@pytest.mark.parametrize(("parallelism", "num_processes"), [("ddp", 4), ("dp", 1)])
def test_each_rank_is_a_process_and_has_its_samples(parallelism: str, num_processes: int) -> None:
    engine = FakeEngine(environment=fake_environment(num_gpus=4))
    (trial,) = runner(engine).run([fake_spec(world_size=4, parallelism=parallelism)])
    assert trial.status == "ok"
    assert engine.sessions[0].num_processes == len(trial.ranks) == num_processes


@pytest.mark.parametrize(
    ("device", "world_size", "lack"),
    [
        ("cuda:0", 2, None),
        ("cuda:0", 3, "3 GPUs are asked for, and this machine has 2"),
        ("cuda:1", 1, None),
        ("cuda:1", 2, "2 GPUs are asked for from cuda:1 on, and this machine has 2"),
        ("cpu", 64, None),
    ],
)
def test_unsupported_reason_of_missing_gpus(device: str, world_size: int, lack: str | None) -> None:
    spec = fake_spec(device=device, world_size=world_size, parallelism="ddp" if world_size > 1 else "none")
    assert unsupported_reason(spec, fake_environment(num_gpus=2)) == lack


def test_environment_of_the_trials_process_counts() -> None:
    found, before = fake_environment(num_threads=7), fake_environment()
    (trial,) = TrialRunner(FakeEngine(environment=found), None, before, NullListener()).run([fake_spec()])
    assert trial.environment == found


def training_spec(precision: str = "fp32", epochs: int = 3) -> TrialSpec:
    return TrialSpec(**(dict(fake_spec(precision)) | {"kind": "training", "recipe": Recipe(epochs=epochs)}))


def test_training_trial_resumes() -> None:
    engine = FakeEngine(faults={"#1": Fault("interrupt", "run_epoch", block=2)})
    with pytest.raises(KeyboardInterrupt):
        runner(engine).run([training_spec()])
    (trial,) = runner(engine).run([training_spec()])
    assert len(trial.ranks[0].epochs) == 3
    assert engine.sessions[1].calls.count("run_epoch") == 1


@pytest.mark.parametrize(("kind", "status", "num_epochs"), [("nan", "diverged", 2), ("crash", "crashed", 1)])
def test_failed_training_keeps_its_epochs(kind: str, status: str, num_epochs: int) -> None:
    (trial,) = runner(FakeEngine(faults={"fp32": Fault(kind, "run_epoch", block=1)})).run([training_spec()])
    assert (trial.status, len(trial.ranks[0].epochs)) == (status, num_epochs)


def run_with_lead_in(engine: NotingEngine, **changes: float) -> Trial:
    (trial,) = engine.runner().run(
        [fake_spec(protocol=MeasurementProtocol(lead_in_seconds=0.02, **{"num_blocks": 3, **changes}))]
    )
    return trial


def test_lead_in_of_a_lone_trial() -> None:
    engine = NotingEngine()
    trial = run_with_lead_in(engine)
    blocks = trial.ranks[0].blocks
    assert [block.lead_in_steps for block in blocks] == [1, 1, 1]
    order = [each.split()[0] for each in engine.order]
    order = order[order.index("lead") :]
    assert order[: 3 * 4] == ["lead", "look", "block", *(["lead", "look", "look", "block"] * 2), "look"]
    assert trial.facts is not None
    assert final_loss(trial) == (blocks[-1].loss, trial.facts.warm_up_steps + sum(b.num_steps + 1 for b in blocks))


def test_no_lead_in_after_the_last_block() -> None:
    engine = NotingEngine()
    trial = run_with_lead_in(engine, num_blocks=20, min_blocks=2, max_seconds=0.01)
    assert len(trial.ranks[0].blocks) == 2
    assert engine.order.count("lead fp32") == 2


def test_failed_lead_in_keeps_readings() -> None:
    trial = run_with_lead_in(NotingEngine(fp32=Fault("crash", "lead_in", block=2)))
    assert (trial.status, trial.message.split(":")[0]) == ("crashed", "RuntimeError")
    assert len(trial.ranks[0].blocks) == len(trial.readings) == 2


@pytest.mark.parametrize(
    ("changes", "torchao", "lack"),
    [
        ({"techniques": ("compile",)}, "0.18.0", None),
        ({"techniques": ("compile-max-autotune",)}, "0.18.1+cu130", None),
        ({"techniques": ("compile",)}, None, "fp8-rowwise needs torchao 0.18: pip install 'castwise[fp8]'"),
        (
            {"techniques": ("compile",)},
            "0.17.0",
            "fp8-rowwise needs torchao 0.18; this is torchao 0.17.0: pip install 'castwise[fp8]'",
        ),
        (
            {},
            "0.18.0",
            "fp8-rowwise needs compile, without which FP8 is several times slower: add --techniques compile",
        ),
    ],
)
def test_unsupported_reason_of_fp8(changes: dict[str, object], torchao: str | None, lack: str | None) -> None:
    spec = fake_spec("fp8-rowwise", workload="gpt2", **changes)
    assert unsupported_reason(spec, fake_environment(torchao=torchao)) == lack


@pytest.mark.parametrize("torchao", [None, "0.17.0", "0.18.0"])
def test_adams_state_in_fewer_bits_needs_torchao_of_one_version(torchao: str | None) -> None:
    spec = fake_spec("fp32", workload="gpt2", techniques=("adam-state-8-bit",))
    there = f"; this is torchao {torchao}" if torchao else ""
    lack = None if torchao == "0.18.0" else f"adam-state-8-bit needs torchao 0.18{there}: pip install 'castwise[fp8]'"
    assert unsupported_reason(spec, fake_environment(torchao=torchao)) == lack
