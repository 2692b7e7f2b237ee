"""What came of a suite: its runs, the published figures next to them, and what a reader must know of both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from castwise.analysis.causes import diagnose
from castwise.analysis.result_table import Row, rows_of_runs, rows_of_steps
from castwise.analysis.steady_metrics import peak_reserved_bytes
from castwise.analysis.training_metrics import epochs_of, is_whole
from castwise.analysis.warnings import NOISE
from castwise.max_batch.result import has_trained
from castwise.records.schema import Trial
from castwise.registry.datasets import imitated_data_set
from castwise.registry.suites import Suite
from castwise.registry.techniques import rows_of
from castwise.registry.workloads import find_workload
from castwise.show.fields import FlatRow
from castwise.spec.quantities import truncate_list
from castwise.suites.compare_published import compare_with_published, published_pairs
from castwise.suites.tuned_vs_published import TunedPair, tuned_pairs

# Source: torch.utils.data.DataLoader (prefetch_factor).
_PREFETCHED_PER_WORKER = 2


@dataclass(frozen=True)
class SuiteResult:
    suite: Suite
    trials: tuple[Trial, ...]  # in the suite's order
    searches: tuple[tuple[Trial, ...], ...] = ()  # the trials of each search for the largest batch

    @property
    def all_trials(self) -> tuple[Trial, ...]:
        return self.trials + tuple(trial for search in self.searches for trial in search)

    @cached_property
    def runs(self) -> list[Row]:
        """Return the runs' figures; runs on more GPUs than this machine has are left out."""
        return [run for run in rows_of_runs(self.trials) if not lacks_gpus(run.trial)]

    @cached_property
    def tuned(self) -> list[TunedPair]:
        """Return the configurations that were run both in the source's loop and in another."""
        return tuned_pairs(self.runs)

    @cached_property
    def published(self) -> list[FlatRow]:
        """Return the published figures, each with what was measured of the same configuration."""
        return compare_with_published(self.suite, self.trials)

    @cached_property
    def pairs(self) -> dict[str, float]:
        """Return speed-ups over float32 at the published batch, by key."""
        return published_pairs(self.suite, self.trials)

    @cached_property
    def limits(self) -> list[FlatRow]:
        """Return the largest batch that trained and the smallest that did not, published and measured."""
        return [_limit(self.suite, search) for search in self.searches if search]


def lacks_gpus(trial: Trial) -> bool:
    """Return whether a trial was not run because the machine has fewer GPUs than it asks for."""
    return trial.status == "unsupported" and trial.spec.world_size > max(1, trial.environment.num_gpus)


def _limit(suite: Suite, search: Sequence[Trial]) -> FlatRow:
    spec = search[0].spec
    largest = max((t for t in search if has_trained(t)), key=lambda t: t.spec.batch_size, default=None)
    failing = min((t.spec.batch_size for t in search if t.status == "oom"), default=None)
    figures = [
        f for f in suite.published if (f.workload, f.precision, f.world_size) == (spec.workload, spec.precision, 1)
    ]
    gpu = figures[0].gpu if figures else None
    figures = [figure for figure in figures if figure.gpu == gpu]
    return {
        **{name: getattr(spec, name) for name in ("workload", "precision", "loss_scale")},
        "gpu": gpu,
        "published": (
            max((f.batch_size for f in figures if f.outcome == "ok"), default=None),
            min((f.batch_size for f in figures if f.outcome == "oom"), default=None),
        ),
        "measured": (None if largest is None else largest.spec.batch_size, failing),
        "reserved_bytes": None if largest is None else peak_reserved_bytes(largest),
    }


