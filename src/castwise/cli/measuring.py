"""What the commands that measure share: what they announce, progress and interruption."""

import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

import typer

from castwise.cli.options import PrintOptions
from castwise.cli.output import error_console, say
from castwise.errors import UsageError
from castwise.orchestrator.job import Job
from castwise.orchestrator.machine import FindMachine, MachineChangedError, cached_machine, detect_machine
from castwise.records.schema import Trial
from castwise.show.progress import LiveProgress
from castwise.show.units import pluralize
from castwise.spec.options import DEFAULT_RESULTS, SharedOptions

INTERRUPTED = 130
FAILED = 1
REPORT = "castwise report"
MOMENT_SECONDS = 1.0  # what all being on record takes at most; then the outlook is printed. Source: chosen here

_Result = TypeVar("_Result")
_Found_co = TypeVar("_Found_co", covariant=True)
_Options = TypeVar("_Options", bound=SharedOptions)


def say_logs(trials: Sequence[Trial]) -> None:
    for trial in trials:
        if trial.log:
            say(f"{trial.spec.label} printed:\n{trial.log.rstrip()}")


def exit_code(trials: Sequence[Trial]) -> int:
    """Return 0 if every trial has its answer, 1 if one crashed or hung, or none ended well.

    To diverge, to run out of memory, and an unsupported precision are answers.
    """
    statuses = {trial.status for trial in trials}
    return FAILED if statuses & {"crashed", "timeout"} or (statuses and "ok" not in statuses) else 0


def announce(job: Job) -> None:
    """Print what `announce_notes` does, and how many trials are on record, before a job starts."""
    announce_notes(job)
    found = len(job.specs) - len(job.missing)
    if found and job.rule is not None:
        say(f"{len(job.recorded)} trials of earlier rounds are on record already.")
    elif found:
        say(f"{found} of {len(job.specs)} trials are on record already; measuring {len(job.missing)}.")


def announce_notes(job: Job) -> None:
    for note in job.notes:
        say(f"Note: {note}", style="yellow")
    for problem in job.problems:
        say(f"Left as it is: {problem.path}: {problem.reason}", style="yellow")


@contextmanager
def measuring(options: SharedOptions, output: PrintOptions) -> Iterator[LiveProgress]:
    """Yield the progress on stderr, and end an interrupted command with exit code 130 and a line on how to go on.

    SIGTERM and SIGHUP are treated like Ctrl-C, so that a batch system's stop is as clean as a user's. A signal that is
    ignored (as `nohup` does) stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        try:
            yield LiveProgress(error_console())
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    except KeyboardInterrupt:
        same = "the same command without --again" if options.again else "the same command"
        has_records = options.results is not None and any(options.results.rglob("*.json"))
        where = f". What was measured is in '{options.results}'; {same} goes on from there."
        say(f"Interrupted{where if has_records else ' before anything was measured.'}")
        raise typer.Exit(INTERRUPTED) from None
    except UsageError as error:
        if output.verbose and error.details:
            say(error.details.rstrip())
        raise


def next_step(results: Path | None, num_results: int, command: str = REPORT) -> str:
    """Return a line on where the results are, and which command is next; empty if no records are kept."""
    if results is None:
        return ""
    where = f"{pluralize(num_results, 'result')} in {results}/. Next:"
    if command == REPORT and results != DEFAULT_RESULTS:  # on a line of its own, to be copied
        return f"{where}\n{command} {shlex.quote(str(results))}"
    return f"{where} {command}"


@contextmanager
def looking(progress: LiveProgress | None = None, outlook: str = "") -> Iterator[LiveProgress]:
    """Show that a command gets ready, if stderr is a terminal: below what its progress prints meanwhile.

    If that takes more than a moment, as it does unless all is on record, the outlook is printed.
    """
    progress = progress or LiveProgress(error_console())

    def look_out() -> None:
        progress.has_outlook = True
        progress.remark(outlook)

    timer = threading.Timer(MOMENT_SECONDS, look_out)
    try:
        with progress.console.status("getting ready") if progress.console.is_terminal else nullcontext() as status:
            progress.status = status
            if outlook and not progress.has_outlook:
                timer.start()
            yield progress
    finally:
        progress.status = None
        timer.cancel()


def answer(options: SharedOptions, work: Callable[[FindMachine], _Result]) -> _Result:
    """Return what a request comes to on the machine that earlier commands found, or that a process finds now.

    Work that learns from its first process that the machine has changed since begins again: nothing is measured yet.
    """
    if options.results is None or options.again:
        return work(detect_machine)
    try:
        return work(cached_machine)
    except MachineChangedError:
        return work(detect_machine)


class _Search(Protocol[_Found_co]):
    @property
    def job(self) -> Job: ...

    def run(self) -> _Found_co: ...


def search(
    options: _Options,
    progress: LiveProgress,
    prepare: Callable[[_Options, LiveProgress, FindMachine], _Search[_Found_co]],
    announce: Callable[[Job], None] = announce_notes,
    find_machine: FindMachine | None = None,
    outlook: str = "",
) -> tuple[Job, _Found_co]:
    """Return what answers a request, and the job that it is made of; by default on the machine that `answer` finds."""

    def work(find_machine: FindMachine) -> tuple[Job, _Found_co]:
        with looking(progress, outlook):
            made = prepare(options, progress, find_machine)
        announce(made.job)
        with progress:
            return made.job, made.run()

    return answer(options, work) if find_machine is None else work(find_machine)
