"""Records as flat tables, at the level asked for: cells, trials, blocks, epochs, losses or readings.

Names and units of the fields are stable: figures in SI units, with the unit as a suffix. A field that a record
does not have is None.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from castwise.analysis import steady_metrics, training_metrics
from castwise.analysis.energy import joules_per_unit, power_watts
from castwise.analysis.statistics import Estimate, has_interval
from castwise.errors import unknown_name
from castwise.records.schema import Block, Epoch, TelemetrySummary, Trial
from castwise.report.collection import Collection, Configuration, throughput_of

Kind = Literal["text", "integer", "number", "truth"]
R = TypeVar("R")
FileOf = Callable[[Trial], str]


@dataclass(frozen=True)
class Field(Generic[R]):
    """A column of a flat table.

    Attributes:
        name: Its name.
        kind: What its values are, where they are not None.
        value: Its value in a row.
    """

    name: str
    kind: Kind
    value: Callable[[R], Any]


@dataclass(frozen=True)
class FlatTable:
    """A flat table.

    Attributes:
        fields: Name and kind of each column.
        rows: The values, in the columns' order.
    """

    fields: tuple[tuple[str, Kind], ...]
    rows: list[tuple[Any, ...]]


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


def _cells(collection: Collection, file_of: FileOf) -> FlatTable:
    fields: list[Field[Configuration]] = [
        *(Field(f.name, f.kind, _of_trial(f)) for f in _QUESTION),
        Field("unit", "text", lambda c: c.unit),
        Field("processes", "integer", lambda c: len(c.trials)),
        *_estimate("throughput_per_second", lambda c: c.throughput),
        *_estimate("speedup", lambda c: c.speedup),
        Field("verdict", "text", lambda c: c.verdict and c.verdict.kind),
        Field("verdict_reason", "text", lambda c: c.verdict and c.verdict.reason),
        Field("scaling_efficiency", "number", lambda c: c.scaling_efficiency),
        Field("peak_allocated_bytes", "integer", lambda c: c.peak_allocated_bytes),
        Field("peak_reserved_bytes", "integer", lambda c: c.peak_reserved_bytes),
        Field("driver_used_bytes", "integer", lambda c: c.driver_used_bytes),
        *(Field(f.name, f.kind, _of_trial(f)) for f in (*_OUTCOME, *_MACHINE)),
        Field("file", "text", lambda c: file_of(c.trial)),
    ]
    return _flat(fields, collection.configurations)


def _trials(collection: Collection, file_of: FileOf) -> FlatTable:
    fields: list[Field[Trial]] = [
        *_QUESTION,
        Field("repeat", "integer", lambda t: t.spec.repeat),
        Field("recipe", "text", lambda t: t.spec.recipe and t.spec.recipe.model_dump_json()),
        Field("protocol", "text", lambda t: t.spec.protocol.model_dump_json()),
        *_OUTCOME,
        Field("started_at", "text", lambda t: t.started_at),
        Field("duration_seconds", "number", lambda t: t.duration_seconds),
        Field("sitting", "text", lambda t: t.session_id),
        Field("unit", "text", steady_metrics.unit_of),
        Field("step_seconds", "number", steady_metrics.step_seconds),
        Field("spread", "number", steady_metrics.spread),
        Field("throughput_per_second", "number", throughput_of),
        Field("peak_allocated_bytes", "integer", steady_metrics.peak_allocated_bytes),
        Field("peak_reserved_bytes", "integer", steady_metrics.peak_reserved_bytes),
        Field("driver_used_bytes", "integer", training_metrics.driver_used_bytes),
        Field("final_loss", "number", lambda t: (steady_metrics.final_loss(t) or (None,))[0]),
        Field(
            "accuracy",
            "number",
            lambda t: training_metrics.epochs_of(t)[-1].accuracy if training_metrics.epochs_of(t) else None,
        ),
        Field("skipped_steps", "integer", _skipped),
        Field("joules_per_unit", "number", joules_per_unit),
        Field("power_watts", "number", power_watts),
        Field("num_parameters", "integer", lambda t: t.facts and t.facts.num_parameters),
        Field("optimizer", "text", lambda t: t.facts and t.facts.optimizer),
        Field("warm_up_seconds", "number", lambda t: t.facts and t.facts.warm_up_seconds),
        Field("warm_up_steps", "integer", lambda t: t.facts and t.facts.warm_up_steps),
        Field("settled", "truth", lambda t: t.facts and t.facts.settled),
        *_MACHINE,
        Field("schema_version", "integer", lambda t: t.schema_version),
        Field("file", "text", file_of),
    ]
    return _flat(fields, collection.trials)


@dataclass(frozen=True)
class _Part(Generic[R]):
    """A block, an epoch, a loss or a reading, with the trial it is of and its number, counted from 1."""

    trial: Trial
    rank: int
    number: int
    part: R


def _blocks(collection: Collection, file_of: FileOf) -> FlatTable:
    def parts() -> Iterator[_Part[Block]]:
        for trial in collection.trials:
            for rank, samples in enumerate(trial.ranks):
                for number, block in enumerate(samples.blocks, start=1):
                    yield _Part(trial, rank, number, block)

    return _flat([*_which(file_of, "block"), *_fields_of(Block)], parts())


def _epochs(collection: Collection, file_of: FileOf) -> FlatTable:
    return _flat([*_which(file_of, "epoch"), *_fields_of(Epoch, without="losses")], _each_epoch(collection))


def _losses(collection: Collection, file_of: FileOf) -> FlatTable:
    def parts() -> Iterator[_Part[tuple[int, float]]]:
        for each in _each_epoch(collection):
            for pair in each.part.losses:
                yield _Part(each.trial, each.rank, each.number, pair)

    fields: list[Field[_Part[Any]]] = [
        *_which(file_of, "epoch"),
        Field("step_of_epoch", "integer", lambda p: p.part[0]),
        Field("loss", "number", lambda p: p.part[1]),
    ]
    return _flat(fields, parts())


def _readings(collection: Collection, file_of: FileOf) -> FlatTable:
    def parts() -> Iterator[_Part[TelemetrySummary]]:
        for trial in collection.trials:
            for number, reading in enumerate(trial.readings, start=1):
                yield _Part(trial, 0, number, reading)

    fields = _fields_of(TelemetrySummary, without="missing")
    return _flat([*_which(file_of, "turn"), *fields], parts())


LEVELS: dict[str, Callable[[Collection, FileOf], FlatTable]] = {
    "cells": _cells,
    "trials": _trials,
    "blocks": _blocks,
    "epochs": _epochs,
    "losses": _losses,
    "readings": _readings,
}


def _skipped(trial: Trial) -> int:
    return steady_metrics.skipped_steps(trial) + sum(epoch.skipped_steps for epoch in training_metrics.epochs_of(trial))


def _each_epoch(collection: Collection) -> Iterator[_Part[Epoch]]:
    for trial in collection.trials:
        for rank, samples in enumerate(trial.ranks):
            for number, epoch in enumerate(samples.epochs, start=1):
                yield _Part(trial, rank, number, epoch)


_QUESTION: tuple[Field[Trial], ...] = (
    Field("key", "text", lambda t: t.spec.key),
    Field("cell", "text", lambda t: t.spec.configuration),
    Field("workload", "text", lambda t: t.spec.workload),
    Field("kind", "text", lambda t: t.spec.kind),
    Field("precision", "text", lambda t: t.spec.precision),
    Field("loss_scale", "text", lambda t: t.spec.loss_scale),
    Field("batch_size", "integer", lambda t: t.spec.batch_size),
    Field("world_size", "integer", lambda t: t.spec.world_size),
    Field("parallelism", "text", lambda t: t.spec.parallelism),
    Field("techniques", "text", lambda t: " ".join(t.spec.techniques)),
    Field("data_set", "text", lambda t: t.spec.data_set),
    Field("device", "text", lambda t: t.spec.device),
    Field("seed", "integer", lambda t: t.spec.seed),
)
_OUTCOME: tuple[Field[Trial], ...] = (
    Field("status", "text", lambda t: t.status),
    Field("message", "text", lambda t: t.message),
)
_MACHINE: tuple[Field[Trial], ...] = (
    Field("device_name", "text", lambda t: t.environment.device_name),
    Field("fingerprint", "text", lambda t: t.environment.fingerprint),
    Field("host", "text", lambda t: t.environment.host),
    Field("driver", "text", lambda t: t.environment.driver),
    Field("cuda", "text", lambda t: t.environment.cuda),
    Field("cudnn", "text", lambda t: t.environment.cudnn),
    Field("torch", "text", lambda t: t.environment.torch),
    Field("castwise", "text", lambda t: t.environment.castwise),
    Field("commit", "text", lambda t: t.environment.commit),
)


def _of_trial(field: Field[Trial]) -> Callable[[Configuration], Any]:
    return lambda cell: field.value(cell.trial)


def _estimate(name: str, get: Callable[[Configuration], Estimate | None]) -> Iterator[Field[Configuration]]:
    def end(which: str) -> Callable[[Configuration], float | None]:
        def value(cell: Configuration) -> float | None:
            found = get(cell)
            known = found is not None and (which == "value" or has_interval(found))
            return getattr(found, which) if known else None

        return value

    yield Field(name, "number", end("value"))
    yield Field(f"{name}_low", "number", end("low"))
    yield Field(f"{name}_high", "number", end("high"))


def _which(file_of: FileOf, number: str) -> list[Field[_Part[Any]]]:
    """Return the fields that say which trial, rank and turn a row is of."""
    named = [field for field in _QUESTION if field.name in ("key", "workload", "precision", "batch_size")]
    return [
        *(Field(f.name, f.kind, _of_part(f)) for f in named),
        Field("fingerprint", "text", lambda p: p.trial.environment.fingerprint),
        Field("repeat", "integer", lambda p: p.trial.spec.repeat),
        Field("rank", "integer", lambda p: p.rank),
        Field(number, "integer", lambda p: p.number),
        Field("file", "text", lambda p: file_of(p.trial)),
    ]


def _of_part(field: Field[Trial]) -> Callable[[_Part[Any]], Any]:
    return lambda part: field.value(part.trial)


_KINDS: tuple[tuple[type, Kind], ...] = ((bool, "truth"), (int, "integer"), (float, "number"))


def _fields_of(
    document: type[Block] | type[Epoch] | type[TelemetrySummary], without: str = ""
) -> list[Field[_Part[Any]]]:
    """Return a document's own fields; several words in one stand beside each other."""
    return [
        Field(name, _kind(info.annotation), _getter(name))
        for name, info in document.model_fields.items()
        if name != without
    ]


def _kind(annotation: Any) -> Kind:
    """Return what values of an annotation are; of a union with None, those that are there."""
    if get_origin(annotation) is tuple:
        return "text"
    types = {annotation, *get_args(annotation)}
    types |= {inner for each in types for inner in get_args(each)}  # Annotated inside a union
    return next((kind for plain, kind in _KINDS if plain in types), "text")


def _getter(name: str) -> Callable[[_Part[Any]], Any]:
    def value(part: _Part[Any]) -> Any:
        found = getattr(part.part, name)
        if isinstance(found, dict):
            return " ".join(f"{key}={','.join(names)}" for key, names in found.items())
        return " ".join(found) if isinstance(found, tuple) else found

    return value


def _flat(fields: Sequence[Field[Any]], rows: Iterable[Any]) -> FlatTable:
    return FlatTable(
        tuple((field.name, field.kind) for field in fields),
        [tuple(field.value(row) for field in fields) for row in rows],
    )
