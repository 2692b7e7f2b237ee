"""From samples to what a record holds: the reading of a block, the GPUs' facts, the energy of sustained steps."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from castwise.records.schema import EnergyMeasurement, GpuCounters, GpuFacts, GpuReading, TelemetrySummary
from castwise.spec.grouping import grouped
from castwise.telemetry.gpu import CounterReading, Sample
from castwise.telemetry.host import HostSample, is_descendant, pressure, steal

_MIN_TICKS = 4  # the first is only where the time begins; each is seen late

_Combine = Callable[[Sequence[Any]], Any]


def _union(values: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(values)))


@dataclass(frozen=True)
class _ReadingField:
    """How a field of a reading is made."""

    sample_field: str
    over_time: _Combine | None  # of one GPU's samples; None: the increase from the first to the last
    over_gpus: _Combine
    is_inner: bool = False  # leaves out the samples just before and after, if there are others: at work only
    needs_all: bool = False  # is None unless it is known of every GPU


_READING: dict[str, _ReadingField] = {
    "sm_clock_hertz": _ReadingField("sm_clock_hertz", statistics.fmean, min, is_inner=True),
    "min_sm_clock_hertz": _ReadingField("sm_clock_hertz", min, min, is_inner=True),
    "memory_clock_hertz": _ReadingField("memory_clock_hertz", statistics.fmean, min, is_inner=True),
    "power_watts": _ReadingField("power_watts", statistics.fmean, sum, is_inner=True, needs_all=True),
    "max_temperature_celsius": _ReadingField("temperature_celsius", max, max),
    "throttle_reasons": _ReadingField("throttle_reasons", _union, _union),
    "energy_joules": _ReadingField("energy_joules", None, sum, needs_all=True),
    "pcie_generation": _ReadingField("pcie_generation", max, min),
    "pcie_width": _ReadingField("pcie_width", max, min),
    "ecc_errors": _ReadingField("ecc_errors", max, sum),
}

_OF_EACH = GpuReading.model_fields.keys() & _READING.keys()

_FACTS: dict[str, _Combine] = {
    "max_sm_clock_hertz": min,
    "power_limit_watts": min,
    "persistence_mode": all,
    "ecc_mode": all,
    "ecc_errors": sum,
    "max_pcie_generation": min,
    "max_pcie_width": min,
    "nvlinked_gpus": min,
}


@dataclass
class Processes:
    """Tells this program's processes on GPUs from others'."""

    before: frozenset[int] | None  # those that used a GPU before any of this job did; None if that is not known
    own_pid: int  # its descendants are its own too
    _own: set[int] = field(default_factory=set)

    def count_foreign(self, present: frozenset[int]) -> tuple[int | None, str]:
        """Return how many processes are others', or None and why that is not known.

        In a container the driver may give the host's process ids, or none. If it shows one of ours by the id that it
        has here, ids mean the same on both sides. If not, only those that were there before us are known to be others'.
        """
        self._own |= {pid for pid in present - self._own if is_descendant(pid, self.own_pid)}
        if present & self._own:
            return len(present - self._own), ""
        if not present:
            return None, "the driver shows no process on the GPU, not even the trial's own"
        num_stayed = len(present & (self.before or frozenset()))
        return (num_stayed, "") if num_stayed else (None, "the driver's process ids are not this container's")


def summarize(
    samples: Mapping[str, Sequence[Sample]],
    processes: Processes,
    host: tuple[HostSample, HostSample],
    seconds: float,
    unreadable: Mapping[str, str] | None = None,
) -> TelemetrySummary:
    """Return the reading of a block.

    Args:
        samples: Of each GPU, by torch's name for it, in order: one just before the block, those during it, one just
            after. Empty on a CPU.
        processes: Tells own processes from others'.
        host: The host just before and just after.
        seconds: The time between the two.
        unreadable: Why other GPUs of the trial have no samples, by torch's names for them.
    """
    each = {device: _summarize_gpu(of_gpu, processes, seconds) for device, of_gpu in samples.items()}
    reading = combine_readings(each, unreadable or {}, seconds)
    num_foreign, why_unknown = _foreign_processes(samples, processes)
    update = {
        "foreign_processes": num_foreign,
        "cpu_pressure": pressure(*host, seconds),
        "cpu_steal": steal(*host),
        "cpu_load": host[1].load,
        "missing": reading.missing | ({"foreign_processes": why_unknown} if why_unknown else {}),
    }
    return reading.model_copy(update=update)


def _summarize_gpu(samples: Sequence[Sample], processes: Processes, seconds: float) -> TelemetrySummary:
    """Return one GPU's reading, without the host's fields."""
    values: dict[str, Any] = {}
    for name, rule in _READING.items():
        used = (samples[1:-1] or samples) if rule.is_inner else samples
        known = [value for value in (getattr(sample, rule.sample_field) for sample in used) if value is not None]
        if rule.over_time is not None:
            values[name] = rule.over_time(known) if known else None
    before = samples[0].energy_joules if samples else None
    after = samples[-1].energy_joules if samples else None
    values["energy_joules"] = None
    if before is not None and after is not None and after > before:  # a reloaded driver sets it back
        values["energy_joules"] = after - before
    reasons = {name: why for sample in samples for name, why in sample.missing.items() if name != "processes"}
    if "temperature_celsius" in reasons:
        reasons["max_temperature_celsius"] = reasons.pop("temperature_celsius")
    if values["energy_joules"] is None:
        reasons.setdefault("energy_joules", "the driver's counter did not move")
    return TelemetrySummary(
        seconds=seconds,
        num_samples=len(samples),
        foreign_processes=_foreign_processes({"": samples}, processes)[0],
        missing=reasons,
        **values,
    )


def combine_readings(
    each: Mapping[str, TelemetrySummary], unreadable: Mapping[str, str], seconds: float
) -> TelemetrySummary:
    """Return the reading of all GPUs of a trial, without the host's fields; `unreadable` are those without one."""
    values: dict[str, Any] = {}
    for name, rule in _READING.items():
        known = [value for value in (getattr(reading, name) for reading in each.values()) if value is not None]
        is_partial = rule.needs_all and (bool(unreadable) or len(known) < len(each))
        values[name] = rule.over_gpus(known) if known and not is_partial else None
    num_gpus = len(each) + len(unreadable)
    affected: dict[str, list[str]] = {}
    for device, reading in each.items():
        suspicious = [name for name in ("foreign_processes", "ecc_errors") if getattr(reading, name)]
        for name in (*(reading.throttle_reasons or ()), *suspicious):
            affected.setdefault(name, []).append(device)
    return TelemetrySummary(
        seconds=seconds,
        num_gpus=len(each),
        num_samples=min((reading.num_samples for reading in each.values()), default=0),
        # What all GPUs have in common needs no names.
        affected_gpus={name: tuple(devices) for name, devices in affected.items() if len(devices) < num_gpus},
        each_gpu=_of_each(each) if num_gpus > 1 else (),
        missing=_combine_missing({device: reading.missing for device, reading in each.items()}, unreadable),
        **values,
    )


