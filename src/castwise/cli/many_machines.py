"""`castwise run` with many machines: write a plan, measure a part of it, share trials, or dispatch to Slurm or Ray."""

import hashlib
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from castwise.cli.measuring import exit_code, looking, next_step
from castwise.cli.options import PrintOptions
from castwise.cli.output import error_console, say, show
from castwise.cluster import shard
from castwise.cluster.dispatch import UNKNOWN, Journal, Task, dispatch, save_crashed
from castwise.cluster.options import ManyMachinesOptions
from castwise.cluster.ray_nodes import RayBackend
from castwise.cluster.slurm import MOST_SHARDS, SlurmBackend
from castwise.errors import UsageError
from castwise.orchestrator.job import check_request, make_plan, prepare, prepare_shard
from castwise.orchestrator.machine import FindMachine, choose_device, detect_machine
from castwise.orchestrator.nodes import Nodes
from castwise.orchestrator.processes import ForkserverEngine
from castwise.records.store import Store, load_folder
from castwise.report.files import SelectionOptions, atomic_write, find
from castwise.report.text_report import present
from castwise.show.units import format_duration, pluralize
from castwise.spec.options import DEFAULT_RESULTS, RunOptions
from castwise.spec.plan_file import PlanFile, parse_shard, read_plan
from castwise.spec.trial import TrialSpec

_SECONDS_BETWEEN_LINES = 30.0  # of progress in a log file


def run_divided(
    options: RunOptions, machines: ManyMachinesOptions, output: PrintOptions, measure: Callable[..., int]
) -> int:
    """Do what `castwise run` does for other machines, or as one of several; return the exit code.

    `measure` measures on this machine: options, what prepares the job, what finds the machine, and the other
    nodes are its arguments.
    """
    machines.check(options)
    if machines.plan_only is not None:
        return _write_plan(options, machines.plan_only)
    if machines.on is not None:
        return _run_on(options, machines, output)
    plan = None if machines.plan is None else read_plan(machines.plan)
    specs: tuple[TrialSpec, ...] = ()
    if plan is not None:
        number, count = parse_shard(machines.shard or "1/1")
        specs = plan.shards(count)[number - 1]
        if not specs:
            say(f"Shard {machines.shard} has nothing to measure: the plan has {len(plan.comparisons)} comparisons.")
            return 0
        options = replace(options, device=plan.device)
    num_nodes = _check_nodes(options, machines, plan, specs)
    if machines.node_rank:
        say(f"This node works for the one at {machines.rendezvous} until that ends.")
        ForkserverEngine().follow(str(machines.rendezvous))
        return 0
    nodes: Nodes | None = None
    if machines.rendezvous is not None:
        say(f"Waiting for the other nodes at {machines.rendezvous}.")
        open_device = partial(choose_device, ForkserverEngine(), options.device or "cuda")
        nodes = Nodes(machines.rendezvous, num_nodes, open_device)
    find_machine: FindMachine | None = None
    if machines.pack or nodes is not None:  # what is known of the machine is without them
        make_engine = partial(ForkserverEngine, nodes=nodes, packed=machines.pack)
        find_machine = partial(detect_machine, make_engine=make_engine)
    prepare_here = prepare if plan is None else partial(prepare_shard, plan, specs)
    return measure(options, prepare_here, find_machine, None if nodes is None else closing(nodes))


def _check_nodes(
    options: RunOptions, machines: ManyMachinesOptions, plan: PlanFile | None, specs: Sequence[TrialSpec]
) -> int:
    """Return how many nodes share trials; raise a UsageError before one waits for the others in vain."""
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


def _write_plan(options: RunOptions, path: Path) -> int:
    with looking():
        plan = make_plan(options)
    atomic_write(path, _content(plan))
    comparisons = len(plan.comparisons)
    count = f"{pluralize(len(plan.specs), 'configuration')} in {pluralize(comparisons, 'comparison')}"
    say(f"{path}: {count} on {plan.device}. Next: castwise run --plan {shlex.quote(str(path))} --shard 1/{comparisons}")
    return 0


def _content(plan: PlanFile) -> bytes:
    return plan.model_dump_json(indent=1).encode() + b"\n"