def notes(result: SuiteResult) -> Iterator[str]:
    """Yield what a reader of the tables must know, a line each."""
    rows = [run.trial for run in result.runs]
    yield from _about_lengths(result.runs)
    yield from _substitutes(rows, result.all_trials)
    yield from dict.fromkeys(_differences(result.published))
    for trial in result.trials:
        if trial.status != "ok" and not lacks_gpus(trial):
            yield f"{trial.spec.label}: {trial.status}: {trial.message}"
    lacking = [trial for trial in result.trials if lacks_gpus(trial)]
    if lacking:
        sizes = " or ".join(str(size) for size in sorted({trial.spec.world_size for trial in lacking}))
        need = "1 run needs" if len(lacking) == 1 else f"{len(lacking)} runs need"
        yield f"{need} {sizes} GPUs, and this machine has {lacking[0].environment.num_gpus}: not run"
    for search in result.searches:
        if search and search[-1].status not in ("ok", "oom"):
            last = search[-1]
            yield f"the search for the largest batch ended early: {last.spec.label}: {last.status}: {last.message}"
    if not result.suite.published:
        yield "the source gives no figures in numbers to compare these with"


def _about_lengths(runs: Sequence[Row]) -> Iterator[str]:
    """Say which runs are cut short, and what their speed-ups and throughputs leave out or count."""
    succeeded = [run.trial for run in runs if run.trial.status == "ok"]
    num_cut = sum(not is_whole(trial) for trial in succeeded)
    if num_cut:
        yield (
            f"cut short (column length): {num_cut} of {len(succeeded)} successful runs; their speed-ups are ratios of "
            "throughput, not of whole runs' times"
        )
    ratios = [
        f"{run.unpaired_speedup:.2f}× for {run.trial.spec.label} (speed-up {run.speedup:.2f}×)"
        for run in runs
        if run.speedup and run.unpaired_speedup and abs(run.unpaired_speedup / run.speedup - 1) > NOISE
    ]
    if ratios:
        yield (
            "speed-up is that of a whole run's time, validation included; the ratio of throughputs is "
            f"{truncate_list(ratios)}"
        )
    trained = [run.trial for run in runs if epochs_of(run.trial)]
    num_prefetched = sum(map(_counts_prefetched_batches, trained))
    if num_prefetched:
        yield (
            f"in {num_prefetched} of {len(trained)} runs, throughput counts batches that the loader made while the "
            "first steps ran: if the loader limits the speed, a whole run is slower than this"
        )


def _differences(published: Sequence[FlatRow]) -> Iterator[str]:
    """Say why a measured speed-up is what it is, next to the published one, where records show a cause."""
    for row in published:
        causes = [cause for found in diagnose(rows_of_steps(row["trials"])) for cause in found.causes]
        if causes and row["speedup"] and row["published_speedup"]:
            name = f"{row['workload']} {row['precision']} batch {row['batch_size']}"
            ratios = f"{row['speedup']:.2f}× here, {row['published_speedup']:.2f}× on {row['gpu']}"
            yield f"{name}: {ratios}: {causes[0].evidence}"


def _counts_prefetched_batches(trial: Trial) -> bool:
    """Return whether batches that the loader had made beforehand raise the throughput of a run cut short."""
    recipe = trial.spec.recipe
    if recipe is None or recipe.loader.resident or not any(epoch.shortened for epoch in epochs_of(trial)):
        return False
    has_loader = not any("resident_data" in row.settings for row in rows_of(trial.spec.techniques))
    return has_loader and recipe.skip_batches < _PREFETCHED_PER_WORKER * recipe.loader.num_workers


def _substitutes(rows: Sequence[Trial], trials: Sequence[Trial]) -> Iterator[str]:
    """Say what was used in place of the source's data and weights, in the table's rows and in all trials behind it."""
    for name in dict.fromkeys(imitated_data_set(trial.spec.data_set) for trial in trials):
        if name is not None:
            yield f"random samples in place of {name}'s: time and memory comparable, accuracy not"
    pretrained = [trial for trial in rows if find_workload(trial.spec.workload).pretrained]
    num_random = sum(trial.spec.weights is None for trial in pretrained)
    if num_random:
        yield (
            f"random weights in place of the source's pretrained ones in {num_random} of {len(rows)} runs: time "
            "comparable, accuracy not"
        )
    data_notes = (trial.facts.data_note for trial in trials if trial.facts is not None)
    yield from dict.fromkeys(note for note in data_notes if note)