def _of_each(readings: Mapping[str, TelemetrySummary]) -> tuple[GpuReading, ...]:
    return tuple(
        GpuReading(device=device, **{name: getattr(reading, name) for name in _OF_EACH})
        for device, reading in readings.items()
    )


def combine_facts(each: Mapping[str, GpuFacts], unreadable: Mapping[str, str]) -> GpuFacts:
    values: dict[str, Any] = {}
    for name, combine in _FACTS.items():
        known = [value for value in (getattr(facts, name) for facts in each.values()) if value is not None]
        values[name] = combine(known) if known else None
    missing = _combine_missing({device: facts.missing for device, facts in each.items()}, unreadable)
    return GpuFacts(missing=missing, **values)


def measure_energy(samples: Sequence[tuple[float, Sample]]) -> EnergyMeasurement:
    """Return the energy between the first and the last tick of a GPU's counter, from samples with the host's clock."""
    known = [(when, sample.energy_joules) for when, sample in samples if sample.energy_joules is not None]
    if not known:
        reasons = (sample.missing.get("energy_joules", "") for _, sample in samples)
        return EnergyMeasurement(missing=next(filter(None, reasons), "nothing was read"))
    ticks = [(earlier, later) for earlier, later in itertools.pairwise(known) if later[1] != earlier[1]]
    if len(ticks) < _MIN_TICKS:
        watched_seconds = known[-1][0] - known[0][0]
        return EnergyMeasurement(missing=f"the driver's counter ticked {len(ticks)} times in {watched_seconds:.2g} s")
    first_seconds, first_joules = ticks[0][1]
    last_seconds, last_joules = ticks[-1][1]
    return EnergyMeasurement(
        joules=last_joules - first_joules,
        seconds=last_seconds - first_seconds,
        num_ticks=len(ticks) - 1,
        late_seconds=max(later[0] - earlier[0] for earlier, later in (ticks[0], ticks[-1])),
    )


