"""`castwise run`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from castwise.cli.options import PrintOptions
from castwise.cluster.options import ManyMachinesOptions
from castwise.errors import UsageError, printable
from castwise.spec.options import Option, RunOptions

if TYPE_CHECKING:
    from castwise.analysis.decide import Advice
    from castwise.analysis.energy import Prices
    from castwise.orchestrator.job import Job
    from castwise.orchestrator.machine import FindMachine
    from castwise.records.schema import Trial
    from castwise.show.progress import LiveProgress

EXAMPLES = """\
Examples:

    castwise run                      a short job that suits this machine
    castwise run resnet50             every precision the GPU has
    castwise run train_me.py:build    a model of your own (`castwise init FILE`)
    castwise run -- python train.py --lr 1e-3     your training script as it is
    castwise run resnet50 --within 1%     until every speed-up is known within 1 %
    castwise run resnet50 --precision fp32,bf16-mixed --batch-size 128,256
    castwise run resnet50 --precision bf16-mixed --techniques none,tuned
    castwise run resnet50 --precision bf16-mixed --gpus 1,2,4
    castwise run dpn92 --precision fp16-master --loss-scale dynamic,128
    castwise run mnist-cnn --data-set mnist --data DIR --format markdown
    castwise run resnet50 --batch-size 64,128,256 --plan-only plan.json
    castwise run --plan plan.json --shard 1/3     a part, on one of 3 machines
    castwise run resnet50 --lines         only the lines to paste
"""


@dataclass(frozen=True, kw_only=True)
class RunPrintOptions(PrintOptions):
    lines: Annotated[
        bool,
        Option(
            "Print the lines of the advised precision alone, to paste into a file; the answer is on stderr.", "Output"
        ),
    ] = False
    price_kwh: Annotated[
        float | None, Option("What a kilowatt-hour costs you; prints what an epoch does.", "Prices", metavar="X")
    ] = None
    price_gpu_hour: Annotated[
        float | None, Option("What an hour of a GPU costs you; prints what an epoch does.", "Prices", metavar="Y")
    ] = None

    @property
    def prices(self) -> "Prices | None":
        """Return the prices that the user gave; raise a UsageError if one is impossible."""
        if self.price_kwh is None and self.price_gpu_hour is None:
            return None
        from castwise.analysis.energy import Prices

        prices = Prices(self.price_kwh, self.price_gpu_hour)
        prices.check()
        return prices


def run(options: RunOptions, machines: ManyMachinesOptions, output: RunPrintOptions) -> int:
    """Measure a workload in every precision: time, throughput, memory, loss, and which precision to take."""
    from castwise.accuracy.advice import answer_of
    from castwise.cli.measuring import announce, exit_code, measuring, next_step, say_logs, search
    from castwise.cli.output import say, show
    from castwise.orchestrator.job import CPU_BUDGET_SECONDS, outlook, prepare
    from castwise.show.run_report import present
    from castwise.spec.typed import read_line

    jobs: list[Job] = []  # as it has begun

    def begin(job: "Job") -> None:
        jobs[:] = [job]
        if prices and job.specs and job.specs[0].device_type == "cpu":
            raise UsageError("Prices are for GPUs, and this is a CPU. Leave --price-kwh and --price-gpu-hour out.")
        announce(job)
        budget = None if job.rule is None else job.rule.budget_seconds
        if budget is not None and options.budget_seconds is None and not progress.has_outlook:
            say(f"Time limit: {CPU_BUDGET_SECONDS:g} s (--budget changes it).")
        progress.known(job.recorded.values(), budget)

    def measure(
        options: RunOptions,
        prepare: "Callable[[RunOptions, LiveProgress, FindMachine], Job]" = prepare,
        find_machine: "FindMachine | None" = None,
        nodes: AbstractContextManager[object] | None = None,
    ) -> int:
        """Measure on this machine, let other nodes go, print the answer, and return the exit code."""
        try:
            with nodes or nullcontext():
                job, trials = search(options, progress, prepare, begin, find_machine, outlook(options))
        except KeyboardInterrupt:
            if progress.trials:
                shown = {trial.spec.precision for trial in progress.trials}
                left = dict.fromkeys(spec.precision for spec in jobs[0].specs if spec.precision not in shown)
                answer(jobs[0], progress.trials)
                if left:
                    say(f"Not measured: {', '.join(left)}, as you interrupted.")
            raise
        answer(job, trials)
        return exit_code(trials)

    def answer(job: "Job", trials: "Sequence[Trial]") -> None:
        typed = read_line(output.words, RunOptions, ManyMachinesOptions, RunPrintOptions)
        rows, advice = answer_of(job, trials, typed)
        if output.lines:
            _print_lines(advice)
            return
        shown = present(rows, advice, prices, wide=output.wide, verbose=output.verbose)
        show(output.format, shown, next_step(options.results, len(rows)))
        if output.verbose:
            say_logs(trials)

    prices = output.prices
    if output.lines and (output.format != "table" or machines.on is not None):
        raise UsageError("--lines prints lines of code alone. Leave --format and --on out.")
    with measuring(options, output) as progress:
        progress.keeps_table = False  # the answer has it, if it is interrupted, too
        if machines == ManyMachinesOptions() and options.nodes_per_trial is None:
            return measure(options)
        if machines.on is not None and prices:
            raise UsageError("--on prints no prices. Leave --price-kwh and --price-gpu-hour out.")
        from castwise.cli.many_machines import run_divided

        return run_divided(options, machines, output, measure)


def _print_lines(advice: "Sequence[Advice]") -> None:
    """Print the sentences on stderr, and each advised row's lines once on stdout."""
    from castwise.analysis.code_snippets import WITHOUT
    from castwise.cli.output import error_console, say
    from castwise.show.presentation import Code

    for item in advice:
        say(item.sentence.removesuffix(f" {item.command}") if item.command else item.sentence)
        if item.command:
            Code([item.command], "sh").print(error_console())
    if codes := dict.fromkeys(item.code.partition(WITHOUT)[0].rstrip() for item in advice if item.code):
        print(printable("\n\n".join(codes)), flush=True)
    else:
        is_open = any(item.decision == "undecided" for item in advice)
        say(f"No lines to paste: {'it is undecided what to change' if is_open else 'there is nothing to change'}.")
