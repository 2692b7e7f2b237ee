"""`castwise suite`."""

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from castwise.cli.options import PrintOptions
from castwise.errors import UsageError, printable
from castwise.suites.options import SuiteOptions

if TYPE_CHECKING:
    from castwise.orchestrator.job import Job
    from castwise.orchestrator.machine import EngineFactory
    from castwise.suites.result import SuiteResult

EXAMPLES = """\
Examples:

    castwise suite tensorcore --quick             a few steps of each run
    castwise suite --all --quick --synthetic      every suite, without any data
    castwise suite wrn-cifar10 --precision O1,O2  two of its precisions, in full
    castwise suite wrn-cifar10 --precision O0 --epochs 2
    castwise suite mine.toml                      a suite of your own
"""


def suite(options: SuiteOptions, output: PrintOptions) -> int:
    """Run published benchmarks as their sources do, and compare their figures with what is measured here."""
    if (options.suites is None) != options.every_suite:
        raise UsageError("Name the suites to run, or say --all. `castwise list suites` shows them.")
    if options.tuned:
        if options.techniques is not None:
            raise UsageError("--tuned stands for --techniques none,tuned. Give one of the two.")
        options = replace(options, techniques=("none", "tuned"))
    from castwise.cli.measuring import FAILED, announce, answer, looking, measuring, say_logs
    from castwise.cli.output import emit, say
    from castwise.orchestrator.machine import detect_machine
    from castwise.registry.suites import SUITE_NAMES, find_suite
    from castwise.show.units import pluralize
    from castwise.suites import render
    from castwise.suites.run import check, prepare_suite

    suites = [find_suite(each) for each in dict.fromkeys(options.suites or SUITE_NAMES)]
    check(options)
    shown: list[SuiteResult] = []

    def show(result: "SuiteResult") -> None:
        """Print a suite at once if its format allows it; the others are one document over all suites."""
        shown.append(result)
        print_result = partial(render.print_suite, result, wide=output.wide, verbose=output.verbose)
        if output.format in ("table", "markdown"):
            emit(output.format, print_result, markdown=partial(render.markdown_suite, result))
            print(flush=True)

    def work(make_engine: "EngineFactory | None") -> "tuple[Job | None, tuple[list[SuiteResult], int]]":
        job, refused = None, 0
        results: list[SuiteResult] = []
        with looking():
            machine = detect_machine(options.device, options.data_dir, make_engine)
        for each in suites:
            try:
                suite_job = prepare_suite(each, options, machine, progress)
                say(f"{each.name}: {pluralize(len(suite_job.job.specs), 'trial')}")
                announce(suite_job.job)
                with progress:
                    results.append(suite_job.run())
            except UsageError as error:
                # A suite that cannot be run (its data is missing) does not keep the others from being run.
                if len(suites) == 1:
                    raise
                refused = error.exit_code
                say(f"castwise: {each.name} is left out: {error}")
                continue
            job = suite_job.job
            if make_engine is None:
                show(results[-1])
        return job, (results, refused)

    with measuring(options, output) as progress:
        _, (results, refused) = answer(options, work)
    for result in results[len(shown) :]:
        show(result)
    _print_end(results, options, output)
    trials = [trial for result in results for trial in result.all_trials]
    if output.verbose:
        say_logs(trials)
    # That float16 without masters diverges, or that a batch does not fit, is what a suite is run to find out.
    failed = not trials or any(trial.status in ("crashed", "timeout") for trial in trials)
    return refused or (FAILED if failed else 0)


def _print_end(results: "list[SuiteResult]", options: SuiteOptions, output: PrintOptions) -> None:
    """Print where the results are, or the one document over all suites."""
    from castwise.cli.measuring import next_step
    from castwise.show.console import print_ending, result_console
    from castwise.suites import render

    if output.format == "table":
        num_results = sum(len(result.all_trials) for result in results)
        print_ending(result_console(), next_step(options.results, num_results))
    elif output.format == "csv":
        sys.stdout.write(printable(render.csv_suites(results)))
    elif output.format == "json":
        print(printable(render.json_suites(results)))
