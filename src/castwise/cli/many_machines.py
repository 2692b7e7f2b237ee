"""What `castwise run` does for other machines: write a plan, or have it measured on Slurm or Ray."""

import hashlib
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Self

from castwise.cli.measuring import looking, measuring, next_step
from castwise.cli.options import PrintOptions
from castwise.cli.output import emit, error_console, say
from castwise.cluster import shard
from castwise.cluster.dispatch import Journal, Task, dispatch, save_crashed
from castwise.cluster.options import ManyMachinesOptions
from castwise.cluster.ray_nodes import RayBackend, ShardFiles
from castwise.cluster.shard import shard_arguments
from castwise.cluster.slurm import MOST_SHARDS, SlurmBackend, check_slurm
from castwise.errors import UsageError
from castwise.orchestrator.job import make_plan
from castwise.records.schema import Trial
from castwise.records.store import Store, load_folder, read_records
from castwise.render.units import format_duration, pluralize
from castwise.report.files import SelectionOptions, atomic_write, find
from castwise.report.text_report import markdown_report, print_report
from castwise.spec.options import DEFAULT_RESULTS, RunOptions
from castwise.spec.plan_file import PlanFile, read_plan
from castwise.spec.trial import TrialSpec

_SECONDS_BETWEEN_LINES = 30.0  # of progress in a log file


def write_plan(options: RunOptions, path: Path, output: PrintOptions) -> int:
    """Write the plan of a request."""
    with measuring(options, output), looking():
        plan = make_plan(options)
    atomic_write(path, _content(plan))
    comparisons = len(plan.comparisons)
    count = f"{pluralize(len(plan.specs), 'configuration')} in {pluralize(comparisons, 'comparison')}"
    say(f"{path}: {count} on {plan.device}. Next: castwise run --plan {shlex.quote(str(path))} --shard 1/{comparisons}")
    return 0


def _content(plan: PlanFile) -> bytes:
    return plan.model_dump_json(indent=1).encode() + b"\n"


def run_on(options: RunOptions, machines: ManyMachinesOptions, output: PrintOptions) -> tuple[int, list[Trial]]:
    """Have a plan measured on other machines, and print what is on record then.

    Returns:
        The exit code if it is not that of the trials, else 0; and the plan's trials.
    """
    if output.format not in ("table", "markdown"):
        raise UsageError("--on prints a table or Markdown; castwise export writes other formats of the records.")
    if machines.on == "slurm":
        check_slurm()
    with looking():
        plan = make_plan(options) if machines.plan is None else read_plan(machines.plan)
    results = (options.results or DEFAULT_RESULTS).absolute()
    store = Store(results)
    digest = hashlib.sha256(_content(plan)).hexdigest()[:12]
    digest += "-packed" if machines.pack else ""
    # No name ends with .json there, as those of records do.
    folder = results / ".cluster" / f"{digest}-{str(machines.on).partition(':')[0]}"
    num_comparisons = len(plan.comparisons)
    shards = plan.shards(min(num_comparisons, MOST_SHARDS) if machines.on == "slurm" else num_comparisons)

    def give_up(task: Task, why: str) -> None:
        has = {trial.spec.configuration for trial in load_folder(results)[0] if not task.kind}
        save_crashed(store, (spec for spec in shards[task.shard - 1] if spec.configuration not in has), why)

    with closing(Journal.open(folder)) as journal, measuring(options, output):
        # --again begins anew, unless it goes on with jobs that it has begun.
        begins = options.again and not journal.jobs
        journal.forget(["refused", *(["crashed"] if options.retry or begins else []), *(["done"] if begins else [])])
        atomic_write(folder / "plan", _content(plan))
        flags = {"--pack": machines.pack, "--again": options.again, "--retry": options.retry}
        extra = [flag for flag, is_given in flags.items() if is_given]
        extra += ["--data", str(options.data_dir.absolute())] if options.data_dir is not None else []

        arguments = partial(shard_arguments, shard.PROGRAM, extra)
        kinds = [""]
        backend: SlurmBackend | RayBackend
        if machines.on == "slurm":
            backend = SlurmBackend(
                folder / "jobs",
                lambda task: [
                    *arguments(str(folder / "plan"), str(results)),
                    *("--shard", f"{task.shard}/{len(shards)}"),
                ],
                f"castwise-{digest}",
                _sbatch_options(machines, plan),
                machines.nodes,
                journal,
                plan.num_nodes,
            )
        else:
            # An earlier process took its nodes' actors along.
            journal.write((task, "cancelled", "") for task in list(journal.jobs))
            backend = ray_backend(machines, plan, shards, store, arguments)
            kinds = backend.kinds if machines.per is not None else kinds
        tasks = [Task(number, kind) for number in range(1, len(shards) + 1) for kind in kinds]
        ended = sum(task in journal.endings for task in tasks)
        if ended or journal.jobs:
            say(f"{ended} of {pluralize(len(tasks), 'shard')} have ended already, {len(journal.jobs)} were started.")
        try:
            with _Progress(results) as progress:
                dispatch(tasks, journal, backend, give_up, progress.show, partial(say, style="yellow"))
        except KeyboardInterrupt:
            _offer_to_cancel(backend, journal)
            raise
        finally:
            backend.close()
        return _show_records(plan, results, journal, output)


