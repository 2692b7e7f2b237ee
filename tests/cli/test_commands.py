import os
import signal
import textwrap
from pathlib import Path

import pytest
from conftest import CommandLine, Outcome
from fake_engine import FAKE_DIGEST, PHASES, FakeEngine, Fault, fake_environment, fake_trial
from fake_gpu import UUID, FakeMonitor, fake_gpu_facts
from programs import PATIENCE_SECONDS, hanging_fake_cli

from castwise.cli import doctor
from castwise.cli.measuring import INTERRUPTED, exit_code
from castwise.orchestrator.session import TrialFailedError
from castwise.records.schema import Status
from castwise.records.store import load_folder
from castwise.registry.precisions import PRECISIONS, this_cpu
from castwise.telemetry.gpu import GpuUnreadableError

ALL = [row.name for row in PRECISIONS]
GOES_ON = "Interrupted. What was measured is in '{}'; the same command goes on from there."


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ((), 0),
        (("ok",), 0),
        (("ok", "oom", "unsupported", "diverged"), 0),
        (("ok", "crashed"), 1),
        (("ok", "timeout"), 1),
        (("oom", "unsupported"), 1),
    ],
)
def test_the_exit_code_says_whether_every_trial_has_its_answer(statuses: tuple[Status, ...], code: int) -> None:
    assert exit_code([fake_trial(status=status) for status in statuses]) == code


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("oom", "oom", 0),
        ("crash", "crashed", 1),
        ("timeout", "timeout", 1),
        ("nan", "diverged", 0),
    ],
)
def test_a_fault_is_a_row_of_the_table_and_the_others_are_measured(
    command: CommandLine, kind: str, status: str, code: int
) -> None:
    done = command.run("resnet50", "--rounds", "1", engine=FakeEngine(faults={"fp16-true": Fault(kind)}))
    assert done.code == code
    (row,) = [line for line in done.out.splitlines() if line.startswith("fp16-true")]
    assert row.split()[-1] == status
    assert any(line.startswith(f"{status}: fp16-true") for line in done.out.splitlines())
    assert "Traceback" not in done.out + done.err
    statuses = {trial.spec.precision: trial.status for trial in load_folder(command.results)[0]}
    assert statuses == {name: status if name == "fp16-true" else "ok" for name in ALL}


def test_the_lines_of_the_advised_row_can_be_had_alone(command: CommandLine) -> None:
    answered = command.run("resnet50", "--precision", "fp32,bf16-mixed")
    lines = command.run("resnet50", "--precision", "fp32,bf16-mixed", "--lines")
    assert lines.code == 0
    assert 'precision="bf16-mixed"' in lines.out
    assert "without castwise" not in lines.out, "one of two ways: both would step twice"
    compile(lines.out, "pasted", "exec")
    assert textwrap.indent(lines.out, "    ") in answered.out
    assert "take bf16-mixed" in lines.err
    nothing = command.run("resnet50", "--precision", "fp32", "--lines")
    assert (nothing.code, nothing.out) == (0, "")
    assert nothing.error_lines[-1] == "No lines to paste: there is nothing to change."
    assert command.run("resnet50", "--lines", "--format", "json").code == 2


def test_rounds_on_a_cpu_say_what_ends_them_and_how_many_are_on_record(command: CommandLine) -> None:
    def run(*options: str) -> Outcome:
        machine = FakeEngine(environment=fake_environment(None), exclusive=False)
        return command.run("mnist-cnn", "--precision", "fp32,bf16-mixed", *options, engine=machine)

    budget = "Time limit: 75 s (--budget changes it)."
    first, second, third = run("--rounds", "2"), run("--rounds", "2"), run("--rounds", "2", "--budget", "2min")
    assert budget not in first.error_lines, "the number of rounds is named"
    recorded = "4 trials of earlier rounds are on record already."
    assert second.error_lines[0] == third.error_lines[0] == recorded
    ended = "mnist-cnn batch 512: 2 rounds: "
    assert all(run.error_lines[-1].startswith(ended) for run in (first, second, third))
    assert len(second.error_lines) == len(third.error_lines) == 2
    assert second.out == first.out
    assert run("--within", "50%").error_lines[:2] == [recorded, budget]


