import io
import re

import pytest
from conftest import CommandLine
from fake_engine import FakeEngine, fake_spec, fake_training, fake_trial
from programs import wait_until
from rich.console import Console

from castwise.cli import measuring
from castwise.orchestrator.runner import Listener
from castwise.records.schema import Trial
from castwise.registry.suites import LIMIT_STEPS
from castwise.show import progress as live
from castwise.show.progress import LiveProgress


def piped() -> Console:
    return Console(file=io.StringIO(), highlight=False)


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, color_system=None)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def play(listener: Listener, status: str = "ok", message: str = "", workload: str = "resnet50") -> None:
    for index, precision in enumerate(("fp32", "bf16-mixed"), start=1):
        spec = fake_spec(precision, workload=workload)
        listener.started(spec, index, 2)
        for name, done in (("starting", 0.0), ("warming up", 0.1), ("timing", 0.3), ("timing", 1.0)):
            listener.phase(name, done)
        listener.ended(fake_trial(spec).model_copy(update={"status": status, "message": message}))


def test_a_pipe_gets_a_line_a_trial() -> None:
    console = piped()
    with LiveProgress(console) as progress:
        play(progress)
        play(progress, "oom", "CUDA out of memory. [bold]Tried[/bold] :smile:", "timm:" + "x" * 200)
    first, second, bad, _ = said(console).splitlines()
    assert first == "trial 1 of 2: resnet50 fp32 batch 256: 2,560 images/s (1 s)"
    assert second == "trial 2 of 2: resnet50 bf16-mixed batch 256: 2,560 images/s, 1.00× fp32 (1 s)"
    assert bad.endswith(" fp32 batch 256: oom (1 s): CUDA out of memory. [bold]Tried[/bold] :smile:")


@pytest.mark.parametrize("width", [20, 200])
def test_a_terminal_shows_a_table_and_a_bar_and_keeps_a_line_for_failures(width: int) -> None:
    console = terminal(width)
    with LiveProgress(console) as progress:
        play(progress)
    text = said(console)
    assert "\x1b[?25l" in text
    assert text.endswith("\x1b[1A\x1b[2K"), "the table is printed once more with the answer"
    assert "256: ok" not in text
    if width == 200:
        assert "trial 2 of 2  resnet50 bf16-mixed batch 256  timing" in text
        assert "left" in text
    with LiveProgress(console) as progress:
        play(progress, "crashed", "RuntimeError: [red]x[/red]")
    assert "resnet50 fp32 batch 256: crashed: RuntimeError: [red]x[/red]" in " ".join(said(console).split())


def test_the_time_of_an_interleaved_session_is_reported_once() -> None:
    console = piped()
    with LiveProgress(console) as progress:
        ends = [("ok", "a", 12.0), ("oom", "a", 3.0), ("diverged", "a", 11.0), ("ok", "b", 20.0), ("ok", None, 5.0)]
        for index, (status, session, seconds) in enumerate(ends, start=1):
            progress.started(fake_spec(), index, 0)
            update = {"status": status, "session_id": session, "duration_seconds": seconds}
            progress.ended(fake_trial().model_copy(update=update))
    assert [line.partition("256: ")[2].removesuffix(": ") for line in said(console).splitlines()] == [
        "2,560 images/s (12 s)",
        "oom (3 s)",
        "diverged",
        "2,560 images/s (20 s)",
        "2,560 images/s (5 s)",
    ]


