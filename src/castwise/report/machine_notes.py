"""Configurations that several machines with the same GPU model measured: whether their figures agree."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from castwise.analysis.statistics import Estimate, has_interval
from castwise.analysis.steady_metrics import unit_of
from castwise.records.schema import Trial
from castwise.report.machine_names import names_by_fingerprint
from castwise.show.units import format_rate, pluralize
from castwise.spec.quantities import format_share

# By so much may figures without intervals differ. Source: chosen here; processes of one configuration differ by per
# cents if the host is the limit.
_AGREE = 0.03
_MOST_NOTES = 5
# A machine among peers is named if it is slower in most of its configurations, and by so much in their median: an
# interval at 95 % is too low by chance in one of 40. Source: chosen here.
_FEWEST_PEERS = 2
_SLOWER = 0.01

_SOFTWARE = ("driver", "cuda", "torch", "castwise")

_Machine = tuple[str | float | None, ...]  # `Environment.machine`
Figure = tuple[Trial, Estimate]  # a trial of a machine, and the configuration's throughput there


@dataclass(frozen=True)
class MachineNote:
    """A sentence on configurations that several machines measured."""

    text: str
    is_warning: bool  # whether their figures differ


def _difference(figures: Sequence[Figure]) -> float:
    """Return by which share the first figure, the highest, is above the last."""
    return figures[0][1].value / figures[-1][1].value - 1


def _is_different(figures: Sequence[Figure]) -> bool:
    fast, slow = figures[0][1], figures[-1][1]
    if has_interval(fast) and has_interval(slow):
        return slow.high < fast.low
    return _difference(figures) > _AGREE


def _where(figures: Sequence[Figure]) -> str:
    device = "GPU" if figures[0][0].environment.gpu else "CPU"
    return f"on {len(figures)} machines with the same {device} model"


def _words(figures: Sequence[Figure]) -> str:
    """Return which figure each machine has."""
    environments = [trial.environment for trial, _ in figures]
    machines = names_by_fingerprint(environments)
    software = [name for name in _SOFTWARE if len({getattr(each, name) for each in environments}) > 1]
    parts = []
    for number, (trial, rate) in enumerate(figures):
        machine = machines[trial.environment.fingerprint]
        versions = [f"{name} {getattr(trial.environment, name)}" for name in software]
        more = ", ".join(each for each in versions if each not in machine)
        unit = "" if number else f" {unit_of(trial)}/s"
        parts.append(f"{format_rate(rate.value)}{unit} on {machine}" + (f" ({more})" if more else ""))
    difference = _difference(figures)
    share = f"{100 * difference:.2g}" if difference < 0.1 else f"{100 * difference:.0f}"
    label = figures[0][0].spec.label
    return f"{label} was measured {_where(figures)}, and they differ by {share} %: {'; '.join(parts)}."


def _slow_machines(configurations: Sequence[Mapping[_Machine, Figure]]) -> Iterator[str]:
    """Yield a line for each machine that is slower than its peers, which have the same GPU model, the slowest first."""
    newest: dict[_Machine, Trial] = {}
    # By which shares a machine is slower than the median of its peers, and how often that is beyond its interval.
    shares: dict[_Machine, list[float]] = {}
    num_beyond = Counter[_Machine]()
    for figures in configurations:
        for machine, (trial, rate) in figures.items():
            peers = median(other.value for each, (_, other) in figures.items() if each != machine)
            highest = rate.high if has_interval(rate) else rate.value * (1 + _AGREE)
            newest[machine] = trial
            shares.setdefault(machine, []).append(1 - rate.value / peers)
            num_beyond[machine] += highest < peers
    names = names_by_fingerprint(trial.environment for trial in newest.values())
    medians = {machine: median(own) for machine, own in shares.items()}
    for machine, share in sorted(medians.items(), key=lambda item: -item[1]):
        if share < _SLOWER or 2 * num_beyond[machine] <= len(shares[machine]):
            continue
        environment = newest[machine].environment
        name = names[environment.fingerprint]
        more = [each for each in (environment.gpu_uuid, f"host {environment.hosts}") if each and each not in name]
        name += f" ({', '.join(more)})" if more else ""
        yield (
            f"{name} is slower than its peers: by {format_share(share)} of the median of {len(medians) - 1} machines "
            f"with the same model, beyond its interval in {num_beyond[machine]} of "
            f"{pluralize(len(shares[machine]), 'configuration')}.{_about_power_limit(machine, newest)}"
        )


def _about_power_limit(machine: _Machine, newest: Mapping[_Machine, Trial]) -> str:
    """Return that a machine's power limit is lower than that of all others, if it is."""
    limits = {key: trial.gpu_facts.power_limit_watts or 0.0 for key, trial in newest.items() if trial.gpu_facts}
    own, others = limits.pop(machine, 0.0), [limit for limit in limits.values() if limit]
    if not own or not others or own >= min(others):
        return ""
    return f" Its power limit is {own:.0f} W; theirs is {min(others):.0f} W or more."


def machine_notes(configurations: Iterable[Sequence[Figure]]) -> list[MachineNote]:
    """Return what must be said of figures of several machines: which are slower than their peers, and what differs.

    Of a configuration's figures a later one counts instead of an earlier one of the same machine.
    """
    every: list[Sequence[Figure]] = []  # of each configuration that several machines measured, the fastest first
    with_peers: dict[str, list[dict[_Machine, Figure]]] = {}  # by GPU model
    for figures in configurations:
        by_model: dict[str, dict[_Machine, Figure]] = {}
        for figure in figures:
            environment = figure[0].environment
            by_model.setdefault(environment.device_name, {})[environment.machine] = figure
        for model, of_machines in by_model.items():
            if len(of_machines) > _FEWEST_PEERS:
                with_peers.setdefault(model, []).append(of_machines)
            if len(of_machines) > 1:
                every.append(sorted(of_machines.values(), key=lambda figure: -figure[1].value))
    different = sorted(filter(_is_different, every), key=_difference, reverse=True)
    warnings = [line for each in with_peers.values() for line in _slow_machines(each)]
    warnings += map(_words, different[:_MOST_NOTES])
    if left := len(different[_MOST_NOTES:]):
        differ = "differs" if left == 1 else "differ"
        warnings.append(f"{pluralize(left, 'more configuration')} {differ} between machines, too.")
    notes = [MachineNote(line, is_warning=True) for line in warnings]
    alike: dict[str, list[str]] = {}
    for each in every:
        if not _is_different(each):
            alike.setdefault(_where(each), []).append(each[0][0].spec.label)
    for where, labels in alike.items():
        which = f"{labels[0]} was" if len(labels) == 1 else f"{len(labels)} configurations were"
        text = f"{which} measured {where}, which agree within their intervals, or without intervals within 3 %."
        notes.append(MachineNote(text, is_warning=False))
    return notes
