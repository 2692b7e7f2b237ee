"""Records of any origin put in order: steady cells and training runs by topic, whose cells can be set side by side."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from castwise.analysis import steady_metrics
from castwise.analysis import training_metrics as runs
from castwise.analysis.result_table import Row, compare
from castwise.analysis.statistics import Estimate, Verdict
from castwise.analysis.training_metrics import Run
from castwise.max_batch.result import is_max_batch_trial
from castwise.records.schema import Environment, Trial
from castwise.records.store import free_name
from castwise.registry.precisions import known_precision, precision_sort_key
from castwise.registry.suites import is_search as searches
from castwise.spec.types import SYNTHETIC

# What differs between the cells of a topic.
AXES = ("precision", "loss_scale", "batch_size", "world_size", "parallelism", "techniques", "seed")


@dataclass(frozen=True)
class Configuration:
    """One cell's figures, whether it was timed in steady state or is a training run.

    Attributes:
        trial: The trial that speaks for it.
        trials: All its trials, one a process.
        throughput: Units per second; without an interval where one process was measured.
        speedup: Over float32.
        verdict: What the speed-up says; None for float32, for training runs, and where nothing was measured.
        scaling_efficiency: Scaling efficiency; None on one GPU.
        peak_allocated_bytes: Peak of what tensors held.
        peak_reserved_bytes: Peak of what the allocator held.
        driver_used_bytes: In use on the device at the end, by the driver's word.
        source: What the figures were taken from.
    """

    trial: Trial
    trials: tuple[Trial, ...]
    throughput: Estimate | None
    speedup: Estimate | None
    verdict: Verdict | None
    scaling_efficiency: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    driver_used_bytes: int | None
    source: Row | Run

    @property
    def precision(self) -> str:
        """Return the precision's name."""
        return self.trial.spec.precision

    @property
    def unit(self) -> str:
        """Return what throughput counts."""
        return steady_metrics.unit_of(self.trial)


@dataclass(frozen=True)
class ComparisonGroup:
    """Cells that differ in nothing but `AXES`: what goes into one chart.

    Attributes:
        title: What it is called; no two topics of a collection share theirs.
        configurations: Its cells, by batch size, GPUs and so on, and then in the registry's order of precisions.
    """

    title: str
    configurations: tuple[Configuration, ...]

    @property
    def first(self) -> Trial:
        """Return a trial that has what all have in common."""
        return self.configurations[0].trial

    @property
    def is_training(self) -> bool:
        """Return whether its cells are whole training runs."""
        return self.first.spec.kind == "training"

    @property
    def is_max_batch(self) -> bool:
        """Return whether its cells were measured to find the largest batch."""
        return is_max_batch_trial(self.first)

    @property
    def unit(self) -> str:
        """Return what throughput counts."""
        return self.configurations[0].unit

    @cached_property
    def has_loops(self) -> bool:
        """Return whether its cells have several sets of techniques; each of its answers asks."""
        return len({cell.trial.spec.techniques for cell in self.configurations}) > 1

    @property
    def rows(self) -> list[Row]:
        """Return the rows of steady cells."""
        return [cell.source for cell in self.configurations if isinstance(cell.source, Row)]

    @property
    def runs(self) -> list[Run]:
        """Return the runs of training cells."""
        return [cell.source for cell in self.configurations if isinstance(cell.source, Run)]

    @property
    def precisions(self) -> list[str]:
        """Return the precisions among its cells, in the registry's order."""
        return sorted({cell.precision for cell in self.configurations}, key=precision_sort_key)

    @property
    def settings(self) -> list[str]:
        """Return what cells have besides their precision, in words, in order; one empty one where all have the same."""
        return list(dict.fromkeys(self.setting(cell) for cell in self.configurations))

    @cached_property
    def _varying(self) -> tuple[str, ...]:
        names = ["batch_size", "world_size", "parallelism", "techniques", "seed"]
        varying = [name for name in names if len({_axis(cell.trial, name) for cell in self.configurations}) > 1]
        scales = {(cell.precision, cell.trial.spec.loss_scale) for cell in self.configurations}
        # A scale that a precision has in all its cells tells none of them apart.
        return (*varying, "loss_scale") if len(scales) > len(self.precisions) else tuple(varying)

    def setting(self, cell: Configuration, *without: str) -> str:
        """Return what tells a cell from the topic's others besides its precision: "batch 128, 4 GPUs".

        Args:
            cell: The cell.
            *without: Axes to leave out.
        """
        asked = (id(cell), without)
        if asked not in self._settings:  # asked for thousands of cells in each chart and table
            names = (name for name in self._varying if name not in without)
            self._settings[asked] = ", ".join(text for name in names if (text := _axis(cell.trial, name)))
        return self._settings[asked]

    @cached_property
    def _settings(self) -> dict[tuple[int, tuple[str, ...]], str]:
        return {}

    def label(self, cell: Configuration, *without: str) -> str:
        """Return precision and setting, without some axes."""
        setting = self.setting(cell, *without)
        return f"{cell.precision}, {setting}" if setting else cell.precision


