"""What is seen of each of a trial's GPUs, put together: one reading, one set of facts, one energy."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from castwise.records.schema import EnergyMeasurement, GpuFacts, TelemetrySummary

_Rule = Callable[[Sequence[Any]], Any]


def reading_of(each: Mapping[str, TelemetrySummary], why_not: Mapping[str, str], seconds: float) -> TelemetrySummary:
    """Return the reading of all GPUs of a trial, without what is the host's.

    Args:
        each: The reading of each GPU that was read, by torch's name for it.
        why_not: Why the others were not.
        seconds: The time that was watched.
    """
    values = _put_together(_READING_RULES, list(each.values()))
    if why_not:  # a sum over some of them would pass for all
        values |= dict.fromkeys(_OF_ALL)
    missing = _missing({device: reading.missing for device, reading in each.items()}, why_not)
    return TelemetrySummary(
        seconds=seconds, num_gpus=len(each), affected_gpus=_whose(each, why_not), missing=missing, **values
    )


def facts_of(each: Mapping[str, GpuFacts], why_not: Mapping[str, str]) -> GpuFacts:
    """Return what the driver says of all GPUs of a trial.

    Args:
        each: What it says of each, by torch's name for it.
        why_not: Why it says nothing of the others.
    """
    missing = _missing({device: facts.missing for device, facts in each.items()}, why_not)
    return GpuFacts(missing=missing, **_put_together(_FACTS_RULES, list(each.values())))


def metered_of(each: Mapping[str, EnergyMeasurement], why_not: Mapping[str, str]) -> EnergyMeasurement:
    """Return the energy of all GPUs of a trial; none of any where it is not known of each.

    Args:
        each: The energy of each GPU, by torch's name for it.
        why_not: Why nothing was read of the others.
    """
    reasons = {device: metered.missing for device, metered in each.items() if metered.missing}
    if reasons or why_not or not each:
        said = join_reasons({**reasons, **why_not}, len(each) + len(why_not))
        return EnergyMeasurement(num_gpus=len(each), missing=said or "nothing was read")
    seconds = min(metered.seconds for metered in each.values())
    return EnergyMeasurement(
        num_gpus=len(each),
        joules=sum(metered.joules * seconds / metered.seconds for metered in each.values()),
        seconds=seconds,
        num_ticks=min(metered.num_ticks for metered in each.values()),
        late_seconds=max(metered.late_seconds for metered in each.values()),
    )


def join_reasons(reasons: Mapping[str, str], num_gpus: int) -> str:
    """Return what GPUs have for a reason, in a line: by their names, but where it is the same for all.

    Args:
        reasons: Each one's, by torch's name for it.
        num_gpus: How many GPUs there are, those without a reason counted.
    """
    devices: dict[str, list[str]] = {}
    for device, why in reasons.items():
        devices.setdefault(why, []).append(device)
    if len(devices) == 1 and len(reasons) == num_gpus:
        return next(iter(devices))
    return ", ".join(f"{' and '.join(names)}: {why}" for why, names in devices.items())


def _missing(each: Mapping[str, Mapping[str, str]], why_not: Mapping[str, str]) -> dict[str, str]:
    names = dict.fromkeys(name for missing in each.values() for name in missing)
    found = {"gpu": join_reasons(why_not, len(each) + len(why_not))} if why_not else {}
    for name in names:
        found[name] = join_reasons(
            {device: missing[name] for device, missing in each.items() if name in missing}, len(each)
        )
    return found


def _whose(each: Mapping[str, TelemetrySummary], why_not: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return which GPUs something is of that casts doubt on figures; without what is of all of them."""
    found: dict[str, list[str]] = {}
    for device, reading in each.items():
        seen = [*(reading.throttle_reasons or ())]
        seen += [name for name in ("foreign_processes", "ecc_errors") if getattr(reading, name)]
        for name in seen:
            found.setdefault(name, []).append(device)
    num_gpus = len(each) + len(why_not)
    return {name: tuple(devices) for name, devices in found.items() if len(devices) < num_gpus}


def _put_together(rules: Mapping[str, _Rule], documents: Sequence[Any]) -> dict[str, Any]:
    return {name: rule([getattr(each, name) for each in documents]) for name, rule in rules.items() if documents}


def _lowest(values: Sequence[Any]) -> Any:
    return min((value for value in values if value is not None), default=None)


def _highest(values: Sequence[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def _sum(values: Sequence[Any]) -> Any:
    given = [value for value in values if value is not None]
    return sum(given) if given else None


def _sum_of_all(values: Sequence[Any]) -> Any:
    return None if None in values else sum(values)


def _all_on(values: Sequence[Any]) -> Any:
    given = [value for value in values if value is not None]
    return all(given) if given else None


def _union(values: Sequence[Any]) -> Any:
    given = [value for value in values if value is not None]
    return tuple(dict.fromkeys(name for names in given for name in names)) if given else None


_READING_RULES: dict[str, _Rule] = {
    "num_samples": _lowest,
    "sm_clock_hertz": _lowest,
    "min_sm_clock_hertz": _lowest,
    "memory_clock_hertz": _lowest,
    "power_watts": _sum_of_all,
    "max_temperature_celsius": _highest,
    "throttle_reasons": _union,
    "energy_joules": _sum_of_all,
    "pcie_generation": _lowest,
    "pcie_width": _lowest,
    "ecc_errors": _sum,
}
_OF_ALL = tuple(name for name, rule in _READING_RULES.items() if rule is _sum_of_all)

_FACTS_RULES: dict[str, _Rule] = {
    "max_sm_clock_hertz": _lowest,
    "power_limit_watts": _lowest,
    "persistence_mode": _all_on,
    "ecc_mode": _all_on,
    "ecc_errors": _sum,
    "max_pcie_generation": _lowest,
    "max_pcie_width": _lowest,
}
