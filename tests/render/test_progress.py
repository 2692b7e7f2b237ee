import io

import pytest
from fake_engine import fake_spec, fake_training, fake_trial
from rich.console import Console

from castwise.orchestrator.runner import Listener
from castwise.registry.suites import LIMIT_STEPS
from castwise.render.progress import LiveProgress


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


def test_where_there_is_no_terminal_each_trial_is_a_line() -> None:
    console = piped()
    with LiveProgress(console) as progress:
        play(progress)
    assert said(console).splitlines() == [
        "trial 1 of 2: resnet50 fp32 batch 256: ok (1 s)",
        "trial 2 of 2: resnet50 bf16-mixed batch 256: ok (1 s)",
    ]


def test_the_time_of_an_interleaved_session_is_reported_once() -> None:
    console = piped()
    with LiveProgress(console) as progress:
        ends = [("ok", "a", 12.0), ("oom", "a", 3.0), ("diverged", "a", 11.0), ("ok", "b", 20.0), ("ok", None, 5.0)]
        for index, (status, session, seconds) in enumerate(ends, start=1):
            progress.started(fake_spec(), index, 0)
            update = {"status": status, "session_id": session, "duration_seconds": seconds}
            progress.ended(fake_trial().model_copy(update=update))
    assert [line.partition("256: ")[2].removesuffix(": ") for line in said(console).splitlines()] == [
        "ok (in a session of 12 s)",
        "oom (3 s)",
        "diverged (in the same session)",
        "ok (in a session of 20 s)",
        "ok (5 s)",
    ]


def test_a_line_stays_a_line_however_long_it_is() -> None:
    console = piped()
    with LiveProgress(console) as progress:
        play(progress, "timeout", workload="timm:" + "x" * 200)
    assert len(said(console).splitlines()) == 2


def test_where_there_is_no_terminal_a_failure_says_why() -> None:
    console = piped()
    with LiveProgress(console) as progress:
        play(progress, "oom", "CUDA out of memory. [bold]Tried[/bold] :smile:")
    assert said(console).splitlines()[0] == (
        "trial 1 of 2: resnet50 fp32 batch 256: oom (1 s): CUDA out of memory. [bold]Tried[/bold] :smile:"
    )


@pytest.mark.parametrize("width", [20, 60, 200])
def test_a_terminal_shows_a_bar_and_takes_it_away(width: int) -> None:
    console = terminal(width)
    with LiveProgress(console) as progress:
        play(progress)
    assert "\x1b[?25l" in said(console)
    assert said(console).endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_a_terminal_shows_trial_phase_and_the_time_left() -> None:
    console = terminal(200)
    with LiveProgress(console) as progress:
        play(progress)
    text = said(console)
    assert "trial 2 of 2  resnet50 bf16-mixed batch 256  timing" in text
    assert "left" in text


def test_a_terminal_keeps_a_line_for_what_went_wrong() -> None:
    console = terminal(200)
    with LiveProgress(console) as progress:
        play(progress, "crashed", "RuntimeError: [red]x[/red]")
    assert "resnet50 fp32 batch 256: crashed: RuntimeError: [red]x[/red]" in said(console)


def test_what_went_well_leaves_no_line_on_a_terminal() -> None:
    console = terminal(200)
    with LiveProgress(console) as progress:
        play(progress)
    assert "256: ok" not in said(console)


def test_the_bar_is_taken_away_when_the_sweep_breaks_off() -> None:
    console = terminal()
    progress = LiveProgress(console)

    def break_off() -> None:
        with progress:
            progress.started(fake_spec(), 1, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert "\x1b[?25h" in said(console), "the cursor must come back"
    with progress:  # a second sweep in the same process
        play(progress)


def test_it_says_nothing_before_a_trial_starts() -> None:
    console = piped()
    with LiveProgress(console):
        pass
    assert said(console) == ""


@pytest.mark.parametrize("console", [piped(), terminal(120)], ids=["piped", "terminal"])
def test_a_search_of_unknown_length_says_that_it_is_one(console: Console) -> None:
    with LiveProgress(console) as progress:
        for index in (1, 2):
            spec = fake_training(recipe={"max_steps": LIMIT_STEPS}, batch_size=128 * index)
            progress.started(spec, index, 0)
            progress.phase("epoch 1 of 1", 0.5)
            progress.ended(fake_trial(spec, status="oom", message="full", step_seconds=()))
    text = said(console)
    assert "search for the largest batch, trial 2" in text
    assert "of 0" not in text
    assert " left" not in text
