"""Samples to readings: one block's, and what is said of all that a trial lacks."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from castwise.records.schema import EnergyMeasurement, GpuFacts, TelemetrySummary
from castwise.telemetry.aggregate import join_reasons, reading_of
from castwise.telemetry.gpu import Sample
from castwise.telemetry.host import HostSample, is_descendant, pressure, steal

_OTHER_NAMESPACE = "the driver's process ids are not this container's"
_NONE_SHOWN = "the driver shows no process on the GPU, not even the trial's own"
_FEWEST_TICKS = 4  # three from the first on: each is seen late
_EARLIER = "an earlier process ran this epoch"


@dataclass
class Processes:
    """Tells this program's processes on GPUs from others'.

    Attributes:
        before: The processes that computed on any of them before any of this job did; None where that is not known.
        own_pid: This program's process; its descendants are its own too.
    """

    before: frozenset[int] | None
    own_pid: int
    _own: set[int] = field(default_factory=set)

    def count_foreign(self, present: frozenset[int]) -> tuple[int | None, str]:
        """Return how many processes are others', or None and why that cannot be told.

        In a container the driver may give the host's process ids, or none. Where it shows one of ours by the id
        that it has here, ids mean what they say. Where it does not, only those that were there before us are
        known to be others'.

        Args:
            present: The ids of the processes that compute on a GPU, or on any of several, while one of ours does.
        """
        self._own |= {pid for pid in present - self._own if is_descendant(pid, self.own_pid)}
        if present & self._own:
            return len(present - self._own), ""
        if not present:
            return None, _NONE_SHOWN
        stayed = len(present & (self.before or frozenset()))
        return (stayed, "") if stayed else (None, _OTHER_NAMESPACE)


def make_reading(
    samples: Mapping[str, Sequence[Sample]],
    processes: Processes,
    host: tuple[HostSample, HostSample],
    seconds: float,
    why_not: Mapping[str, str] | None = None,
) -> TelemetrySummary:
    """Return what samples come to.

    Args:
        samples: Of each GPU, by torch's name for it, in order: one just before, those while it was watched, one just
            after. Empty on a CPU.
        processes: Tells own processes from others'.
        host: The host just before and just after.
        seconds: The time between the two.
        why_not: Why GPUs of the trial have no samples.
    """
    each = {device: _of_one(its, processes, seconds) for device, its in samples.items()}
    reading = reading_of(each, why_not or {}, seconds)
    foreign, why_unknown = _foreign(samples, processes)
    update = {
        "foreign_processes": foreign,
        "cpu_pressure": pressure(*host, seconds),
        "cpu_steal": steal(*host),
        "cpu_load": host[1].load,
        "missing": reading.missing | ({"foreign_processes": why_unknown} if why_unknown else {}),
    }
    return reading.model_copy(update=update)


def _of_one(samples: Sequence[Sample], processes: Processes, seconds: float) -> TelemetrySummary:
    """Return one GPU's reading, without what is the host's, and without why its processes are not known."""
    # The first and the last are taken outside of the block: clocks and power are those of the others if there are any.
    inner = samples[1:-1] or samples
    clocks = _given(sample.sm_clock_hertz for sample in inner)
    missing, energy = _reasons(samples), _energy(samples)
    if energy is None:
        missing.setdefault("energy_joules", "the driver's counter did not move")
    return TelemetrySummary(
        seconds=seconds,
        num_samples=len(samples),
        sm_clock_hertz=_mean(clocks),
        min_sm_clock_hertz=min(clocks, default=None),
        memory_clock_hertz=_mean(_given(sample.memory_clock_hertz for sample in inner)),
        power_watts=_mean(_given(sample.power_watts for sample in inner)),
        max_temperature_celsius=max(_given(sample.temperature_celsius for sample in samples), default=None),
        throttle_reasons=_union(samples),
        foreign_processes=_foreign({"": samples}, processes)[0],
        energy_joules=energy,
        pcie_generation=max((s.pcie_generation for s in samples if s.pcie_generation is not None), default=None),
        pcie_width=max((s.pcie_width for s in samples if s.pcie_width is not None), default=None),
        ecc_errors=max((s.ecc_errors for s in samples if s.ecc_errors is not None), default=None),
        missing=missing,
    )


def metered(samples: Sequence[tuple[float, Sample]]) -> EnergyMeasurement:
    """Return the energy between the first and the last tick of the counter.

    Args:
        samples: The host's clock, and what the driver said, while steps ran.
    """
    told = [(when, sample.energy_joules) for when, sample in samples if sample.energy_joules is not None]
    if not told:
        reasons = (sample.missing.get("energy_joules", "") for _, sample in samples)
        return EnergyMeasurement(missing=next(filter(None, reasons), "nothing was read"))
    ticks = [(earlier, later) for earlier, later in itertools.pairwise(told) if later[1] != earlier[1]]
    if len(ticks) < _FEWEST_TICKS:
        return EnergyMeasurement(
            missing=f"the driver's counter ticked {len(ticks)} times in {told[-1][0] - told[0][0]:.2g} s"
        )
    (_, (first, before)), (_, (last, after)) = ticks[0], ticks[-1]
    late = max(later[0] - earlier[0] for earlier, later in (ticks[0], ticks[-1]))
    return EnergyMeasurement(joules=after - before, seconds=last - first, num_ticks=len(ticks) - 1, late_seconds=late)


def unwatched(count: int) -> list[TelemetrySummary]:
    """Return a reading of nothing for each epoch that an earlier process of the same trial ran."""
    return [TelemetrySummary(seconds=0.0, missing={"gpu": _EARLIER})] * count


def note_of(
    readings: Iterable[TelemetrySummary], facts: GpuFacts | None, metered: EnergyMeasurement | None = None
) -> str:
    """Return what of a trial's telemetry is "not available: why", each reason once; empty where all is there.

    Args:
        readings: One a timed block.
        facts: Of the GPU.
        metered: The energy of a stretch of steps; where there is one, it does not matter that the counter stood still
            over a block.
    """
    why: dict[str, list[str]] = {}
    named = set[str]()
    for missing in (*(reading.missing for reading in readings), facts.missing if facts is not None else {}):
        for name, reason in missing.items():
            is_known = name == "energy_joules" and metered is not None and not metered.missing
            if name not in named and not is_known:
                named.add(name)
                why.setdefault(reason, []).append(name)
    parts = [f"{', '.join(names)} ({reason})" for reason, names in why.items()]
    return f"not available: {'; '.join(parts)}" if parts else ""


def _foreign(samples: Mapping[str, Sequence[Sample]], processes: Processes) -> tuple[int | None, str]:
    """Return the most processes of others at once, each counted once on however many GPUs it is.

    With it, why that is not known, or not of all GPUs.
    """
    counts: list[int] = []
    why = ""
    for moment in itertools.zip_longest(*samples.values()):  # the GPUs are read at one pace
        listed = [sample.processes for sample in moment if sample is not None and sample.processes is not None]
        if listed:
            count, why = processes.count_foreign(frozenset[int]().union(*listed))
            counts += [] if count is None else [count]
    unlisted = {device: _why_unlisted(its) for device, its in samples.items()}
    silent = {device: reason for device, reason in unlisted.items() if reason}
    if silent:
        why = join_reasons(silent, len(samples))
    elif counts:
        why = ""
    return max(counts, default=None), why


def _why_unlisted(samples: Sequence[Sample]) -> str:
    """Return why no sample of a GPU lists its processes; empty where one does."""
    if any(sample.processes is not None for sample in samples):
        return ""
    return next((sample.missing["processes"] for sample in samples if "processes" in sample.missing), "not told")


def _energy(samples: Sequence[Sample]) -> float | None:
    """Return what the counter went up by in joules; None where it stood still or was set back by a reload."""
    if not samples:
        return None
    before, after = samples[0].energy_joules, samples[-1].energy_joules
    return after - before if before is not None and after is not None and after > before else None


def _union(samples: Sequence[Sample]) -> tuple[str, ...] | None:
    told = [sample.throttle_reasons for sample in samples if sample.throttle_reasons is not None]
    return tuple(dict.fromkeys(reason for reasons in told for reason in reasons)) if told else None


def _reasons(samples: Sequence[Sample]) -> dict[str, str]:
    """Return why a reading's fields are missing: those that no sample has, and those that were lost on the way."""
    reasons = {name: why for sample in samples for name, why in sample.missing.items() if name != "processes"}
    if "temperature_celsius" in reasons:
        reasons["max_temperature_celsius"] = reasons.pop("temperature_celsius")
    return reasons


def _given(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
