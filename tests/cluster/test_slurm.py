"""A plan on Slurm: submitit's job arrays on a Slurm of one machine, with castwise on its fake engine as each job."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import fake_cli
import fake_slurm
import pytest
from conftest import CommandLine, Outcome
from programs import MEETS, PATIENCE_SECONDS, SOURCES, Program, wait_until

from castwise.cluster import shard, slurm
from castwise.records.store import load_folder, lock_all

submitit = pytest.importorskip("submitit")
REQUEST = ("resnet50", "--precision", "fp32,bf16-mixed", "--rounds", "1")

SKEWED = """
import atexit, os, runpy, sys, time
from datetime import UTC, datetime
from pathlib import Path
from castwise.orchestrator import runner
off, clock = (-1) ** int(os.environ["SLURM_ARRAY_TASK_ID"]) * 86400, time.time
time.time = lambda: clock() + off
runner._now = lambda: datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
results = Path(sys.argv[sys.argv.index("--results") + 1])
atexit.register(lambda: [os.utime(file, (time.time(),) * 2) for file in results.rglob("*") if file.is_file()])
sys.argv[0] = {fake_cli!r}
runpy.run_path({fake_cli!r}, run_name="__main__")
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of a fake Slurm's state; its commands are on the PATH."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    fake_slurm.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCES), str(Path(fake_cli.__file__).parent)]))
    monkeypatch.setattr(fake_slurm, "STATE", folder)
    monkeypatch.setattr(shard, "PROGRAM", (fake_cli.__file__,))
    monkeypatch.setattr(slurm, "_LATE_SECONDS", 0.3)
    monkeypatch.setattr(slurm, "_LOOK_SECONDS", 0.1)
    yield folder
    fake_slurm.scancel(*(file.stem for file in folder.glob("*.sh")))


def on_slurm(command: CommandLine, *arguments: str | Path) -> Outcome:
    return command.run(*REQUEST, "--on", "slurm", *arguments)


def keys(folder: Path) -> list[str]:
    trials, problems = load_folder(folder)
    assert problems == []
    return sorted(trial.spec.key for trial in trials if trial.status == "ok")


def test_an_array_measures_the_plan(command: CommandLine, state: Path) -> None:
    found = on_slurm(command, "--batch-size", "8,16", "--partition", "gpu", "--nodes", "1", "--sbatch", "time=30,x")
    assert found.code == 0
    assert found.engine.measured == [], "not here"
    assert len(set(keys(command.results))) == len(keys(command.results)) == 4
    assert "resnet50" in found.out
    assert "shards: 0 wait, 0 run, 2 ended; 4 records" in found.err
    script = (state / "100.sh").read_text()
    for line in ("--array=0-1%1", "--partition=gpu", "--exclusive", "--gres=gpu:1", "--time=30", "--x"):
        assert f"#SBATCH {line}\n" in script.replace("'", "")
    again = on_slurm(command, "--batch-size", "8,16")
    assert again.code == 0
    assert "2 of 2 shards have ended already" in again.err
    assert [file.name for file in state.glob("*.sh")] == ["100.sh"], "nothing is submitted again"