def test_the_bar_is_removed_after_an_interrupt() -> None:
    console = terminal()
    progress = LiveProgress(console)

    def break_off() -> None:
        with progress:
            progress.started(fake_spec(), 1, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert "\x1b[?25h" in said(console), "the cursor must come back"


def test_an_interrupted_job_leaves_its_table() -> None:
    console = terminal(100)
    progress = LiveProgress(console)
    progress.known([fake_trial(fake_spec("fp32"))])

    def break_off() -> None:
        with progress:
            progress.started(fake_spec("bf16-mixed"), 1, 2)
            progress.ended(fake_trial(fake_spec("bf16-mixed")))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    end = said(console).rpartition("\x1b[2K")[2]
    assert "fp32 " in end, "what was on record is in the table, too"
    assert "bf16-mixed " in end


@pytest.mark.parametrize(
    ("budget_seconds", "left"), [(None, ["at least 50 s left"]), (25.0, ["at most 15 s left", "time is up"])]
)
def test_the_time_left_is_a_bound_and_never_stands_at_nothing(
    budget_seconds: float | None, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("castwise.show.progress.time.monotonic", lambda: now[0])
    console = terminal(100)
    with LiveProgress(console) as progress:
        progress.known([], budget_seconds)
        progress.started(fake_spec(), 1, 21)
        for done in (3.5, 21.0):  # a session counts for all its trials
            now[0] += 10.0 + (done == 21.0) * 50.0
            progress.phase("round 1: timing", done)
            progress.remark("")
    assert re.findall(r"(?:about|at \w+) [\d ]+s left|time is up", said(console)) == left


def test_a_command_that_begins_anew_counts_each_record_once() -> None:
    def trial(repeat: int) -> Trial:
        return fake_trial(fake_spec("fp32", repeat=repeat), step_seconds=(0.1 + 0.01 * repeat,))

    tables = []
    for times in (1, 2):
        console = terminal(100)
        with LiveProgress(console) as progress:
            for _ in range(times):
                progress.known([trial(0), trial(1)])
            progress.started(fake_spec("fp32", repeat=2), 1, 3)
            progress.ended(trial(2))
        tables.append(re.findall(r"fp32 .*", said(console)))
    assert tables[0] == tables[1] != []


def test_a_second_job_has_a_bar_again() -> None:
    progress = LiveProgress(terminal())
    with progress:  # a second sweep in the same process
        play(progress)


@pytest.mark.parametrize("console", [piped(), terminal(120)], ids=["piped", "terminal"])
def test_a_search_of_unknown_length_says_that_it_is_one(console: Console) -> None:
    with LiveProgress(console) as progress:
        for index in (1, 2):
            spec = fake_training(recipe={"max_steps": LIMIT_STEPS, "stop_after": 1}, batch_size=128 * index)
            progress.started(spec, index, 0)
            progress.phase("epoch 1 of 1", 0.5)
            progress.ended(fake_trial(spec, status="oom", message="full", step_seconds=()))
    text = said(console)
    assert "search for the largest batch, trial 2" in text
    assert "of 0" not in text
    assert " left" not in text


def test_a_pipe_gets_a_line_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_SILENCE_SECONDS", 0.02)
    console = piped()
    progress = LiveProgress(console)
    for phase in ("warming up", "timing"):  # a second sweep in the same process
        with progress:
            progress.started(fake_spec(), 1, 2)
            progress.phase(phase, 0.1)
            wait_until(lambda: said(console).count(phase) > 1, f"a line about {phase}")  # noqa: B023  called at once
    assert said(console).startswith("trial 1 of 2: resnet50 fp32 batch 256: warming up, ")


def test_getting_ready_names_its_phase_and_what_will_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MOMENT_SECONDS", 0.01)
    console = terminal(40)
    progress = LiveProgress(console)
    with measuring.looking(progress, "Measuring fp32 on a CPU."):
        progress.phase("timing a step", 0.0)
        wait_until(lambda: progress.has_outlook and "timing a step" in said(console), "the outlook and the phase")
    with measuring.looking(progress, "again"):
        pass
    assert "Measuring fp32 on a CPU." in said(console)
    assert "again" not in said(console)


def test_a_run_prints_no_progress_wider_than_80_columns(command: CommandLine) -> None:
    for more in ((), ("--budget", "60s"), ("--rounds", "1", "--again")):
        done = command("run", "resnet50", *more, "--results", command.results, engine=FakeEngine(exclusive=False))
        assert [line for line in done.error_lines if len(line) > 80] == []
        assert any("round" in line for line in done.error_lines)


def test_a_terminal_wraps_lines_at_words() -> None:
    console = terminal(40)
    with LiveProgress(console) as progress:
        progress.remark("resnet50 batch 256: 5 rounds, the limit: not every speed-up is clear within 1 %")
    assert "resnet50 batch 256: 5 rounds, the limit:\nnot every" in re.sub(r" +\n", "\n", said(console))
