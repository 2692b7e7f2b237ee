"""Configurations that several machines with the same GPU model measured: whether their figures agree."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from castwise.analysis.statistics import Estimate, has_interval
from castwise.analysis.steady_metrics import unit_of
from castwise.records.schema import Trial
from castwise.render.units import format_rate, pluralize
from castwise.report.machine_names import names_by_fingerprint

# By so much may figures without intervals differ. Source: chosen here; processes of one configuration differ by per
# cents if the host is the limit.
_AGREE = 0.03
_MOST_NOTES = 5

_SOFTWARE = ("driver", "cuda", "torch", "castwise")

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


def machine_notes(configurations: Iterable[Sequence[Figure]]) -> list[MachineNote]:
    """Return what must be said of figures of several machines: a warning for each configuration that differs.

    Args:
        configurations: For each of them its figures, a later one of the same machine in the place of an earlier one.
    """
    spreads: list[_Spread] = []
    for figures in configurations:
        by_model: dict[str, dict[tuple[str, str, str | None], Figure]] = {}
        for figure in figures:
            environment = figure[0].environment
            by_model.setdefault(environment.device_name, {})[environment.machine] = figure
        for of_machines in by_model.values():
            if len(of_machines) > 1:
                fastest_first = sorted(of_machines.values(), key=lambda figure: -figure[1].value)
                spreads.append(_Spread(tuple(fastest_first)))
    different = sorted((each for each in spreads if each.is_different), key=attrgetter("difference"), reverse=True)
    notes = [MachineNote(each.words, is_warning=True) for each in different[:_MOST_NOTES]]
    left = len(different) - len(notes)
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
