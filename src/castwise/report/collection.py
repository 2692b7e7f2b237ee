"""Records of any origin as comparison groups of configurations, steady state and training runs alike."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from castwise.analysis import steady_metrics, training_metrics
from castwise.analysis.causes import Diagnosis, diagnose
from castwise.analysis.energy import energy_of
from castwise.analysis.result_table import MARGIN, Row, over_seeds, rows_of_runs, rows_of_steps
from castwise.analysis.statistics import has_interval
from castwise.max_batch.result import MaxBatch, is_max_batch_trial, max_batches_of
from castwise.records.schema import Environment, Trial
from castwise.records.store import free_name
from castwise.registry.gpus import short_device_name
from castwise.registry.precisions import AS_WRITTEN, BASELINE, DEFAULT, precision_sort_key
from castwise.registry.suites import is_search
from castwise.registry.techniques import narrowing
from castwise.report.machine_names import distinctions
from castwise.report.machine_notes import Figure, MachineNote, machine_notes
from castwise.show.fields import interval_values, trial_values
from castwise.show.units import format_bytes, pluralize
from castwise.spec.grouping import grouped
from castwise.spec.quantities import truncate_list
from castwise.spec.types import SYNTHETIC

FileOf = Callable[[Trial], str]  # names the file that a trial was read from

# What differs between the configurations of a group; precision and loss scale come first.
AXES = ("precision", "loss_scale", "batch_size", "world_size", "num_nodes", "parallelism", "techniques", "bits", "seed")
# What others are compared with, the first that was measured, as in the answers.
REFERENCES = (AS_WRITTEN, DEFAULT, BASELINE)


def row_values(row: Row) -> dict[str, Any]:
    values: dict[str, Any] = trial_values(row.trial)
    for name, figure in (("throughput_per_second", row.throughput_estimate), ("speedup", row.speedup_estimate)):
        values[name] = figure.value if figure else None
        values |= interval_values(name, figure if has_interval(figure) else None)
    return values | {
        "processes": len(row.trials),
        "verdict": row.verdict.kind if row.verdict else None,
        "verdict_reason": row.verdict.reason if row.verdict else None,
        "scaling_efficiency": row.scaling_efficiency,
        **{name: getattr(row, name) for name in ("peak_allocated_bytes", "peak_reserved_bytes", "driver_used_bytes")},
        "joules_per_unit": energy[0].value if (energy := energy_of(row.trials)) else None,
    }


@dataclass(frozen=True)
class ComparisonGroup:
    """Configurations that differ in nothing but `AXES`: the same workload, data, recipe, machine and protocol."""

    title: str  # no two groups of a collection share one
    configurations: tuple[Row, ...]  # by batch size, GPUs and so on, and then by precision

    @property
    def first(self) -> Trial:
        return self.configurations[0].trial

    @property
    def is_training(self) -> bool:
        return self.first.spec.kind == "training"

    @property
    def is_max_batch(self) -> bool:
        return is_max_batch_trial(self.first)

    @property
    def unit(self) -> str:
        return steady_metrics.unit_of(self.first)

    @cached_property
    def diagnoses(self) -> list[Diagnosis]:
        return [] if self.is_training else diagnose(self.configurations)

    @property
    def profiled(self) -> dict[Row, Diagnosis]:
        """Return the diagnoses that rest on a profile, by their configuration."""
        return {each.row: each for each in self.diagnoses if each.profile is not None and each.seconds}

    @property
    def max_batches(self) -> list[MaxBatch]:
        return max_batches_of(trial for config in self.configurations for trial in config.trials)

    @cached_property
    def _varying(self) -> tuple[str, ...]:
        varying = [name for name in AXES[2:] if len({_axis_text(c.trial, name) for c in self.configurations}) > 1]
        scales = {(config.precision, config.trial.spec.loss_scale) for config in self.configurations}
        # A loss scale that a precision has in all its configurations does not tell them apart.
        num_precisions = len({precision for precision, _ in scales})
        return (*varying, "loss_scale") if len(scales) > num_precisions else tuple(varying)

    @cached_property
    def over_seeds(self) -> "ComparisonGroup":
        """Return the group with one configuration for training runs that differ in their seed alone."""
        if not self.is_training:
            return self
        runs = grouped(self.configurations, lambda each: (self.label(each, "seed"), each.trial.spec.loss_scale))
        if len(runs) == len(self.configurations):
            return self
        return replace(self, configurations=tuple(map(over_seeds, runs.values())))

    def setting(self, config: Row, *without: str) -> str:
        """Return how a configuration differs from the others, without precision and some axes: "batch 128, 4 GPUs"."""
        texts = [_axis_text(config.trial, name) for name in self._varying if name not in without]
        return ", ".join(text for text in texts if text)

    def label(self, config: Row, *without: str) -> str:
        """Return precision and setting, without some axes."""
        setting = self.setting(config, *without)
        return f"{config.precision}, {setting}" if setting else config.precision

    def reference_of(self, config: Row) -> Row | None:
        """Return the script as written, or PyTorch's default or else fp32, of one batch size and GPUs.

        It is that of the plain loop, or if that was not measured, of the configuration's own loop.
        """
        spec = config.trial.spec
        same = [
            each
            for each in self.configurations
            if each.precision in REFERENCES
            and each.throughput is not None
            and each.trial.status == "ok"
            and each.trial.spec.techniques in ((), spec.techniques)
            and (each.trial.spec.batch_size, each.trial.spec.world_size) == (spec.batch_size, spec.world_size)
        ]

        def rank(each: Row) -> tuple[bool, int, bool, bool]:
            own, place = each.trial.spec, REFERENCES.index(each.precision)
            return bool(own.techniques), place, own.parallelism == "dp", own.seed != spec.seed

        return min(same, key=rank, default=None)

    def times_reference(self, config: Row) -> float | None:
        """Return how many times as fast as its reference a configuration is; None without one."""
        reference = self.reference_of(config)
        ratio = None if reference is None else config.over(reference)
        return None if ratio is None else ratio.value

    @property
    def description(self) -> str:
        spec, environment = self.first.spec, self.first.environment
        batches = sorted({config.trial.spec.batch_size for config in self.configurations})
        batch = f"batch {batches[0]}" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]}"
        data = "synthetic data" if spec.data_set == SYNTHETIC else f"data {spec.data_set}"
        data = data if spec.user_model is None else "its own data"
        driver = f", driver {environment.driver}" if environment.driver else ""
        software = f"torch {environment.torch}{driver}, castwise {environment.castwise}"
        return f"{batch}, {data}, {environment.device_name}, {software}"


@dataclass(frozen=True)
class Collection:
    trials: tuple[Trial, ...]  # those that count, oldest first
    groups: tuple[ComparisonGroup, ...]  # steady state first, each kind in the order of its first trial
    notes: tuple[str, ...] = ()  # what was left out, a line each

    @property
    def configurations(self) -> list[Row]:
        return [config for group in self.groups for config in group.configurations]

    @cached_property
    def _figures(self) -> dict[str, list[Figure]]:
        """Return the throughput of each configuration on each machine, by the configuration, the oldest first."""
        found: dict[str, list[Figure]] = {}
        for config in self.configurations:
            if config.throughput_estimate is not None:
                found.setdefault(config.trial.spec.configuration, []).append((config.trial, config.throughput_estimate))
        return {key: sorted(each, key=lambda figure: figure[0].started_at) for key, each in found.items()}

    def machine_notes_of(self, configurations: Iterable[Row]) -> list[MachineNote]:
        """Return what must be said of configurations that several machines with the same GPU model measured."""
        keys = dict.fromkeys(config.trial.spec.configuration for config in configurations)
        return machine_notes(self._figures.get(key, ()) for key in keys)

    @property
    def machines(self) -> dict[str, Environment]:
        """Return each machine's environment by its fingerprint."""
        found: dict[str, Environment] = {}
        for trial in self.trials:
            found.setdefault(trial.environment.fingerprint, trial.environment)
        return found

    @property
    def summary(self) -> str:
        names = list(dict.fromkeys(trial.environment.device_name for trial in self.trials))
        dates = sorted(trial.started_at[:10] for trial in self.trials)
        when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        what, number = pluralize(len(self.trials), "trial"), len(self.configurations)
        if number != len(self.trials):
            what += f" of {pluralize(number, 'configuration')}"
        return f"{what} on {truncate_list(names, most=3)}, {when}"


