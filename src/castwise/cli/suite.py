"""`castwise suite`."""

from dataclasses import replace
from typing import TYPE_CHECKING

from castwise.cli.options import PrintOptions
from castwise.errors import UsageError
from castwise.suites.options import SuiteOptions

if TYPE_CHECKING:
    from castwise.orchestrator.machine import FindMachine
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
    from castwise.cli.measuring import FAILED, announce, answer, looking, measuring, next_step, say_logs
    from castwise.cli.output import say, show
    from castwise.registry.suites import SUITE_NAMES, find_suite
    from castwise.show.presentation import Presentation
    from castwise.show.units import pluralize
    from castwise.suites.render import present
    from castwise.suites.run import check, prepare_suite

    suites = [find_suite(name) for name in dict.fromkeys(options.suites or SUITE_NAMES)]
    check(options)

    def show_suite(result: "SuiteResult") -> None:
        """Print a suite at once if its format allows it; the others are one document over all suites."""
        if output.format in ("table", "markdown"):
            is_long = output.format == "markdown"
            show(output.format, present([result], wide=output.wide or is_long, verbose=output.verbose or is_long))
            print(flush=True)

    def work(find_machine: "FindMachine") -> "tuple[list[SuiteResult], int]":
        refused = 0
        results: list[SuiteResult] = []
        with looking():
            machine = find_machine(options.device, options.data_dir, ())
        for suite_row in suites:
            try:
                suite_job = prepare_suite(suite_row, options, machine, progress)
                say(f"{suite_row.name}: {pluralize(len(suite_job.job.specs), 'trial')}")
                announce(suite_job.job)
                with progress:
                    results.append(suite_job.run())
            except UsageError as error:
                # A suite that cannot be run (its data is missing) does not keep the others from being run.
                if len(suites) == 1:
                    raise
                refused = error.exit_code
                say(f"castwise: {suite_row.name} is left out: {error}")
                continue
            show_suite(results[-1])
        return results, refused

    with measuring(options, output) as progress:
        results, refused = answer(options, work)
    num_results = sum(len(result.all_trials) for result in results)
    show(
        output.format,
        Presentation([]) if output.format in ("table", "markdown") else present(results),
        next_step(options.results, num_results),
    )
    trials = [trial for result in results for trial in result.all_trials]
    if output.verbose:
        say_logs(trials)
    # That float16 without masters diverges, or that a batch does not fit, is what a suite is run to find out.
    failed = not trials or any(trial.status in ("crashed", "timeout") for trial in trials)
    return refused or (FAILED if failed else 0)
