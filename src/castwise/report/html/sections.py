"""What a report lists besides charts: answers, trials, machines, warnings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from castwise.analysis import steady_metrics
from castwise.analysis.warnings import TrialWarning, warnings_of
from castwise.records.schema import Environment, Trial
from castwise.registry.precisions import BASELINE
from castwise.registry.techniques import join
from castwise.render.table import Column, DataTable
from castwise.render.units import format_bytes, format_rate, format_ratio, format_seconds
from castwise.report.collection import Collection, ComparisonGroup, is_search, throughput_of
from castwise.report.conclusions import Answer
from castwise.spec.quantities import truncate_list
from castwise.spec.types import SYNTHETIC

T = TypeVar("T")


def summary(collection: Collection) -> str:
    """Return how much was measured where and when."""
    trials = collection.trials
    if not trials:
        return "No records."
    names = list(dict.fromkeys(trial.environment.device_name for trial in trials))
    dates = sorted({trial.started_at[:10] for trial in trials})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    count = f"{len(trials):,} trial{'s' if len(trials) > 1 else ''}"
    where = truncate_list(names, most=3)
    cells = len(collection.configurations)
    what = count if cells == len(trials) else f"{count} of {cells:,} cell{'s' if cells > 1 else ''}"
    return f"{what} on {where}, {when}"


def topic_line(topic: ComparisonGroup) -> str:
    """Return what all cells of a topic share, in a line."""
    spec, environment = topic.first.spec, topic.first.environment
    software = f"torch {environment.torch}" + (f", driver {environment.driver}" if environment.driver else "")
    batches = sorted({cell.trial.spec.batch_size for cell in topic.configurations})
    batch = f"batch {batches[0]}" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]}"
    data = "synthetic data" if spec.data_set == SYNTHETIC else f"data {spec.data_set}"
    return f"{batch}, {data}, {environment.device_name}, {software}, castwise {environment.castwise}"


def gist(answer: Answer) -> str:
    """Return an answer in a few words, for a topic that is folded."""
    if answer.precision is None:
        return "nothing ended well"
    if answer.gain is None or answer.precision == BASELINE:
        return f"take {answer.precision}"
    verb = "fastest in runs cut short:" if answer.cut else "take"
    return f"{verb} {answer.precision}, {format_ratio(answer.gain)}"


def answer_grid(answers: Sequence[Answer]) -> DataTable[Answer]:
    """Return a table of what to take where."""
    return DataTable(
        (
            _words("workload", lambda a: a.group.title),
            _words("setting", lambda a: "–" if a.cell is None else _setting(a)),
            _words("take", _taken),
            Column("speedup", "speed-up over fp32", lambda a: a.gain, lambda a: format_ratio(a.gain)),
            Column("throughput", "throughput", _rate_value, _rate_text),
            Column(
                "memory_ratio", "memory beside fp32", lambda a: a.memory_ratio, lambda a: format_ratio(a.memory_ratio)
            ),
            _words("rests on", _grounds),
        ),
        answers,
    )


@dataclass(frozen=True)
class _Line:
    """A trial in the table of all, with the figures that take a while to compute."""

    trial: Trial
    throughput: float | None
    step_seconds: float | None
    peak_bytes: int | None


def trial_grid(collection: Collection, file_of: Callable[[Trial], str]) -> DataTable[Any]:
    """Return a table of all trials."""

    def words(name: str, text: Callable[[Trial], str]) -> Column[_Line]:
        return _words(name, lambda line: text(line.trial))

    several = len(collection.machines) > 1
    columns = [
        words("workload", lambda t: t.spec.workload),
        words("kind", lambda t: "search" if is_search(t) else t.spec.kind),
        words("data", lambda t: t.spec.data_set),
        words("precision", lambda t: t.spec.precision),
        words("loss scale", lambda t: t.spec.loss_scale),
        _count("batch_size", "batch", lambda t: t.spec.batch_size),
        _count("gpus", "GPUs", lambda t: t.spec.world_size),
        words("techniques", lambda t: " + ".join(t.spec.techniques)),
        _count("seed", "seed", lambda t: t.spec.seed),
        _count("repeat", "round", lambda t: t.spec.repeat),
        Column("throughput", "throughput", lambda line: line.throughput, _throughput_text),
        Column("step_seconds", "step time", lambda line: line.step_seconds, lambda x: format_seconds(x.step_seconds)),
        Column(
            "peak_allocated_bytes", "peak allocated", lambda line: line.peak_bytes, lambda x: format_bytes(x.peak_bytes)
        ),
        words("status", lambda t: t.status),
        *([words("machine", lambda t: f"{t.environment.device_name} {t.environment.fingerprint}")] if several else []),
        words("measured", lambda t: t.started_at[:16].replace("T", " ")),
        words("file", file_of),
        words("message", lambda t: t.message),
    ]
    lines = [
        _Line(
            trial, throughput_of(trial), steady_metrics.step_seconds(trial), steady_metrics.peak_allocated_bytes(trial)
        )
        for trial in collection.trials
    ]
    kept = [column for column in columns if column.name not in _DULL or len({column.value(line) for line in lines}) > 1]
    return DataTable(kept, lines)


# What the table of all trials leaves out where it is the same in all.
_DULL = ("techniques", "seed", "repeat", "message", "gpus", "loss_scale", "data")


def _count(name: str, title: str, value: Callable[[Trial], int]) -> Column[_Line]:
    return Column(name, title, lambda line: value(line.trial), lambda line: str(value(line.trial)))


def machine_grid(collection: Collection) -> DataTable[Any]:
    """Return a table of the machines and their software: a column each, or a row each where they are many."""
    machines = list(collection.machines.values())
    if len(machines) > _MOST_MACHINE_COLUMNS:
        return DataTable([_words(trait, text) for trait, text in _TRAITS], machines)

    def column(number: int, machine: Environment) -> Column[tuple[str, Callable[[Environment], str]]]:
        title = machine.device_name
        if sum(each.device_name == title for each in machines) > 1:
            title += f" {machine.fingerprint}"
        return Column(f"machine_{number}", title, lambda row: row[1](machine), lambda row: row[1](machine), left=True)

    columns: list[Column[Any]] = [_words("of the machine", lambda row: row[0])]
    columns += [column(number, machine) for number, machine in enumerate(machines, start=1)]
    return DataTable(columns, _TRAITS)


_MOST_MACHINE_COLUMNS = 4
_TRAITS: tuple[tuple[str, Callable[[Environment], str]], ...] = (
    ("device", lambda e: e.device_name),
    ("memory", lambda e: format_bytes(e.gpu_memory_bytes)),
    ("GPUs", lambda e: str(e.num_gpus)),
    ("host", lambda e: e.host),
    ("CPU", lambda e: e.cpu),
    ("threads", lambda e: str(e.num_threads)),
    ("system", lambda e: e.system),
    ("driver", lambda e: e.driver or "–"),
    ("CUDA", lambda e: e.cuda or "–"),
    ("cuDNN", lambda e: e.cudnn or "–"),
    ("torch", lambda e: e.torch),
    ("torchvision", lambda e: e.torchvision or "–"),
    ("Python", lambda e: e.python),
    ("castwise", lambda e: e.castwise + (f" at {e.commit}" if e.commit else "")),
    ("fingerprint", lambda e: e.fingerprint),
)


def warnings(collection: Collection) -> list[tuple[TrialWarning, int, str]]:
    """Return each kind of warning as its first trial has it, with the number of trials and the names of a few."""
    found: dict[str, tuple[TrialWarning, list[str]]] = {}
    for trial in collection.trials:
        for each in warnings_of(trial):
            found.setdefault(each.name, (each, []))[1].append(f"{trial.spec.label} ({each.seen})")
    return [(each, len(labels), truncate_list(labels, separator="; ")) for each, labels in found.values()]


def _taken(answer: Answer) -> str:
    """Return what to take; in brackets what is no recommendation."""
    precision = answer.precision or "nothing"
    return f"({precision})" if answer.cut else precision


def _grounds(answer: Answer) -> str:
    if not answer.group.is_training:
        return "steady state"
    return f"cut runs: {answer.cut}" if answer.cut else "training runs"


def _setting(answer: Answer) -> str:
    spec = answer.cell.trial.spec if answer.cell is not None else answer.group.first.spec
    loop = join(spec.techniques) if spec.techniques else "plain loop" if answer.group.has_loops else ""
    return ", ".join(filter(None, [f"batch {spec.batch_size}", spec.spread, loop]))


def _rate_value(answer: Answer) -> float | None:
    return None if answer.cell is None or answer.cell.throughput is None else answer.cell.throughput.value


def _rate_text(answer: Answer) -> str:
    value = _rate_value(answer)
    return "–" if value is None else f"{format_rate(value)} {answer.group.unit}/s"


def _throughput_text(line: _Line) -> str:
    value = line.throughput
    return "–" if value is None else f"{format_rate(value)} {steady_metrics.unit_of(line.trial)}/s"


def _words(name: str, text: Callable[[T], str]) -> Column[T]:
    return Column(name.replace(" ", "_"), name, text, text, left=True)