@dataclass(frozen=True)
class Collection:
    """All that some records hold, put in order.

    Attributes:
        trials: The trials that count, oldest first.
        groups: Their cells by topic: steady ones first, each kind in the order of its first trial.
        notes: What was left out, a line each.
    """

    trials: tuple[Trial, ...]
    groups: tuple[ComparisonGroup, ...]
    notes: tuple[str, ...] = ()

    @property
    def configurations(self) -> list[Configuration]:
        """Return all cells."""
        return [cell for topic in self.groups for cell in topic.configurations]

    @property
    def machines(self) -> dict[str, Environment]:
        """Return each machine's environment by its fingerprint."""
        found: dict[str, Environment] = {}
        for trial in self.trials:
            found.setdefault(trial.environment.fingerprint, trial.environment)
        return found


def collect(trials: Iterable[Trial]) -> Collection:
    """Return trials in order; of a question measured several times on one machine the newest answer counts."""
    newest: dict[tuple[str, str], Trial] = {}
    copies = repeated = 0
    for trial in sorted(trials, key=lambda each: each.started_at):
        asked = (trial.environment.fingerprint, trial.spec.key)
        before = newest.pop(asked, None)
        if before is not None:
            copies += before == trial
            repeated += before != trial
        newest[asked] = trial
    kept = tuple(newest.values())
    return Collection(kept, _topics(kept), tuple(_left_out(copies, repeated)))


def throughput_of(trial: Trial) -> float | None:
    """Return units per second of a trial of either kind; None where nothing was timed."""
    return runs.throughput(trial) if trial.spec.kind == "training" else steady_metrics.throughput(trial)


def is_search(trial: Trial) -> bool:
    """Return whether a trial is a step in a suite's search for the largest batch, whose times say nothing."""
    return searches(trial.spec)


def _left_out(copies: int, repeated: int) -> Iterable[str]:
    if copies:
        yield f"{_count(copies, 'record is a copy', 'records are copies')} of another, and counted once"
    if repeated:
        yield f"{_count(repeated, 'record was', 'records were')} measured again later: the newest counts"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _topics(trials: Sequence[Trial]) -> tuple[ComparisonGroup, ...]:
    steady = [_of_row(row) for row in compare([trial for trial in trials if trial.spec.kind == "steady"])]
    training = [_of_run(run) for run in runs.runs([trial for trial in trials if trial.spec.kind == "training"])]
    groups: dict[tuple[object, ...], list[Configuration]] = {}
    for cell in (*steady, *training):
        groups.setdefault((cell.trial.spec.kind, *runs.run_comparison_key(cell.trial, *AXES)), []).append(cell)
    several = len({trial.environment.device_name for trial in trials}) > 1
    alike: dict[str, list[Trial]] = {}
    for cells in groups.values():
        alike.setdefault(_title(cells[0].trial, several), []).append(cells[0].trial)
    topics: dict[str, ComparisonGroup] = {}
    for cells in groups.values():
        first = cells[0].trial
        title = _title(first, several)
        # What still has one title differs in protocol or recipe, which no title says in a word.
        title = free_name(title + _apart(first.environment, [each.environment for each in alike[title]]), topics)
        topics[title] = ComparisonGroup(title, tuple(sorted(cells, key=_sort_key)))
    return tuple(topics.values())