def collect(trials: Iterable[Trial], margin: float = MARGIN) -> Collection:
    """Group trials; of several trials of one spec on one machine, the newest counts.

    A speed-up within the margin around 1 is "the same".
    """
    newest: dict[tuple[str, str], Trial] = {}
    num_copies = num_repeated = 0
    for trial in sorted(trials, key=lambda each: each.started_at):
        key = (trial.environment.fingerprint, trial.spec.key)
        before = newest.pop(key, None)
        if before is not None:
            num_copies += before == trial
            num_repeated += before != trial
        newest[key] = trial
    notes = []
    if num_copies:
        are = "is a copy" if num_copies == 1 else "are copies"
        notes.append(f"{pluralize(num_copies, 'record')} {are} of another, and counted once")
    if num_repeated:
        were = "was" if num_repeated == 1 else "were"
        notes.append(f"{pluralize(num_repeated, 'record')} {were} measured again later: the newest counts")
    kept = tuple(newest.values())
    return Collection(kept, _groups(kept, margin), tuple(notes))


def throughput_of(trial: Trial) -> float | None:
    """Return units per second of a trial of either kind; None if nothing was timed."""
    return training_metrics.throughput(trial) if trial.spec.kind == "training" else steady_metrics.throughput(trial)


def machine_traits(machine: Environment) -> dict[str, str]:
    """Return what describes a machine and its software, by name; "–" for what is not known."""
    traits = {
        "device": machine.device_name,
        "memory": format_bytes(machine.gpu_memory_bytes),
        "GPUs": str(machine.num_gpus),
        "host": machine.hosts,
        "CPU": machine.cpu,
        "GPU": machine.gpu_uuid,
        "power limit": "" if machine.power_limit_watts is None else f"{machine.power_limit_watts:.0f} W",
        "packed": "trials on other GPUs of the host at the same time" if machine.packed else "",
        "threads": str(machine.num_threads),
        "system": machine.system,
        "driver": machine.driver,
        "CUDA": machine.cuda,
        "cuDNN": machine.cudnn,
        "torch": machine.torch,
        "torchvision": machine.torchvision,
        "Python": machine.python,
        "castwise": machine.castwise + (f" at {machine.commit}" if machine.commit else ""),
        "fingerprint": machine.fingerprint,
    }
    return {name: value or "–" for name, value in traits.items()}


