"""What each command does: carry it out, print, and return the exit code."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

from rich.console import Console

from castwise.analysis.advice import recommend
from castwise.analysis.energy import Prices
from castwise.analysis.result_table import MARGIN, compare
from castwise.cli import doctor
from castwise.errors import UsageError
from castwise.max_batch import render as max_batch_render
from castwise.max_batch.search import MaxBatchRequest, prepare_max_batch
from castwise.max_batch.sentences import raise_if_nothing_fits
from castwise.orchestrator.job import Job, Request, prepare
from castwise.orchestrator.machine import EngineFactory, Machine, choose_device, detect_machine, find_commit
from castwise.orchestrator.processes import ForkserverEngine
from castwise.records.schema import Trial
from castwise.render import run_report
from castwise.render.progress import LiveProgress
from castwise.suites import render as suites_render
from castwise.suites.result import SuiteResult
from castwise.suites.run import SuiteRequest, SuitesRequest, check, prepare_suite
from castwise.tune import render as tune_render
from castwise.tune.request import TuneRequest, prepare_tuning
from castwise.tune.search import TuningResult

_Result_co = TypeVar("_Result_co", covariant=True)

INTERRUPTED = 130
_FAILED = 1


def measure(
    request: Request,
    output: str,
    make_engine: EngineFactory | None = None,
    prices: Prices | None = None,
    *,
    verbose: bool = False,
) -> int:
    """Measure what a request asks for and print the result; return the exit code.

    Args:
        request: What the user asked for.
        output: table, markdown, csv or json.
        make_engine: Makes the engine; real processes unless a test says otherwise.
        prices: What electricity and GPUs cost the user; None where that was not said.
        verbose: Whether what failed trials printed is printed.
    """
    (prices or Prices()).check()
    errors = _errors()
    progress = LiveProgress(errors)
    try:
        with _terminated_as_interrupted():
            with _looking(errors):
                job = prepare(request, progress, make_engine)
            _announce(job, errors)
            _announce_budget(request, job, errors)
            with progress:
                trials = job.run()
    except KeyboardInterrupt:
        return _interrupted(errors, request.results, again=request.again)
    except UsageError as error:
        if verbose and error.details:
            _say(errors, error.details.rstrip())
        raise
    print_results(trials, output, prices, MARGIN if request.rule is None else request.rule.margin)
    if verbose:
        _print_logs(trials, errors)
    return exit_code(trials)


def _print_logs(trials: Sequence[Trial], errors: Console) -> None:
    for trial in trials:
        if trial.log:
            _say(errors, f"{trial.spec.label} printed:\n{trial.log.rstrip()}")


def tune(
    request: TuneRequest,
    output: str,
    memory_bytes: float | None = None,
    make_engine: EngineFactory | None = None,
    *,
    verbose: bool = False,
) -> tuple[int, TuningResult | None]:
    """Climb from the plain loop to the fastest and print the rungs; return the exit code and the climb.

    Args:
        request: What the user asked for.
        output: table, markdown, csv or json.
        memory_bytes: The limit within which the fastest loop is named too; None for none.
        make_engine: Makes the engine; real processes unless a test says otherwise.
        verbose: Whether what failed trials printed is printed.
    """
    errors = _errors()
    try:
        climbed = _carry_out(lambda progress: prepare_tuning(request, progress, make_engine), errors)
    except KeyboardInterrupt:
        return _interrupted(errors, request.results, again=request.again), None
    if output == "table":
        tune_render.print_tuning(climbed, run_report.result_console(), memory_bytes)
    elif output == "markdown":
        sys.stdout.write(tune_render.markdown_tuning(climbed, memory_bytes))
    elif output == "csv":
        sys.stdout.write(tune_render.csv_tuning(climbed))
    else:
        sys.stdout.write(tune_render.json_tuning(climbed, memory_bytes) + "\n")
    sys.stdout.flush()
    if verbose:
        _print_logs(climbed.trials, errors)
    # That a technique fails is what a climb is there to find out.
    return (_FAILED if climbed.ending == "failed" else 0), climbed


class _Prepared(Protocol[_Result_co]):
    """What says what is to be noted, and runs."""

    @property
    def job(self) -> Job: ...

    def run(self) -> _Result_co: ...


def _carry_out(prepare_it: Callable[[LiveProgress], _Prepared[_Result_co]], errors: Console) -> _Result_co:
    progress = LiveProgress(errors)
    with _terminated_as_interrupted():
        with _looking(errors):
            prepared = prepare_it(progress)
        for note in prepared.job.notes:
            _say(errors, f"Note: {note}", style="yellow")
        with progress:
            return prepared.run()


def max_batch(
    request: MaxBatchRequest, output: str, make_engine: EngineFactory | None = None, *, verbose: bool = False
) -> int:
    """Find the largest batches and print them; return the exit code.

    Args:
        request: What the user asked for.
        output: table, markdown, csv or json.
        make_engine: Makes the engine; real processes unless a test says otherwise.
        verbose: Whether what failed trials printed is printed.

    Raises:
        UsageError: Not even one sample fits, in any precision.
    """
    errors = _errors()
    try:
        fitted = _carry_out(lambda progress: prepare_max_batch(request, progress, make_engine), errors)
    except KeyboardInterrupt:
        return _interrupted(errors, request.results, again=request.again)
    if verbose:
        _print_logs([trial for trial in fitted.trials if trial.status != "oom"], errors)
    raise_if_nothing_fits(fitted.fits)
    if output == "table":
        max_batch_render.print_result(fitted, run_report.result_console())
    elif output == "markdown":
        sys.stdout.write(max_batch_render.markdown_max_batches(fitted.fits))
    elif output == "csv":
        sys.stdout.write(max_batch_render.csv_result(fitted))
    else:
        sys.stdout.write(max_batch_render.json_result(fitted) + "\n")
    sys.stdout.flush()
    # That float16 without masters diverges, or that a batch does not fit, is what a search is there to find out.
    failed = any(trial.status in ("crashed", "timeout") for trial in fitted.trials)
    return _FAILED if failed or not any(each.largest for each in fitted.fits) else 0


def run_suites(
    asked: SuitesRequest, output: str, make_engine: EngineFactory | None = None, *, verbose: bool = False
) -> int:
    """Run suites one after the other, print each one's result, and return the exit code.

    A suite that cannot be run (its data is missing) does not keep the others from being run: what is wrong with it
    is said at once, and is the exit code at the end.

    Args:
        asked: What the user asked for.
        output: table, markdown, csv or json.
        make_engine: Makes the engine; real processes unless a test says otherwise.
        verbose: Whether what failed trials printed is printed.
    """
    check(asked)
    errors = _errors()
    results: list[SuiteResult] = []
    refused = 0
    try:
        with _terminated_as_interrupted():
            with _looking(errors):
                machine = detect_machine(asked.device, asked.data_dir, make_engine)
            for request in asked.requests:
                try:
                    results.append(_run_suite(request, machine, errors))
                except UsageError as error:
                    if len(asked.requests) == 1:
                        raise
                    refused = error.exit_code
                    _say(errors, f"castwise: {request.suite.name} is left out: {error}")
                    continue
                _print_one(results[-1], output)
    except KeyboardInterrupt:
        return _interrupted(errors, asked.requests[0].results, again=asked.requests[0].again)
    _print_all(results, output)
    trials = [trial for result in results for trial in result.all_trials]
    if verbose:
        _print_logs(trials, errors)
    # That float16 without masters diverges, or that a batch does not fit, is what a suite is run to find out.
    failed = any(trial.status in ("crashed", "timeout") for trial in trials)
    return refused or (_FAILED if failed or not trials else 0)


def _run_suite(request: SuiteRequest, machine: Machine, errors: Console) -> SuiteResult:
    progress = LiveProgress(errors)
    job = prepare_suite(request, machine, progress)
    count = len(job.job.plan.specs)
    _say(errors, f"{request.suite.name}: {count} trial{'s' if count > 1 else ''}")
    _announce(job.job, errors)
    with progress:
        return job.run()


def _print_one(result: SuiteResult, output: str) -> None:
    """Print what can be printed of one suite before the next ends."""
    if output == "table":
        suites_render.print_suite(result, run_report.result_console())
        sys.stdout.write("\n")
    elif output == "markdown":
        sys.stdout.write(suites_render.markdown_suite(result) + "\n")
    sys.stdout.flush()


def _print_all(results: Sequence[SuiteResult], output: str) -> None:
    if output == "csv":
        sys.stdout.write(suites_render.csv_suites(results))
    elif output == "json":
        sys.stdout.write(suites_render.json_suites(results) + "\n")
    sys.stdout.flush()


def _errors() -> Console:
    return Console(stderr=True, highlight=False, emoji=False)


def _looking(errors: Console) -> AbstractContextManager[object]:
    return errors.status("looking at the machine") if errors.is_terminal else nullcontext()


def _interrupted(errors: Console, results: Path | None, *, again: bool) -> int:
    same = "the same command without --again" if again else "the same command"
    where = f" What was measured is in '{results}'; {same} goes on from there."
    _say(errors, f"Interrupted.{where if results else ''}")
    return INTERRUPTED


def print_results(trials: Sequence[Trial], output: str, prices: Prices | None = None, margin: float = MARGIN) -> None:
    """Print trials on stdout as table, markdown, csv or json.

    Args:
        trials: What was measured.
        output: One of the four.
        prices: What electricity and GPUs cost the user; None where that was not said.
        margin: How far from 1 a speed-up still is "the same".
    """
    rows = compare(trials, margin)
    advice = recommend(rows)
    if output == "table":
        run_report.print_table(rows, advice, run_report.result_console(), prices)
    elif output == "markdown":
        sys.stdout.write(run_report.to_markdown(rows, advice, prices))
    elif output == "csv":
        sys.stdout.write(run_report.to_csv(rows))
    else:
        sys.stdout.write(run_report.to_json(rows, advice, prices) + "\n")
    sys.stdout.flush()


def exit_code(trials: Sequence[Trial]) -> int:
    """Return 0 where every trial has its answer, 1 where one crashed, hung or diverged, or none ended well.

    An out-of-memory and an unsupported precision are answers to the question that was asked.
    """
    if trials and not any(trial.status == "ok" for trial in trials):
        return _FAILED
    return _FAILED if any(trial.status in ("crashed", "timeout", "diverged") for trial in trials) else 0


def examine(make_engine: EngineFactory | None = None) -> int:
    """Print what the machine is and which precisions it has; return the exit code."""
    console = run_report.result_console()
    engine = (make_engine or ForkserverEngine)(None, find_commit())
    first = choose_device(engine, None)
    others = [choose_device(engine, f"cuda:{index}") for index in range(1, first.num_gpus)]
    for environment in (first, *others):
        console.print(doctor.device_table(environment))
        console.print(doctor.precision_table(environment))
        for line in doctor.foreign_processes(environment):
            console.print(line, markup=False, style="yellow")
    return 0


def _announce(job: Job, errors: Console) -> None:
    for note in job.notes:
        _say(errors, f"Note: {note}", style="yellow")
    for problem in job.problems:
        _say(errors, f"Left as it is: {problem.path}: {problem.reason}", style="yellow")
    found = len(job.plan.specs) - len(job.missing)
    if found and job.rule is not None:
        _say(errors, f"{len(job.recorded)} trials of earlier rounds are on record already.")
    elif found:
        _say(errors, f"{found} of {len(job.plan.specs)} trials are on record already; measuring {len(job.missing)}.")


def _announce_budget(request: Request, job: Job, errors: Console) -> None:
    """Say so where rounds end after a time that nobody asked for."""
    budget = job.rule.budget_seconds if job.rule is not None else None
    if budget is not None and (request.rule is None or request.rule.budget_seconds is None):
        _say(errors, f"On a CPU no round begins that would end after {budget:g} s; --budget sets another time.")


def _say(errors: Console, line: str, style: str | None = None) -> None:
    # Never wrapped: a line to the reader is a line to `grep` too.
    errors.print(line, style=style, markup=False, soft_wrap=True)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that a batch system's stop is as clean as a user's.

    Whoever ignores one (`nohup` does) has it ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