def _of_row(row: Row) -> Configuration:
    return Configuration(
        trial=row.trial,
        trials=row.trials,
        throughput=row.throughput_estimate,
        speedup=row.speedup_estimate,
        verdict=row.verdict,
        scaling_efficiency=row.scaling_efficiency,
        peak_allocated_bytes=row.peak_allocated_bytes,
        peak_reserved_bytes=row.peak_reserved_bytes,
        driver_used_bytes=steady_metrics.largest(runs.driver_used_bytes(trial) for trial in row.trials),
        source=row,
    )


def _of_run(run: Run) -> Configuration:
    return Configuration(
        trial=run.trial,
        trials=(run.trial,),
        throughput=_alone(run.throughput),
        speedup=_alone(run.speedup),
        verdict=None,
        scaling_efficiency=run.efficiency,
        peak_allocated_bytes=run.peak_allocated_bytes,
        peak_reserved_bytes=run.peak_reserved_bytes,
        driver_used_bytes=run.driver_used_bytes,
        source=run,
    )


def _alone(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value, math.nan, math.nan, 1)


# What tells machines with the same device apart, the first that does so alone.
_APART: tuple[tuple[str, Callable[[Environment], object]], ...] = (
    ("on host {}", lambda machine: machine.host),
    ("{}-GPU machine", lambda machine: machine.num_gpus),
    ("torch {}", lambda machine: machine.torch),
    ("driver {}", lambda machine: machine.driver),
    ("castwise {}", lambda machine: machine.castwise),
    ("machine {}", lambda machine: machine.fingerprint),
)


def _apart(machine: Environment, machines: Sequence[Environment]) -> str:
    """Return what tells a machine from others whose topics have the same title; empty where it is one machine."""
    number = len({each.fingerprint for each in machines})
    for words, value in _APART if number > 1 else ():
        if len({(each.fingerprint, value(each)) for each in machines}) == len({value(each) for each in machines}):
            return f", {words.format(value(machine))}"
    return ""


def _title(trial: Trial, several_machines: bool) -> str:
    spec = trial.spec
    title = spec.workload if spec.data_set == SYNTHETIC else f"{spec.workload} on {spec.data_set}"
    if spec.recipe is not None:
        steps = spec.recipe.max_steps
        whole = "training" if steps is None else f"training, {steps} steps an epoch"
        title += f": {'search for the largest batch' if is_search(trial) else whole}"
    if is_max_batch_trial(trial):
        limit = spec.memory_limit_bytes
        title += ": largest batch" + (f" within {limit / 2**30:.3g} GiB" if limit is not None else "")
    return f"{title} ({trial.environment.device_name})" if several_machines else title


def _sort_key(cell: Configuration) -> tuple[object, ...]:
    spec = cell.trial.spec
    return (
        spec.batch_size,
        spec.world_size,
        spec.parallelism,
        len(spec.techniques),
        spec.techniques,
        spec.seed,
        precision_sort_key(spec.precision),
        spec.loss_scale,
    )


def _axis(trial: Trial, name: str) -> str:
    """Return a cell's place on an axis in words; empty where it is what goes without saying."""
    spec = trial.spec
    if name == "batch_size":
        return f"batch {spec.batch_size}"
    if name == "world_size":
        return "1 GPU" if spec.world_size == 1 else f"{spec.world_size} GPUs"
    if name == "parallelism":
        return "" if spec.parallelism == "none" else spec.parallelism
    if name == "techniques":
        return " + ".join(spec.techniques)
    if name == "seed":
        return f"seed {spec.seed}"
    known = known_precision(spec.precision)
    return "" if known is not None and spec.loss_scale == known.loss_scale else f"loss scale {spec.loss_scale}"