def ray_backend(
    machines: ManyMachinesOptions,
    plan: PlanFile,
    shards: Sequence[Sequence[TrialSpec]],
    store: Store,
    arguments: Callable[[str, str], list[str]],
) -> RayBackend:
    """Return the nodes of a Ray cluster, whose records go into a store; a node gets those that a shard has by then."""
    known: dict[str, list[Path]] = {}
    for record in read_records(sorted(store.folder.rglob("*.json")))[0]:
        known.setdefault(record.trial.spec.configuration, []).append(record.path)

    def save(contents: Sequence[bytes]) -> None:
        for content in contents:
            trial = Trial.model_validate_json(content)
            known.setdefault(trial.spec.configuration, []).append(store.save(trial))

    def files_of(task: Task) -> ShardFiles:
        specs = shards[task.shard - 1]
        paths = [path for spec in specs for path in known.get(spec.configuration, [])]
        return ShardFiles(
            plan=_content(plan.model_copy(update={"specs": tuple(specs)})),
            records={str(path.relative_to(store.folder)): path.read_bytes() for path in paths},
            arguments=arguments,
            folder=str(Path.cwd()),
        )

    address = machines.on if machines.on != "ray" else None
    return RayBackend(
        address,
        files_of,
        save,
        plan.num_gpus,
        machines.nodes,
        per=machines.per or "gpu-model",
        num_nodes=plan.num_nodes,
        pack=machines.pack,
    )


def _sbatch_options(machines: ManyMachinesOptions, plan: PlanFile) -> dict[str, str]:
    """Return the options of sbatch: a whole node for each job, as trials on one host disturb each other."""
    options = {} if machines.pack else {"exclusive": ""}
    if machines.partition is not None:
        options["partition"] = machines.partition
    if plan.device != "cpu" or machines.gres is not None:
        options["gres"] = machines.gres or f"gpu:{max(1, plan.num_gpus)}"
    for pair in machines.sbatch or ():
        key, _, value = pair.lstrip("-").partition("=")
        options[key] = value
    return options


def _offer_to_cancel(backend: SlurmBackend | RayBackend, journal: Journal) -> None:
    """Ask whether Slurm's jobs are to be cancelled, if somebody can answer; else they go on. Ray's end with this."""
    if not journal.jobs or isinstance(backend, RayBackend):
        return
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
        self._status = self._console.status("submitting") if self._console.is_terminal else None
        self._began, self._last, self._shown = time.monotonic(), 0.0, ""

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, waiting: int, running: int, ended: int) -> None:
        """Show the numbers, with that of the records."""
        line, now = f"shards: {waiting} wait, {running} run, {ended} ended", time.monotonic()
        if line == self._shown and now - self._last < (1.0 if self._status is not None else _SECONDS_BETWEEN_LINES):
            return
        self._shown, self._last = line, now
        records = pluralize(sum(1 for _ in self._results.glob("*/*.json")), "record")
        line += f"; {records}, {format_duration(now - self._began)} so far"
        say(line) if self._status is None else self._status.update(line)


def _show_records(plan: PlanFile, results: Path, journal: Journal, output: PrintOptions) -> tuple[int, list[Trial]]:
    """Print what is on record; return the exit code so far, and the plan's trials."""
    endings = Counter(ending for ending, _ in journal.endings.values())
    say(f"Shards: {', '.join(f'{number} {ending}' for ending, number in endings.items())}.")
    configurations = {spec.configuration for spec in plan.specs}
    trials = [trial for trial in load_folder(results)[0] if trial.spec.configuration in configurations]
    if trials:
        found = find([results], SelectionOptions())

        emit(
            output.format,
            table=lambda console: print_report(found.collection, console),
            markdown=lambda: markdown_report(found.collection),
        )
        say(next_step(results, len(found.collection.configurations)))
    return UsageError.exit_code if endings["refused"] else int(endings["crashed"] > 0), trials
