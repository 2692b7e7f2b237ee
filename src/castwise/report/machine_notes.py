"""Configurations that several machines with the same GPU model measured: whether their figures agree."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from castwise.analysis.statistics import Estimate, has_interval
from castwise.analysis.steady_metrics import unit_of
from castwise.records.schema import Trial
from castwise.render.units import format_rate, pluralize
from castwise.report.machine_names import names_by_fingerprint
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


@dataclass(frozen=True)
class _Spread:
    """One configuration's figures on several machines, the fastest first."""

    figures: tuple[Figure, ...]

    @property
    def difference(self) -> float:
        return self.figures[0][1].value / self.figures[-1][1].value - 1

    @property
    def is_different(self) -> bool:
        fast, slow = self.figures[0][1], self.figures[-1][1]
        if has_interval(fast) and has_interval(slow):
            return slow.high < fast.low
        return self.difference > _AGREE

    @property
    def where(self) -> str:
        device = "GPU" if self.figures[0][0].environment.gpu else "CPU"
        return f"on {len(self.figures)} machines with the same {device} model"

    @property
    def words(self) -> str:
        """Return which figure each machine has."""
        environments = [trial.environment for trial, _ in self.figures]
        machines = names_by_fingerprint(environments)
        software = [name for name in _SOFTWARE if len({getattr(each, name) for each in environments}) > 1]
        unit = unit_of(self.figures[0][0])
        places = []
        for number, (trial, rate) in enumerate(self.figures):
            machine = machines[trial.environment.fingerprint]
            versions = [f"{name} {getattr(trial.environment, name)}" for name in software]
            more = ", ".join(each for each in versions if each not in machine)
            places.append(f"{format_rate(rate.value)}{'' if number else f' {unit}/s'} on {machine}")
            places[-1] += f" ({more})" if more else ""
        label = self.figures[0][0].spec.label
        share = f"{100 * self.difference:.2g}" if self.difference < 0.1 else f"{100 * self.difference:.0f}"
        return f"{label} was measured {self.where}, and they differ by {share} %: {'; '.join(places)}."


@dataclass(frozen=True)
class _Deficit:
    """By which share one machine is slower than the median of its peers in one configuration."""

    trial: Trial
    share: float
    is_beyond: bool  # its interval, or without one what figures may differ by


def _deficits(figures: Mapping[_Machine, Figure]) -> Iterator[tuple[_Machine, _Deficit]]:
    for machine, (trial, rate) in figures.items():
        peers = median(other.value for each, (_, other) in figures.items() if each != machine)
        highest = rate.high if has_interval(rate) else rate.value * (1 + _AGREE)
        yield machine, _Deficit(trial, 1 - rate.value / peers, highest < peers)


def _slow_machines(deficits: Mapping[_Machine, Sequence[_Deficit]]) -> Iterator[str]:
    """Yield a line for each machine that is slower than its peers, the slowest first, with what else differs."""
    newest = {machine: found[-1].trial for machine, found in deficits.items()}
    names = names_by_fingerprint(trial.environment for trial in newest.values())
    shares = {machine: median(each.share for each in found) for machine, found in deficits.items()}
    for machine, share in sorted(shares.items(), key=lambda item: -item[1]):
        found = deficits[machine]
        num_beyond = sum(each.is_beyond for each in found)
        if share < _SLOWER or 2 * num_beyond <= len(found):
            continue
        trial = newest[machine]
        limits = {other: each.gpu_facts.power_limit_watts for other, each in newest.items() if each.gpu_facts}
        own, others = limits.get(machine), {limit for other, limit in limits.items() if other != machine and limit}
        name = names[trial.environment.fingerprint]
        more = [each for each in (trial.environment.gpu_uuid, f"host {trial.environment.hosts}") if each]
        if missing := ", ".join(each for each in more if each not in name):
            name += f" ({missing})"
        line = (
            f"{name} is slower than its peers: by {format_share(share)} of the median of {len(deficits) - 1} machines "
            f"with the same model, beyond its interval in {num_beyond} of {pluralize(len(found), 'configuration')}."
        )
        if own and others and own < min(others):
            line += f" Its power limit is {own:.0f} W; theirs is {min(others):.0f} W or more."
        yield line


def machine_notes(configurations: Iterable[Sequence[Figure]]) -> list[MachineNote]:
    """Return what must be said of figures of several machines: which are slower than their peers, and what differs.

    Args:
        configurations: For each of them its figures, a later one of the same machine in the place of an earlier one.
    """
    spreads: list[_Spread] = []
    # By GPU model and machine: by which share of its peers' median it is slower, of each configuration.
    deficits: dict[str, dict[_Machine, list[_Deficit]]] = {}
    for figures in configurations:
        by_model: dict[str, dict[_Machine, Figure]] = {}
        for figure in figures:
            environment = figure[0].environment
            by_model.setdefault(environment.device_name, {})[environment.machine] = figure
        for model, of_machines in by_model.items():
            if len(of_machines) > _FEWEST_PEERS:
                for machine, deficit in _deficits(of_machines):
                    deficits.setdefault(model, {}).setdefault(machine, []).append(deficit)
            if len(of_machines) > 1:
                fastest_first = sorted(of_machines.values(), key=lambda figure: -figure[1].value)
                spreads.append(_Spread(tuple(fastest_first)))
    different = sorted((each for each in spreads if each.is_different), key=attrgetter("difference"), reverse=True)
    notes = [MachineNote(each.words, is_warning=True) for each in different[:_MOST_NOTES]]
    left = len(different) - len(notes)
    notes[:0] = [MachineNote(line, is_warning=True) for each in deficits.values() for line in _slow_machines(each)]
    if left:
        text = f"{pluralize(left, 'more configuration')} {'differs' if left == 1 else 'differ'} between machines, too."
        notes.append(MachineNote(text, is_warning=True))
    alike: dict[str, list[str]] = {}
    for each in spreads:
        if not each.is_different:
            alike.setdefault(each.where, []).append(each.figures[0][0].spec.label)
    for where, labels in alike.items():
        which = f"{labels[0]} was" if len(labels) == 1 else f"{len(labels)} configurations were"
        text = f"{which} measured {where}, which agree within their intervals, or without intervals within 3 %."
        notes.append(MachineNote(text, is_warning=False))
    return notes
