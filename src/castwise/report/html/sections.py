"""The tables of a report besides its charts': what to take, all trials, machines; and the warnings."""

from collections.abc import Callable

from castwise.analysis import steady_metrics
from castwise.analysis.warnings import TrialWarning, warnings_of
from castwise.records.schema import Trial
from castwise.registry.techniques import join
from castwise.render.fields import Field, FlatRow, find_field, find_fields, trial_values, worth_showing
from castwise.render.table import DataTable
from castwise.report.collection import Collection, is_search, machine_traits, throughput_of
from castwise.report.conclusions import Answer
from castwise.spec.quantities import truncate_list

_MAX_MACHINE_COLUMNS = 4
_QUESTION = (
    "workload",
    "kind",
    "data_set",
    "precision",
    "loss_scale",
    "batch_size",
    "gpus",
    "techniques",
    "seed",
    "repeat",
)
_RESULT = ("throughput_per_second", "step_seconds", "peak_allocated_bytes", "status")


def answer_table(answers: list[Answer]) -> DataTable[FlatRow]:
    """Return the table of what to take for which workload; what is no recommendation is in brackets."""
    rows: list[FlatRow] = []
    for answer in answers:
        group, config, precision = answer.group, answer.config, answer.precision or "nothing"
        spec = group.first.spec if config is None else config.trial.spec
        loop = join(spec.techniques) if spec.techniques else "plain loop" if group.has_loops else ""
        setting = ", ".join(part for part in (f"batch {spec.batch_size}", spec.world_size_label, loop) if part)
        source = f"cut runs: {answer.cut}" if answer.cut else "training runs" if group.is_training else "steady state"
        rows.append(
            {
                "workload": group.title,
                "setting": None if config is None else setting,
                "take": f"({precision})" if answer.cut else precision,
                "speedup": answer.speedup,
                "throughput_per_second": config.throughput.value if config and config.throughput else None,
                "unit": group.unit,
                "memory_ratio": answer.memory_ratio,
                "based_on": source,
            }
        )
    fields = [
        find_field("workload"),
        Field("setting", "setting"),
        Field("take", "take"),
        Field("speedup", "speed-up over fp32", "ratio"),
        find_field("throughput_per_second"),
        find_field("memory_ratio", "memory over fp32"),
        Field("based_on", "based on"),
    ]
    return DataTable(fields, rows)


def trial_table(collection: Collection, file_of: Callable[[Trial], str]) -> DataTable[FlatRow]:
    """Return the table of all trials."""
    rows: list[FlatRow] = [
        {
            **trial_values(trial),
            "kind": "search" if is_search(trial) else trial.spec.kind,
            "throughput_per_second": throughput_of(trial),
            "step_seconds": steady_metrics.step_seconds(trial),
            "peak_allocated_bytes": steady_metrics.peak_allocated_bytes(trial),
            "machine": f"{trial.environment.device_name} {trial.environment.fingerprint}",
            "started_at": trial.started_at,
            "file": file_of(trial),
        }
        for trial in collection.trials
    ]
    fields = [
        *find_fields(_QUESTION),
        *find_fields(_RESULT),
        Field("machine", "machine", varies=True),
        *find_fields(("started_at", "file", "message")),
    ]
    return DataTable(worth_showing(fields, rows, ("workload", "kind", "batch_size", *_RESULT, "started_at")), rows)


def machine_table(collection: Collection) -> DataTable[FlatRow]:
    """Return the table of machines and their software: a column for each, or a row for each of many."""
    machines = list(collection.machines.values())
    traits = [machine_traits(machine) for machine in machines]
    if len(machines) > _MAX_MACHINE_COLUMNS:
        return DataTable([Field(name, name) for name in traits[0]], traits)
    names = [machine.device_name for machine in machines]
    fields = [Field("trait", "of the machine")]
    for machine in machines:
        is_unique = names.count(machine.device_name) == 1
        title = machine.device_name if is_unique else f"{machine.device_name} {machine.fingerprint}"
        fields.append(Field(machine.fingerprint, title))
    rows: list[FlatRow] = [
        {"trait": name} | {machine.fingerprint: own[name] for machine, own in zip(machines, traits, strict=True)}
        for name in traits[0]
    ]
    return DataTable(fields, rows)


def warnings(collection: Collection) -> list[tuple[TrialWarning, int, str]]:
    """Return each kind of warning as its first trial has it, with the number of trials and the names of a few."""
    found: dict[str, tuple[TrialWarning, list[str]]] = {}
    for trial in collection.trials:
        for each in warnings_of(trial):
            found.setdefault(each.name, (each, []))[1].append(f"{trial.spec.label} ({each.seen})")
    return [(each, len(labels), truncate_list(labels, separator="; ")) for each, labels in found.values()]