@pytest.mark.slow
@pytest.mark.parametrize(("num_losses", "calls"), [(1, "NODE_FAIL on node100"), (2, "NODE_FAIL on"), (2, "gone, and")])
def test_a_lost_job_is_tried_once_more(
    num_losses: int, calls: str, command: CommandLine, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch script kills itself, as the end of a node would; Slurm lists jobs that are over, or not."""
    if calls.startswith("gone"):
        (state / "forgets").touch()
    as_it_is = fake_slurm.__file__
    script = (
        Path(as_it_is)
        .read_text()
        .replace('["bash", STATE', f'["bash", *(["-c", "kill -9 $$"] if int(job) < {100 + num_losses} else []), STATE')
    )
    (state / "fake.py").write_text(script)
    monkeypatch.setattr(fake_slurm, "__file__", str(state / "fake.py"))
    fake_slurm.install(state / "bin")
    monkeypatch.setenv("PATH", f"{state / 'bin'}{os.pathsep}{os.environ['PATH']}")
    found = on_slurm(command, "--batch-size", "8")
    assert f"was lost and is tried again: Slurm calls job 100 {calls}" in found.err
    trials, _ = load_folder(command.results)
    assert len(trials) == 2
    if num_losses == 1:
        assert found.code == 0
        assert {trial.status for trial in trials} == {"ok"}
        return
    assert found.code == 1
    assert {trial.status for trial in trials} == {"crashed"}
    assert "lost 2 times" in trials[0].message
    again = on_slurm(command, "--batch-size", "8")
    assert (again.code, len(list(state.glob("*.sh")))) == (1, 2), "a crash is a result"
    retried = on_slurm(command, "--batch-size", "8", "--retry")
    assert (retried.code, len(list(state.glob("*.sh")))) == (0, 3)
    assert len(keys(command.results)) == 2


def test_a_result_that_a_shared_folder_shows_late(
    command: CommandLine, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_LATE_SECONDS", PATIENCE_SECONDS)
    now, num_seen = os.listdir, Counter[str]()

    def late(folder: Path) -> list[str]:
        num_seen.update(now(folder))
        return [name for name in now(folder) if num_seen[name] > 6]

    monkeypatch.setattr(slurm, "os", SimpleNamespace(listdir=late, getcwd=os.getcwd, getuid=os.getuid))
    found = on_slurm(command, "--batch-size", "8")
    assert (found.code, len(list(state.glob("*.sh")))) == (0, 1)
    assert len(keys(command.results)) == 2
    assert "lost" not in found.err


def test_clocks_of_nodes_may_differ(
    command: CommandLine, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks of the two jobs are a day before and behind this one, and times of files are, too."""
    (tmp_path / "skewed.py").write_text(SKEWED.format(fake_cli=fake_cli.__file__))
    monkeypatch.setattr(shard, "PROGRAM", (str(tmp_path / "skewed.py"),))
    for again in (False, True):
        found = on_slurm(command, "--batch-size", "8,16", *(["--again"] if again else []))
        assert (found.code, "lost" in found.err) == (0, False)
    assert len(keys(command.results)) == 8
    days = {trial.started_at[:10] for trial in load_folder(command.results)[0]}
    assert len(days) >= 2
    followed = on_slurm(command, "--batch-size", "8,16")
    assert "2 of 2 shards have ended already" in followed.err
    with ExitStack() as first, ExitStack() as second:
        assert lock_all([tmp_path / "lock"], first) is None
        for moment in (1, time.time() + 1e6):
            os.utime(tmp_path / "lock", (moment, moment))
            assert "measures the same" in str(lock_all([tmp_path / "lock"], second)), "no lock grows old"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_the_same_command_follows_jobs_whose_submitter_died(
    number: signal.Signals, command: CommandLine, state: Path, program: Program
) -> None:
    arguments = [*REQUEST, "--batch-size", "8,16", "--nodes", "1", "--on", "slurm", "--results", str(command.results)]
    first = program.start(fake_cli.__file__, "run", *arguments)
    wait_until(lambda: list(command.results.rglob("journal")), "a journal")
    wait_until(lambda: '"started"' in next(command.results.rglob("journal")).read_text(), "a job")
    first.send_signal(number)
    _, said = first.communicate()
    if number == signal.SIGINT:
        assert first.returncode == 130
        assert "Slurm's jobs go on. The same command follows them; `scancel 100` ends them." in said
    second = on_slurm(command, "--batch-size", "8,16", "--nodes", "1")
    assert second.code == 0
    assert [file.name for file in state.glob("*.sh")] == ["100.sh"]
    assert len(set(keys(command.results))) == len(keys(command.results)) == 4
    wait_until(lambda: not program.alive(), "the end of all processes")


def test_ctrl_c_in_a_terminal_offers_to_cancel(command: CommandLine, state: Path, program: Program) -> None:
    (state / "halt").touch()
    user, terminal = os.openpty()
    arguments = [*REQUEST, "--batch-size", "8,16", "--on", "slurm", "--results", str(command.results)]
    with os.fdopen(user, "wb") as keys_of, os.fdopen(terminal, "rb") as stdin:
        process = program.start(fake_cli.__file__, "run", *arguments, stdin=stdin)
        wait_until(lambda: "RUNNING" in "".join(each.read_text() for each in state.glob("100_*")), "a job")
        wait_until(lambda: '"started"' in next(command.results.rglob("journal")).read_text(), "the journal")
        process.send_signal(signal.SIGINT)
        keys_of.write(b"y\n")
        keys_of.flush()
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert "Cancel jobs 100, too? (y/N)" in said
    assert "Cancelled: 100." in said
    assert {(state / f"100_{n}").read_text() for n in (0, 1)} == {"CANCELLED"}
    wait_until(lambda: not program.alive(), "the end of all processes")


def test_a_submission_that_slurm_refuses_is_a_line(command: CommandLine, state: Path) -> None:
    found = on_slurm(command, "--sbatch", "partition=none")
    assert found.code == 1
    assert found.error_lines[-1] == (
        "castwise: Slurm does not take the jobs: sbatch: error: invalid partition specified: none"
    )


def test_jobs_that_no_journal_names_are_cancelled(command: CommandLine, state: Path) -> None:
    """A process died between sbatch and its journal."""
    found = on_slurm(command, "--batch-size", "8")
    (journal,) = command.results.rglob("journal")
    digest = journal.parent.name.removesuffix("-slurm")
    journal.write_text('{"task": [0, ""], "event": "submitting", "detail": ""}\n{"task": [1, "')
    (state / "101.sh").write_text("sleep 60")
    (state / "101.name").write_text(f"castwise-{digest}")
    (state / "101").write_text("PENDING")
    found = on_slurm(command, "--batch-size", "8")
    assert found.code == 0, found.err
    assert (state / "101").read_text() == "CANCELLED"
    assert len(keys(command.results)) == 2, "the records answer the new job"


def test_a_job_has_the_nodes_of_its_trials(
    command: CommandLine, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meets.py").write_text(MEETS.format(count=2))
    monkeypatch.setattr(shard, "PROGRAM", (str(tmp_path / "meets.py"), "2"))
    found = on_slurm(command, "--batch-size", "8,16", "--gpus", "16", "--nodes-per-trial", "2", "--nodes", "4")
    assert "2 done" in found.err
    script = (state / "100.sh").read_text().replace("'", "")
    assert all(f"#SBATCH --{line}\n" in script for line in ("nodes=2", "gres=gpu:8", "array=0-1%2"))


def test_a_packed_job_leaves_other_gpus_to_others(
    command: CommandLine, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "PROGRAM", ("-c", "import sys; print({}); assert '--pack' in sys.argv"))
    assert "1 done" in on_slurm(command, "--batch-size", "8", "--pack").err
    script = (state / "100.sh").read_text()
    assert "--exclusive" not in script
    assert "gres=gpu:1" in script


def test_a_refusal_is_not_tried_again(command: CommandLine, state: Path) -> None:
    found = command.run("resnet50", "--precision", "fp32", "--device", "cuda:7", "--on", "slurm")
    assert found.code == 2
    assert "was refused on" in found.err
    assert "cuda:7" in found.err
    assert len(list(state.glob("*.sh"))) == 1


def test_what_slurm_needs(command: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "There is no sbatch here" in on_slurm(command).err
    monkeypatch.setitem(sys.modules, "submitit", None)
    found = on_slurm(command)
    assert (found.code, found.err) == (2, "castwise: --on slurm needs submitit: pip install 'castwise[slurm]'.\n")
    assert not command.results.exists()


def test_a_shard_ends_with_the_process_that_started_it(program: Program, tmp_path: Path) -> None:
    code = f"""
import time
from castwise.cluster.shard import ShardProcess
shard = ShardProcess(["-c", "import time; open('started', 'w'); time.sleep(3600)"], {str(tmp_path)!r})
print("there", flush=True)
time.sleep(3600)
"""
    process = program.start_script(code)
    program.wait_for_line("there")
    wait_until((tmp_path / "started").exists, "the shard")
    assert len(program.alive()) == 2
    process.kill()
    wait_until(lambda: not program.alive(), "the end of the shard")