def _run_on(options: RunOptions, machines: ManyMachinesOptions, output: PrintOptions) -> int:
    """Have a plan measured on other machines, and print what is on record then."""
    if output.format not in ("table", "markdown"):
        raise UsageError("--on prints a table or Markdown; castwise export writes other formats of the records.")
    with looking():
        plan = make_plan(options) if machines.plan is None else read_plan(machines.plan)
    machines.check_trials(plan.device, plan.num_nodes)
    results = (options.results or DEFAULT_RESULTS).absolute()
    store = Store(results)
    digest = hashlib.sha256(_content(plan)).hexdigest()[:12] + ("-packed" if machines.pack else "")
    # No name ends with .json there, as those of records do.
    folder = results / ".cluster" / f"{digest}-{str(machines.on).partition(':')[0]}"
    num_comparisons = len(plan.comparisons)
    shards = plan.shards(min(num_comparisons, MOST_SHARDS) if machines.on == "slurm" else num_comparisons)

    def give_up(task: Task, why: str) -> None:
        has = {trial.spec.configuration for trial in load_folder(results)[0] if not task.kind}
        save_crashed(store, (spec for spec in shards[task.shard - 1] if spec.configuration not in has), why)

    with closing(Journal(folder)) as journal:
        # --again begins anew, unless it goes on with jobs that it has begun.
        begins = options.again and not journal.jobs
        journal.forget(["refused", *(["crashed"] if options.retry or begins else []), *(["done"] if begins else [])])
        arguments = _arguments_of(options, machines)
        kinds = [""]
        backend: SlurmBackend | RayBackend
        if machines.on == "slurm":
            arguments += ["--plan", str(folder / "plan"), "--results", str(results), "--shard"]
            backend = SlurmBackend(
                machines,
                plan,
                folder / "jobs",
                f"castwise-{digest}",
                lambda task: [*arguments, f"{task.shard}/{len(shards)}"],
                journal,
            )
        else:
            journal.cancelled()  # an earlier process took its nodes' actors along
            backend = RayBackend(machines, plan, shards, store, arguments)
            kinds = backend.kinds if machines.per is not None else kinds
        atomic_write(folder / "plan", _content(plan))
        tasks = [Task(number, kind) for number in range(1, len(shards) + 1) for kind in kinds]
        ended = sum(task in journal.endings for task in tasks)
        if ended or journal.jobs:
            say(f"{ended} of {pluralize(len(tasks), 'shard')} have ended already, {len(journal.jobs)} were started.")
        progress = _Progress(results)
        try:
            with progress.status:
                dispatch(tasks, journal, backend, give_up, progress.show, partial(say, style="yellow"))
        except KeyboardInterrupt:
            if isinstance(backend, SlurmBackend) and journal.jobs:
                _offer_to_cancel(backend, journal)
            raise
        finally:
            backend.close()
        return _show_records(plan, results, journal, output)


def _arguments_of(options: RunOptions, machines: ManyMachinesOptions) -> list[str]:
    """Return the arguments of Python that measure on a node: all but plan, shard and results."""
    flags = {"--pack": machines.pack, "--again": options.again, "--retry": options.retry}
    arguments = [*shard.PROGRAM, "run", "--format", "json", *(flag for flag, is_given in flags.items() if is_given)]
    return arguments + (["--data", str(options.data_dir.absolute())] if options.data_dir is not None else [])


def _offer_to_cancel(backend: SlurmBackend, journal: Journal) -> None:
    """Ask whether Slurm's jobs are to be cancelled, if somebody can answer; else they go on."""
    jobs = " ".join(sorted({job.partition("_")[0] for job in journal.jobs.values()}))
    answer = ""
    with suppress(EOFError, KeyboardInterrupt):
        answer = error_console().input(f"Cancel jobs {jobs}, too? (y/N) ") if sys.stdin.isatty() else ""
    if answer.lower().startswith("y"):
        backend.cancel()
        say(f"Cancelled: {jobs}.")
    else:
        say(f"Slurm's jobs go on. The same command follows them; `scancel {jobs}` ends them.")


class _Progress:
    """How many shards wait, run and have ended: in the terminal's last line, or a line of a log if that changed."""

    def __init__(self, results: Path) -> None:
        self._results, self._console = results, error_console()
        self.status = self._console.status("submitting")  # prints nothing if there is no terminal
        self._began, self._last, self._shown = time.monotonic(), 0.0, ""

    def show(self, waiting: int, running: int, ended: int) -> None:
        line, now = f"shards: {waiting} wait, {running} run, {ended} ended", time.monotonic()
        if line == self._shown and now - self._last < (1.0 if self._console.is_terminal else _SECONDS_BETWEEN_LINES):
            return
        self._shown, self._last = line, now
        records = pluralize(sum(1 for _ in self._results.glob("*/*.json")), "record")
        line += f"; {records}, {format_duration(now - self._began)} so far"
        self.status.update(line)
        if not self._console.is_terminal:
            say(line)


def _show_records(plan: PlanFile, results: Path, journal: Journal, output: PrintOptions) -> int:
    endings = Counter(ending for ending, _ in journal.endings.values())
    say(f"Shards: {', '.join(f'{number} {ending}' for ending, number in endings.items())}.")
    configurations = {spec.configuration for spec in plan.specs}
    trials = [trial for trial in load_folder(results)[0] if trial.spec.configuration in configurations]
    if trials:
        found = find([results], SelectionOptions())
        show(output.format, present(found.collection, wide=output.format == "markdown"))
        say(next_step(results, len(found.collection.configurations)))
    if endings["refused"]:
        return UsageError.exit_code
    # Of what was lost, the journal decides.
    return int(endings["crashed"] > 0) or exit_code([trial for trial in trials if trial.environment.host != UNKNOWN])