def test_retry_and_again_measure_recorded_trials(command: CommandLine) -> None:
    faults = {"tf32": Fault("crash"), "fp16-mixed": Fault("oom")}
    first = command.run("resnet50", "--rounds", "1", engine=FakeEngine(faults=faults))
    assert (first.code, "Traceback (fake)" in first.err) == (1, False)
    retried = command.run("resnet50", "--rounds", "1", "--retry")
    assert (retried.code, set(retried.engine.measured_precisions)) == (0, {"default", "tf32"})
    again = command.run("resnet50", "--rounds", "1", "--again", "--verbose", engine=FakeEngine(faults=faults))
    assert set(again.engine.measured_precisions) == set(ALL)
    assert "resnet50 tf32 batch 256 printed:\nTraceback (fake)\n" in again.err
    precisions = [trial.spec.precision for trial in load_folder(command.results)[0]]
    assert (precisions.count("tf32"), precisions.count("fp16-true")) == (3, 2), "none replaces another"


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_leaves_what_was_measured_and_says_how_to_go_on(command: CommandLine, phase: str) -> None:
    # Session 1 looks at the machine, 2 and 3 are the first round, 4 and 5 the second.
    arguments = ("resnet50", "--precision", "fp32,tf32", "--rounds", "2")
    done = command.run(*arguments, engine=FakeEngine(faults={"#5": Fault("interrupt", phase)}))
    assert done.code == INTERRUPTED
    assert [line.split()[0] for line in done.out.splitlines()[2:4]] == ["fp32", "tf32"], (
        "the table of what was measured"
    )
    assert done.error_lines[-1] == GOES_ON.format(command.results)
    assert "Traceback" not in done.err
    assert "Not measured" not in done.err
    assert configurations(command.results) == [("fp32", 0), ("tf32", 0)]
    rest = command.run(*arguments)
    assert rest.code == 0
    assert {(spec.precision, spec.repeat) for spec in rest.engine.measured} == {("fp32", 1), ("tf32", 1)}


def test_an_interrupt_names_what_was_not_measured(command: CommandLine) -> None:
    command.run("resnet50", "--precision", "fp32,tf32", "--rounds", "1")
    more = ("--precision", "fp32,tf32,bf16-mixed", "--rounds", "1")
    done = command.run("resnet50", *more, engine=FakeEngine(faults={"bf16-mixed": Fault("interrupt")}))
    assert done.code == INTERRUPTED
    assert "Not measured: bf16-mixed, as you interrupted." in done.err


def test_an_interrupt_before_the_first_record_says_so(command: CommandLine) -> None:
    done = command.run("resnet50", "--rounds", "1", engine=FakeEngine(faults={"#2": Fault("interrupt")}))
    assert (done.code, done.error_lines[-1]) == (INTERRUPTED, "Interrupted before anything was measured.")


def test_an_interrupt_of_again_does_not_promise_to_go_on_with_again(command: CommandLine) -> None:
    arguments = ("resnet50", "--precision", "fp32,tf32", "--rounds", "2")
    done = command.run(*arguments, "--again", engine=FakeEngine(faults={"#4": Fault("interrupt")}))
    assert done.code == INTERRUPTED
    assert done.error_lines[-1].endswith("; the same command without --again goes on from there.")
    assert len(command.run(*arguments).engine.measured) == 2


def test_a_file_that_is_no_record_is_named_and_stays(command: CommandLine) -> None:
    command.run("resnet50", "--precision", "fp32", "--rounds", "1")
    (record,) = command.records()
    file = record.with_name("alien.json")
    file.write_text('{"name": "something else"}')
    done = command.run("resnet50", "--precision", "fp32", "--rounds", "1")
    assert (done.code, done.engine.measured) == (0, [])
    assert done.error_lines[0].startswith(f"Left as it is: {file}: ")
    assert file.read_text() == '{"name": "something else"}'


def test_a_disk_that_fills_up_is_exit_code_3_and_keeps_the_whole_records(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, list[int]()

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 4:  # two a record: the file and its folder
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    done = command.run("resnet50", "--rounds", "1")
    assert (done.code, done.out) == (3, "")
    assert done.error_lines[-1].startswith("castwise: The record of resnet50 tf32 batch 256 cannot be written to")
    assert done.error_lines[-1].endswith("No space left on device.")
    monkeypatch.undo()
    assert configurations(command.results) == [("default", 0), ("fp32", 0)]
    assert len(command.records()) == 2


def test_doctor_shows_the_machine_and_its_precisions(command: CommandLine) -> None:
    done = command("doctor", engine=FakeEngine(environment=fake_environment((7, 5))))
    assert (done.code, done.err) == (0, "")
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.strip()}
    assert "Fake GPU, 16.0 GiB, 1 in all" in lines["GPU"]
    assert "7.5" in lines["capability"]
    assert "fp16 (Turing)" in lines["trains"]
    assert "native" in lines["fp32"]
    assert lines["precision"].rstrip().endswith("what it is, or why not")
    assert "impossible" in lines["tf32"]
    assert "emulated" in lines["bf16-mixed"]
    assert set(ALL) <= set(lines)
    assert command.records() == []