def combine_energy(each: Mapping[str, EnergyMeasurement], unreadable: Mapping[str, str]) -> EnergyMeasurement:
    """Return the energy of all GPUs of a trial; none if it is not known of each."""
    reasons = {device: energy.missing for device, energy in each.items() if energy.missing} | dict(unreadable)
    if reasons or not each:
        why = join_reasons(reasons, len(each) + len(unreadable))
        return EnergyMeasurement(num_gpus=len(each), missing=why or "nothing was read")
    seconds = min(energy.seconds for energy in each.values())
    return EnergyMeasurement(
        num_gpus=len(each),
        joules=sum(energy.joules * seconds / energy.seconds for energy in each.values()),
        seconds=seconds,
        num_ticks=min(energy.num_ticks for energy in each.values()),
        late_seconds=max(energy.late_seconds for energy in each.values()),
    )


def mean_counters(blocks: Sequence[Mapping[str, CounterReading]]) -> tuple[GpuCounters | None, str]:
    """Return the mean counters of GPUs over blocks, weighted by time, and why there are none, or not of all.

    Each block has a reading of each GPU, by torch's name for it.
    """
    reasons = {device: each.missing for block in blocks for device, each in block.items() if each.missing}
    why = join_reasons(reasons, max(map(len, blocks), default=0))
    readings = [reading for block in blocks for reading in block.values() if reading.shares and reading.seconds > 0]
    if not readings:
        return None, why
    means = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(reading.shares for reading in readings)):
        known = [(reading.shares[name], reading.seconds) for reading in readings if name in reading.shares]
        means[name] = statistics.fmean(*zip(*known, strict=True))
    num_blocks = sum(any(reading.shares for reading in block.values()) for block in blocks)
    return GpuCounters(num_blocks=num_blocks, **means), why


def join_reasons(reasons: Mapping[str, str], num_gpus: int) -> str:
    """Return GPUs' reasons in a line, with their names unless one reason holds for all `num_gpus`."""
    devices = grouped(reasons, lambda device: reasons[device])
    if len(devices) == 1 and len(reasons) == num_gpus:
        return next(iter(devices))
    return ", ".join(f"{' and '.join(names)}: {why}" for why, names in devices.items())


def _combine_missing(each: Mapping[str, Mapping[str, str]], unreadable: Mapping[str, str]) -> dict[str, str]:
    combined = {"gpu": join_reasons(unreadable, len(each) + len(unreadable))} if unreadable else {}
    for name in dict.fromkeys(itertools.chain.from_iterable(each.values())):
        reasons = {device: missing[name] for device, missing in each.items() if name in missing}
        combined[name] = join_reasons(reasons, len(each))
    return combined


def unwatched(count: int, why: str = "an earlier process ran this epoch") -> list[TelemetrySummary]:
    """Return an empty reading for each epoch, or block, that ran before anything was read."""
    return [TelemetrySummary(seconds=0.0, missing={"gpu": why})] * count


def telemetry_note(
    readings: Iterable[TelemetrySummary],
    facts: GpuFacts | None,
    energy: EnergyMeasurement | None = None,
    why_no_counters: str = "",
) -> str:
    """Return which of a trial's telemetry is "not available: why", each reason once; empty if all is there.

    If the energy of sustained steps is known, it does not matter that the counter did not move over a block.
    """
    why: dict[str, str] = {}
    for missing in (*(reading.missing for reading in readings), facts.missing if facts is not None else {}):
        for name, reason in missing.items():
            why.setdefault(name, reason)
    if energy is not None and not energy.missing:
        why.pop("energy_joules", None)
    if why_no_counters:
        why["hardware counters"] = why_no_counters
    fields = grouped(why, lambda name: why[name])
    parts = [f"{', '.join(names)} ({reason})" for reason, names in fields.items()]
    return f"not available: {'; '.join(parts)}" if parts else ""


def _foreign_processes(samples: Mapping[str, Sequence[Sample]], processes: Processes) -> tuple[int | None, str]:
    """Return the largest number of others' processes at once, and why that is not known, or not of all GPUs."""
    counts: list[int] = []
    why = ""
    for moment in itertools.zip_longest(*samples.values()):  # the GPUs are read at one pace
        listed = [sample.processes for sample in moment if sample is not None and sample.processes is not None]
        if listed:
            count, why = processes.count_foreign(frozenset[int]().union(*listed))
            counts += [] if count is None else [count]
    unlisted = {
        device: next((sample.missing["processes"] for sample in of_gpu if "processes" in sample.missing), "not known")
        for device, of_gpu in samples.items()
        if all(sample.processes is None for sample in of_gpu)
    }
    if unlisted:
        why = join_reasons(unlisted, len(samples))
    elif counts:
        why = ""
    return max(counts, default=None), why
