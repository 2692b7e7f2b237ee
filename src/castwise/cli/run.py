"""`castwise run`."""

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from castwise.cli.options import PrintOptions
from castwise.cluster.options import ManyMachinesOptions
from castwise.errors import UsageError
from castwise.spec.options import Option, RunOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from castwise.analysis.energy import Prices
    from castwise.orchestrator.job import Job
    from castwise.orchestrator.machine import FindMachine
    from castwise.records.schema import Trial
    from castwise.spec.plan_file import PlanFile
    from castwise.spec.trial import TrialSpec

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
"""


@dataclass(frozen=True, kw_only=True)
class RunPrintOptions(PrintOptions):
    """How `castwise run` prints what it found."""

    price_kwh: Annotated[
        float | None, Option("What a kilowatt-hour costs you; prints what an epoch does.", "Prices", metavar="X")
    ] = None
    price_gpu_hour: Annotated[
        float | None, Option("What an hour of a GPU costs you; prints what an epoch does.", "Prices", metavar="Y")
    ] = None

    @property
    def prices(self) -> "Prices":
        """Return the prices that the user gave."""
        from castwise.analysis.energy import Prices

        return Prices(self.price_kwh, self.price_gpu_hour)


def run(options: RunOptions, machines: ManyMachinesOptions, output: RunPrintOptions) -> int:
    """Measure a workload in every precision: time, throughput, memory, loss, and which precision to take."""
    from castwise.cli.output import say

    output.prices.check()
    machines.check(options)
    if machines.plan_only is not None:
        from castwise.cli.many_machines import write_plan

        return write_plan(options, machines.plan_only, output)
    if machines.on is not None:
        if output.prices:
            raise UsageError("--on prints no prices. Leave --price-kwh and --price-gpu-hour out.")
        from castwise.cli.many_machines import run_on

        code, trials = run_on(options, machines, output)
        return code or exit_code(trials)
    plan, specs = machines.read_shard()
    if plan is not None and not specs:
        say(f"Shard {machines.shard} has nothing to measure: the plan has {len(plan.comparisons)} comparisons.")
        return 0
    options = options if plan is None else replace(options, device=plan.device)
    num_nodes = check_nodes(options, machines, plan, specs)
    if machines.node_rank:
        return _follow(options, machines, output)
    job, trials = _measure(options, machines, output, plan, specs, num_nodes)
    _print_answer(job, trials, options, output)
    return exit_code(trials)


def _follow(options: RunOptions, machines: ManyMachinesOptions, output: RunPrintOptions) -> int:
    """Work for the first of several nodes until that ends."""
    from castwise.cli.measuring import measuring
    from castwise.cli.output import say
    from castwise.orchestrator.processes import ForkserverEngine

    with measuring(options, output):
        say(f"This node works for the one at {machines.rendezvous} until that ends.")
        ForkserverEngine().follow(str(machines.rendezvous))
    return 0


def _measure(
    options: RunOptions,
    machines: ManyMachinesOptions,
    output: RunPrintOptions,
    plan: "PlanFile | None",
    specs: "Sequence[TrialSpec]",
    num_nodes: int,
) -> "tuple[Job, list[Trial]]":
    """Measure what is asked for on this machine, as the first of several nodes if they share trials."""
    from castwise.cli.measuring import announce, answer, looking, measuring
    from castwise.cli.output import say
    from castwise.orchestrator.job import CPU_BUDGET_SECONDS, prepare, prepare_shard
    from castwise.orchestrator.machine import choose_device, detect_machine
    from castwise.orchestrator.nodes import Nodes
    from castwise.orchestrator.processes import ForkserverEngine

    def work(find_machine: "FindMachine") -> "tuple[Job, list[Trial]]":
        with looking(progress):
            if plan is None:
                job = prepare(options, progress, find_machine)
            else:
                job = prepare_shard(plan, specs, options, progress, find_machine)
        if output.prices and job.specs and job.specs[0].device_type == "cpu":
            raise UsageError("Prices are for GPUs, and this is a CPU. Leave --price-kwh and --price-gpu-hour out.")
        announce(job)
        budget = None if job.rule is None else job.rule.budget_seconds
        if budget is not None and options.budget_seconds is None:
            say(f"Time limit: {CPU_BUDGET_SECONDS:g} s (--budget changes it).")
        progress.known(job.recorded.values(), budget)
        with progress:
            return job, job.run()

    with measuring(options, output) as progress, ExitStack() as ends:
        nodes: Nodes | None = None
        if machines.rendezvous is not None:
            say(f"Waiting for the other nodes at {machines.rendezvous}.")
            open_device = partial(choose_device, ForkserverEngine(), options.device or "cuda")
            nodes = ends.enter_context(closing(Nodes(machines.rendezvous, num_nodes, open_device)))
        if machines.pack or nodes is not None:  # what is known of the machine is without them
            make_engine = partial(ForkserverEngine, nodes=nodes, packed=machines.pack)
            return work(partial(detect_machine, make_engine=make_engine))
        return answer(options, work)


def _print_answer(job: "Job", trials: "list[Trial]", options: RunOptions, output: RunPrintOptions) -> None:
    from castwise.accuracy.advice import answer_of
    from castwise.cli.measuring import next_step, say_logs
    from castwise.cli.output import show
    from castwise.show.run_report import present
    from castwise.spec.typed import read_line

    typed = read_line(output.words, RunOptions, ManyMachinesOptions, RunPrintOptions)
    rows, advice = answer_of(job, trials, typed)

    shown = present(rows, advice, output.prices, wide=output.wide, verbose=output.verbose)
    show(output.format, shown, next_step(options.results, len(rows)))
    if output.verbose:
        say_logs(trials)


def check_nodes(
    options: RunOptions, machines: ManyMachinesOptions, plan: "PlanFile | None", specs: "Sequence[TrialSpec]"
) -> int:
    """Return how many nodes share trials; raise a UsageError before one waits for the others in vain."""
    from castwise.orchestrator.job import check_request

    num_nodes = options.nodes_per_trial or (1 if plan is None else plan.num_nodes)
    if machines.rendezvous is None and max((options.nodes_per_trial or 1, *(spec.num_nodes for spec in specs))) > 1:
        raise UsageError(
            "--nodes-per-trial needs --rendezvous HOST:PORT and --node-rank I on each node, or --on slurm or --on ray."
        )
    if machines.rendezvous is not None and num_nodes == 1:
        raise UsageError("--rendezvous is for trials over several nodes. Give --nodes-per-trial.")
    if machines.rendezvous is not None and plan is None:
        check_request(options)
    return num_nodes


def exit_code(trials: "list[Trial]") -> int:
    """Return 0 if every trial has its answer, 1 if one crashed or hung, or none ended well.

    To diverge, to run out of memory, and an unsupported precision are answers.
    """
    statuses = {trial.status for trial in trials}
    return 1 if statuses & {"crashed", "timeout"} or (statuses and "ok" not in statuses) else 0