def test_doctor_shows_what_torch_lacks_for_the_gpu_and_what_others_measured(command: CommandLine) -> None:
    gpu = fake_environment((6, 1), gpu="NVIDIA GeForce GTX 1080 Ti", torch="2.15.0", cuda="13.2")
    lines = [" ".join(line.split()) for line in command("doctor", engine=FakeEngine(environment=gpu)).out.splitlines()]
    text = " ".join(lines)
    assert "torch 2.15.0 for CUDA 13.2 has no kernels for Pascal: install PyTorch up to 2.14, for CUDA 12.6" in text
    assert "products measured fp32 10.1, fp16 9.6, bf16 5.4 TFLOP/s in PyTorch, by others" in text
    assert any(line.startswith("fp16-mixed no faster") for line in lines)


def test_doctor_shows_every_gpu_or_the_cpu(command: CommandLine) -> None:
    two = FakeEngine(environment=fake_environment(num_gpus=2), devices=("cuda:1",))
    out = command("doctor", engine=two).out
    assert (out.count("Fake GPU, "), out.count("torchvision"), out.count("\nGPU 1\n")) == (2, 1, 1)
    done = command("doctor", engine=FakeEngine(environment=fake_environment(None)))
    assert done.code == 0
    assert "none that torch can use" in done.out
    assert "impossible" in done.out
    assert done.out.count(this_cpu().name) == 1, "the device is named once"
    assert "CPU is a CPU" not in done.out
    assert all(line == line.rstrip() for line in done.out.splitlines() if not line.strip() or "  " not in line.strip())


