"""Records as compact ones that may be shared, one for each machine."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from castwise.analysis.ceiling import least_bytes
from castwise.analysis.energy import energy_of
from castwise.analysis.model_flops import flops_of
from castwise.analysis.result_table import Row
from castwise.analysis.statistics import Estimate, has_interval
from castwise.analysis.warnings import POWER_LIMIT, warnings_of_all
from castwise.records.shared import (
    QUESTION,
    SharedRecord,
    SharedRow,
    may_be_shared,
    problems_of_machine,
    problems_of_row,
)
from castwise.registry.precisions import BASELINE
from castwise.show.units import pluralize

# Fields of a machine that have the same names in a shared record.
_OF_MACHINE = ("capability", "power_limit_watts", "driver", "torch", "cuda", "cudnn", "castwise")
# Warnings of figures that are not the GPU's own speed.
_DISTURBED = ("ecc-errors", "foreign-process", "cpu-starved", "throttled", "noisy")


def shared_of(rows: Sequence[Row]) -> tuple[list[SharedRecord], list[str]]:
    """Return a record for each machine, and why rows were left out, a line each."""
    machines: dict[str, list[tuple[Row, SharedRow]]] = {}
    left: Counter[str] = Counter()
    for row in rows:
        why = _why_not(row)
        shared = None if why else _shared(row)
        if shared is None:
            left[why or "without a time"] += 1
        else:
            machines.setdefault(row.trial.environment.fingerprint, []).append((row, shared))
    records = []
    for measured in machines.values():
        environment = measured[0][0].trial.environment
        record = SharedRecord(
            schema_version=1,
            licence="CC0-1.0",
            gpu=environment.device_name,
            memory_bytes=environment.gpu_memory_bytes,
            **{name: getattr(environment, name) for name in _OF_MACHINE},
            date=max(trial.started_at for row, _ in measured for trial in row.trials)[:10],
            rows=(),
        )
        kept: dict[tuple[object, ...], SharedRow] = {}
        for _, shared in measured:
            if problems := problems_of_machine(record) or problems_of_row(shared, record):
                left[f"where {problems[0]}"] += 1
            elif shared.question not in kept or shared.n > kept[shared.question].n:  # of two protocols the larger one
                kept[shared.question] = shared
        records += [record.model_copy(update={"rows": tuple(kept.values())})] if kept else []
    return records, [f"{pluralize(count, 'configuration')} {why}" for why, count in left.items()]


def _why_not(row: Row) -> str | None:
    spec, environment = row.trial.spec, row.trial.environment
    if spec.user_model is not None:
        return "of your own model or script"
    if row.trial.status != "ok":
        return "that failed"
    if not may_be_shared(spec) or environment.gpu is None:
        return "of training runs, other devices or memory limits"
    if environment.packed:
        return "measured beside other trials"
    found = [each.name for each in warnings_of_all(row.trials) if each.cause != POWER_LIMIT]
    return next((f"with the warning {name}" for name in _DISTURBED if name in found), None)


def _shared(row: Row) -> SharedRow | None:
    spec, throughput = row.trial.spec, row.throughput_estimate
    energy, flops = energy_of(row.trials), flops_of(row.trials)
    if throughput is None or not row.step_seconds:
        return None
    speedup = None if row.precision == BASELINE else row.speedup_estimate
    share = spec.num_processes / spec.world_size  # of a process's work that is one GPU's
    return SharedRow(
        **{name: getattr(spec, name) for name in QUESTION},
        n=len(row.trials),
        **_rounded("throughput", throughput),
        step_seconds=_digits(row.step_seconds),
        **_rounded("speedup", speedup),
        peak_bytes=row.peak_allocated_bytes,
        joules_per_unit=None if energy is None else _digits(energy[0].value),
        flops={} if flops is None else {name: round(count * share) for name, count in flops.by_format.items()},
        moved_bytes=0 if flops is None else round(least_bytes(flops) * share),
    )


def _rounded(name: str, found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {}
    ends = {f"{name}_low": found.low, f"{name}_high": found.high} if has_interval(found) else {}
    return {key: _digits(value) for key, value in {name: found.value, **ends}.items()}


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