def _groups(trials: Sequence[Trial], margin: float) -> tuple[ComparisonGroup, ...]:
    rows = rows_of_steps([trial for trial in trials if trial.spec.kind == "steady"], margin)
    rows += rows_of_runs([trial for trial in trials if trial.spec.kind == "training"])
    by_key = grouped(rows, lambda row: (row.trial.spec.kind, *training_metrics.run_comparison_key(row.trial, *AXES)))
    has_devices = len({trial.environment.device_name for trial in trials}) > 1
    titles = {key: _title(own[0].trial, has_devices) for key, own in by_key.items()}
    machines: dict[str, list[Environment]] = {}
    for key, own in by_key.items():
        machines.setdefault(titles[key], []).append(own[0].trial.environment)
    groups: dict[str, ComparisonGroup] = {}
    for key, own in by_key.items():
        words = distinctions(machines[titles[key]])[own[0].trial.environment.fingerprint]
        # Groups with the same title so far differ in protocol or recipe.
        title = free_name(f"{titles[key]}, {words}" if words else titles[key], groups)
        groups[title] = ComparisonGroup(title, tuple(sorted(own, key=_sort_key)))
    return tuple(groups.values())


def _title(trial: Trial, has_devices: bool) -> str:
    spec = trial.spec
    title = spec.workload if spec.data_set == SYNTHETIC else f"{spec.workload} on {spec.data_set}"
    if is_search(spec):
        title += ": search for the largest batch"
    elif spec.recipe is not None:
        steps = spec.recipe.max_steps
        title += ": training" if steps is None else f": training, {steps} steps an epoch"
    if is_max_batch_trial(trial):
        limit = spec.memory_limit_bytes
        title += ": largest batch" + (f" within {limit / 2**30:.3g} GiB" if limit is not None else "")
    return f"{title} ({short_device_name(trial.environment.device_name)})" if has_devices else title


def _sort_key(config: Row) -> tuple[object, ...]:
    spec = config.trial.spec
    gpus = (spec.world_size, spec.num_nodes, spec.parallelism)
    loop = (len(spec.techniques), spec.techniques, spec.seed)
    return (spec.batch_size, *gpus, *loop, precision_sort_key(spec.precision), spec.loss_scale)


def _axis_text(trial: Trial, name: str) -> str:
    """Return the value of an axis in words; empty for no parallelism and for a precision's own loss scale."""
    spec = trial.spec
    match name:
        case "batch_size":
            return f"batch {spec.batch_size}"
        case "world_size":
            return "1 GPU" if spec.world_size == 1 else f"{spec.world_size} GPUs"
        case "parallelism":
            return "" if spec.parallelism == "none" else spec.parallelism
        case "techniques" | "bits":
            return " + ".join(each for each in spec.techniques if bool(narrowing([each])) == (name == "bits"))
        case "seed" | "num_nodes":
            return f"seed {spec.seed}" if name == "seed" else f"{spec.num_nodes} nodes" * (spec.num_nodes > 1)
    return spec.changed_loss_scale and f"loss scale {spec.changed_loss_scale}"