def test_doctor_shows_what_the_driver_says_and_what_it_hides(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine(**facts: object) -> tuple[set[str], FakeMonitor]:
        monitor = FakeMonitor()
        monkeypatch.setattr(monitor, "facts", lambda: fake_gpu_facts(**facts))
        monkeypatch.setattr(doctor, "open_monitor", lambda uuid: monitor)
        done = command("doctor", engine=FakeEngine(environment=fake_environment(gpu_uuid=UUID)))
        return {" ".join(line.split()) for line in done.out.splitlines()}, monitor

    lines, monitor = examine()
    assert {"power limit 700 W", "highest clock 1980 MHz", "persistence on"} <= lines
    assert "ECC on, 0 uncorrected errors since the driver was loaded" in lines
    assert monitor.was_closed
    lines, _ = examine(power_limit_watts=None, persistence_mode=False, missing={"power_limit_watts": "denied"})
    assert {"power limit not available: denied", "persistence off (nvidia-smi -pm 1)"} <= lines


def test_doctor_says_why_the_driver_cannot_be_read(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uuid: str) -> FakeMonitor:
        raise GpuUnreadableError("no NVML (fake)")

    monkeypatch.setattr(doctor, "open_monitor", refuse)
    done = command("doctor", engine=FakeEngine(environment=fake_environment(gpu_uuid=UUID)))
    assert (done.code, "not available: no NVML (fake)" in done.out) == (0, True)


def test_a_price_adds_what_an_epoch_costs(command: CommandLine) -> None:
    done = command.run("resnet50", "--precision", "fp32", "--price-gpu-hour", "2.5")
    assert (done.code, "in GPU hours" in done.out) == (0, True)


@pytest.mark.parametrize("option", ["--price-gpu-hour", "--price-kwh"])
def test_a_price_on_a_cpu_is_refused_before_anything_is_measured(command: CommandLine, option: str) -> None:
    done = command.run("resnet50", "--precision", "fp32", "--device", "cpu", option, "2.5")
    assert (done.code, done.out, list(command.results.rglob("*.json"))) == (2, "", [])
    assert "Prices are for GPUs, and this is a CPU." in done.err


def configurations(results: Path) -> list[tuple[str, int]]:
    """Return the precisions and repeats on record, in order."""
    trials, problems = load_folder(results)
    assert problems == []
    return sorted((trial.spec.precision, trial.spec.repeat) for trial in trials)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_stops_a_run_cleanly_and_the_next_completes_the_rest(
    number: signal.Signals, tmp_path: Path, command: CommandLine
) -> None:
    # Sessions 2 to 4 are the first round; 5 and 6, without the one that crashed, the second.
    arguments = ("--precision", "fp32,tf32,bf16-mixed", "--rounds", "2")
    with hanging_fake_cli(tmp_path / "results", *arguments, faults="#6=hang@run_block,tf32=crash") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == INTERRUPTED
    assert all(name in out for name in ("images/s", "fp32", "tf32", "bf16-mixed"))
    lines = err.splitlines()
    assert [": crashed" in line for line in lines[:-1]] == [False, True, False]
    assert lines[-1] == GOES_ON.format(tmp_path / "results")
    assert configurations(tmp_path / "results") == [("bf16-mixed", 0), ("fp32", 0), ("tf32", 0)]
    assert not list((tmp_path / "results").rglob(".*"))
    rest = command.run("resnet50", *arguments)
    assert {(spec.precision, spec.repeat) for spec in rest.engine.measured} == {("fp32", 1), ("bf16-mixed", 1)}
    assert rest.error_lines[0] == "3 trials of earlier rounds are on record already."


def test_a_signal_while_the_machine_is_looked_at_is_clean_too(tmp_path: Path) -> None:
    with hanging_fake_cli(tmp_path / "results", faults="#1=hang@open") as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (INTERRUPTED, "")
    assert err.splitlines() == ["Interrupted before anything was measured."]


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    ignoring = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    with hanging_fake_cli(tmp_path / "results", faults="tf32=hang", before=ignoring) as process:
        status = Path(f"/proc/{process.pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], base=16)
        assert ignored & 1 << (signal.SIGHUP - 1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == INTERRUPTED


def test_a_run_that_is_killed_outright_loses_only_its_running_round(tmp_path: Path, command: CommandLine) -> None:
    arguments = ("--precision", "fp32,tf32", "--rounds", "2")
    with hanging_fake_cli(tmp_path / "results", *arguments, faults="#5=hang") as process:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGKILL
    rest = command.run("resnet50", *arguments)
    assert {(spec.precision, spec.repeat) for spec in rest.engine.measured} == {("fp32", 1), ("tf32", 1)}


def test_signal_handlers_are_given_back(command: CommandLine) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    command.run("resnet50", "--precision", "fp32", "--rounds", "1")
    command.run("resnet50", "--rounds", "1", "--again", engine=FakeEngine(faults={"#2": Fault("interrupt")}))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_narrow_terminal_is_no_crash(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stdout for a terminal
    monkeypatch.setenv("COLUMNS", "60")
    done = command.run("resnet50", engine=FakeEngine(faults={"fp16-true": Fault("nan"), "tf32": Fault("oom")}))
    assert done.code == 0
    assert "Traceback" not in done.out + done.err
    assert "bf16-mixed" in done.out


@pytest.fixture
def train_me(tmp_path: Path) -> str:
    file = tmp_path / "train_me.py"
    file.write_text("raise AssertionError('the parent imported it')\n")
    return f"{file}:build"


def test_a_user_model_is_measured_in_every_precision(command: CommandLine, train_me: str) -> None:
    done = command.run(train_me)
    assert done.code == 0
    assert set(done.engine.measured_precisions) == set(ALL)
    assert {spec.user_model.digest for spec in done.engine.measured if spec.user_model} == {FAKE_DIGEST}
    assert {spec.batch_size for spec in done.engine.measured} == {16}
    assert done.out.startswith("train_me.py:build, batch 16\n")
    assert "train_me.py:build, batch 16: take bf16-mixed" in done.out
    assert '# Lightning: Trainer(precision="bf16-mixed")' in done.out
    again = command.run(train_me)
    assert again.engine.measured == []
    # fp16-true is twice as fast as the default, which one process shows.
    assert f"{3 * len(ALL) - 2} trials of earlier rounds are on record already" in again.err


def test_an_error_of_a_users_code_is_one_line_and_its_traceback_on_demand(command: CommandLine, train_me: str) -> None:
    words = "ZeroDivisionError: division by zero (train_me.py:2, in build)"
    engine = FakeEngine(own=TrialFailedError("crashed", words, "Traceback …\n  their own lines", True))
    done = command.run(train_me, engine=engine)
    assert (done.code, done.out, done.error_lines) == (2, "", [f"castwise: {words}"])
    verbose = command.run(train_me, "--verbose", engine=engine)
    assert (verbose.code, verbose.out) == (2, "")
    assert verbose.error_lines == ["Traceback …", "  their own lines", f"castwise: {words}"]
    assert command.records() == []


def test_a_refused_user_model_ends_the_run_in_one_line(command: CommandLine, train_me: str) -> None:
    engine = FakeEngine(faults={"tf32": Fault("refused")})
    done = command.run(train_me, engine=engine)
    assert (done.code, done.out) == (2, "")
    assert done.error_lines[-1] == "castwise: The loss has shape (4,): it must be a scalar (fake)"
    assert command.records() == []
