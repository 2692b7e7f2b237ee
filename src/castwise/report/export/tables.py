"""Records as flat tables, at the level asked for: configurations, trials, blocks, epochs, losses or readings.

Names and units of the columns are stable: figures in SI units, with the unit as a suffix. What a record does not have
is None. To add a column: one line here, and its field in `render/fields.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from castwise.analysis import steady_metrics, training_metrics
from castwise.analysis.energy import joules_per_unit, power_watts
from castwise.analysis.statistics import Estimate, has_interval
from castwise.errors import unknown_name
from castwise.records.schema import Block, Epoch, TelemetrySummary, Trial
from castwise.render.fields import Field, FlatRow, Unit, find_fields
from castwise.report.collection import Collection, Configuration, throughput_of

FileOf = Callable[[Trial], str]
Columns = Mapping[str, Callable[[Any], Any]]


@dataclass(frozen=True)
class FlatTable:
    """Fields, and rows that have a value for each."""

    fields: Sequence[Field]
    rows: Sequence[FlatRow]


def flat_table(level: str, collection: Collection, file_of: FileOf) -> FlatTable:
    """Return records as a flat table.

    Args:
        level: A name of `LEVELS`.
        collection: The records.
        file_of: Returns the name of the file that a trial was read from.

    Raises:
        UsageError: There is no such level.
    """
    if level not in LEVELS:
        raise unknown_name("level", level, LEVELS)
    return LEVELS[level](collection, file_of)


def _last_accuracy(trial: Trial) -> float | None:
    epochs = training_metrics.epochs_of(trial)
    return epochs[-1].accuracy if epochs else None


QUESTION: Columns = {
    "key": lambda trial: trial.spec.key,
    "cell": lambda trial: trial.spec.configuration,
    "workload": lambda trial: trial.spec.workload,
    "kind": lambda trial: trial.spec.kind,
    "precision": lambda trial: trial.spec.precision,
    "loss_scale": lambda trial: trial.spec.loss_scale,
    "batch_size": lambda trial: trial.spec.batch_size,
    "world_size": lambda trial: trial.spec.world_size,
    "parallelism": lambda trial: trial.spec.parallelism,
    "techniques": lambda trial: " ".join(trial.spec.techniques),
    "data_set": lambda trial: trial.spec.data_set,
    "device": lambda trial: trial.spec.device,
    "seed": lambda trial: trial.spec.seed,
}
_OUTCOME: Columns = {
    "status": lambda trial: trial.status,
    "message": lambda trial: trial.message,
}
_MACHINE: Columns = {
    "device_name": lambda trial: trial.environment.device_name,
    "fingerprint": lambda trial: trial.environment.fingerprint,
    "host": lambda trial: trial.environment.host,
    "driver": lambda trial: trial.environment.driver,
    "cuda": lambda trial: trial.environment.cuda,
    "cudnn": lambda trial: trial.environment.cudnn,
    "torch": lambda trial: trial.environment.torch,
    "castwise": lambda trial: trial.environment.castwise,
    "commit": lambda trial: trial.environment.commit,
}
TRIAL: Columns = {
    **QUESTION,
    "repeat": lambda trial: trial.spec.repeat,
    "recipe": lambda trial: trial.spec.recipe and trial.spec.recipe.model_dump_json(),
    "protocol": lambda trial: trial.spec.protocol.model_dump_json(),
    **_OUTCOME,
    "started_at": lambda trial: trial.started_at,
    "duration_seconds": lambda trial: trial.duration_seconds,
    "sitting": lambda trial: trial.session_id,
    "unit": steady_metrics.unit_of,
    "step_seconds": steady_metrics.step_seconds,
    "spread": steady_metrics.spread,
    "throughput_per_second": throughput_of,
    "peak_allocated_bytes": steady_metrics.peak_allocated_bytes,
    "peak_reserved_bytes": steady_metrics.peak_reserved_bytes,
    "driver_used_bytes": training_metrics.driver_used_bytes,
    "final_loss": lambda trial: (steady_metrics.final_loss(trial) or (None,))[0],
    "accuracy": _last_accuracy,
    "skipped_steps": lambda trial: (
        steady_metrics.skipped_steps(trial) + sum(epoch.skipped_steps for epoch in training_metrics.epochs_of(trial))
    ),
    "joules_per_unit": joules_per_unit,
    "power_watts": power_watts,
    "num_parameters": lambda trial: trial.facts and trial.facts.num_parameters,
    "optimizer": lambda trial: trial.facts and trial.facts.optimizer,
    "warm_up_seconds": lambda trial: trial.facts and trial.facts.warm_up_seconds,
    "warm_up_steps": lambda trial: trial.facts and trial.facts.warm_up_steps,
    "settled": lambda trial: trial.facts and trial.facts.settled,
    **_MACHINE,
    "schema_version": lambda trial: trial.schema_version,
}


def _trials(collection: Collection, file_of: FileOf) -> FlatTable:
    return _table({**TRIAL, "file": file_of}, collection.trials)


def _configurations(collection: Collection, file_of: FileOf) -> FlatTable:
    columns: dict[str, Callable[[Configuration], Any]] = {
        **_of_trial(QUESTION),
        "unit": lambda found: found.unit,
        "processes": lambda found: len(found.trials),
        **_estimate("throughput_per_second", lambda found: found.throughput),
        **_estimate("speedup", lambda found: found.speedup),
        "verdict": lambda found: found.verdict and found.verdict.kind,
        "verdict_reason": lambda found: found.verdict and found.verdict.reason,
        "scaling_efficiency": lambda found: found.scaling_efficiency,
        "peak_allocated_bytes": lambda found: found.peak_allocated_bytes,
        "peak_reserved_bytes": lambda found: found.peak_reserved_bytes,
        "driver_used_bytes": lambda found: found.driver_used_bytes,
        **_of_trial({**_OUTCOME, **_MACHINE, "file": file_of}),
    }
    return _table(columns, collection.configurations)


def _of_trial(columns: Columns) -> dict[str, Callable[[Any], Any]]:
    """Return columns of a trial as columns of things that have a `trial`."""

    def value_of(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda thing: get(thing.trial)

    return {name: value_of(get) for name, get in columns.items()}


def _estimate(name: str, get: Callable[[Configuration], Estimate | None]) -> Columns:
    def end(which: str) -> Callable[[Configuration], float | None]:
        def value(found: Configuration) -> float | None:
            estimate = get(found)
            return None if estimate is None or not has_interval(estimate) else getattr(estimate, which)

        return value

    def value(found: Configuration) -> float | None:
        estimate = get(found)
        return None if estimate is None else estimate.value

    return {name: value, f"{name}_low": end("low"), f"{name}_high": end("high")}


@dataclass(frozen=True)
class _Part:
    """A block, an epoch, a loss or a reading, with the trial it is of and its number, counted from 1."""

    trial: Trial
    rank: int
    number: int
    part: Any


def _blocks(collection: Collection, file_of: FileOf) -> FlatTable:
    parts = [
        _Part(trial, rank, number, block)
        for trial in collection.trials
        for rank, samples in enumerate(trial.ranks)
        for number, block in enumerate(samples.blocks, start=1)
    ]
    return _parts_table("block", Block, parts, file_of)


def _epochs(collection: Collection, file_of: FileOf) -> FlatTable:
    return _parts_table("epoch", Epoch, _each_epoch(collection), file_of, without="losses")


def _readings(collection: Collection, file_of: FileOf) -> FlatTable:
    parts = [
        _Part(trial, 0, number, reading)
        for trial in collection.trials
        for number, reading in enumerate(trial.readings, start=1)
    ]
    return _parts_table("turn", TelemetrySummary, parts, file_of, without="missing")


def _losses(collection: Collection, file_of: FileOf) -> FlatTable:
    columns = {
        **_part_columns("epoch", file_of),
        "step_of_epoch": lambda loss: loss.part[0],
        "loss": lambda loss: loss.part[1],
    }
    losses = (
        _Part(each.trial, each.rank, each.number, pair) for each in _each_epoch(collection) for pair in each.part.losses
    )
    return _table(columns, losses)


def _each_epoch(collection: Collection) -> Iterator[_Part]:
    for trial in collection.trials:
        for rank, samples in enumerate(trial.ranks):
            for number, epoch in enumerate(samples.epochs, start=1):
                yield _Part(trial, rank, number, epoch)


LEVELS: dict[str, Callable[[Collection, FileOf], FlatTable]] = {
    "cells": _configurations,
    "trials": _trials,
    "blocks": _blocks,
    "epochs": _epochs,
    "losses": _losses,
    "readings": _readings,
}


def _part_columns(number: str, file_of: FileOf) -> dict[str, Callable[[_Part], Any]]:
    """Return the columns that say which trial, rank and part a row is of."""
    return {
        **_of_trial({name: QUESTION[name] for name in ("key", "workload", "precision", "batch_size")}),
        **_of_trial({"fingerprint": _MACHINE["fingerprint"], "repeat": TRIAL["repeat"]}),
        "rank": lambda part: part.rank,
        number: lambda part: part.number,
        "file": lambda part: file_of(part.trial),
    }


def _parts_table(
    number: str, document: type[BaseModel], parts: Iterable[_Part], file_of: FileOf, without: str = ""
) -> FlatTable:
    """Return a table of parts of trials, with all fields of the parts' document but one."""
    which = _part_columns(number, file_of)
    # Columns are called as in the records' JSON, whose names do not change.
    attributes = {
        info.serialization_alias or name: name for name, info in document.model_fields.items() if name != without
    }
    fields = [
        Field(name, unit=_unit_of(document.model_fields[attribute].annotation))
        for name, attribute in attributes.items()
    ]
    rows = [
        {name: get(part) for name, get in which.items()}
        | {name: _plain(getattr(part.part, attribute)) for name, attribute in attributes.items()}
        for part in parts
    ]
    return FlatTable([*find_fields(which), *fields], rows)


def _unit_of(annotation: Any) -> Unit:
    """Return what values of an annotation are; of a union with None, those that are there."""
    if get_origin(annotation) is tuple:
        return "text"
    types = {annotation, *get_args(annotation)}
    types |= {inner for each in types for inner in get_args(each)}  # Annotated inside a union
    units: tuple[tuple[type, Unit], ...] = ((bool, "boolean"), (int, "count"), (float, "number"))
    return next((unit for plain, unit in units if plain in types), "text")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{key}={','.join(names)}" for key, names in value.items())
    return " ".join(value) if isinstance(value, tuple) else value


def _table(columns: Columns, things: Iterable[Any]) -> FlatTable:
    rows = [{name: get(thing) for name, get in columns.items()} for thing in things]
    return FlatTable(find_fields(columns), rows)
