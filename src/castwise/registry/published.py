"""What the sources of the suites published, by GPU: machines to compare a new one with."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from castwise.errors import UsageError, unknown_name
from castwise.registry.precisions import BASELINE
from castwise.registry.suites import SUITE_NAMES, Published, Suite, find_suite, limit_specs, specs_of
from castwise.spec.trial import TrialSpec

PREFIX = "published:"


@dataclass(frozen=True)
class PublishedFigure:
    """One published figure."""

    suite: Suite
    published: Published
    spec: TrialSpec | None  # the run that the suite plans for it, if any
    baseline: Published | None  # the source's float32 run to compare it with, if any; None for float32 itself


@dataclass(frozen=True)
class PublishedMachine:
    """A GPU of some sources."""

    gpu: str  # its name in the sources
    figures: tuple[PublishedFigure, ...]  # in the order of the suites
    notes: tuple[str, ...] = ()  # what the sources say of it without a figure, a line each

    @property
    def suites(self) -> list[Suite]:
        return list({figure.suite.name: figure.suite for figure in self.figures}.values())


def find_published(name: str) -> PublishedMachine:
    """Return the GPU that a name stands for: "T4", "2080Ti" and "GTX 1080 Ti" are enough.

    Raises:
        UsageError: No source has figures of it; the message says if one names it and has plots only.
    """
    suites = list(map(find_suite, SUITE_NAMES))
    gpus = list(dict.fromkeys(figure.gpu for suite in suites for figure in suite.published))
    wanted = _letters(name)
    found = [gpu for gpu in gpus if wanted and _letters(gpu).endswith(wanted)]
    plots_only: list[Suite] = []
    if any(letter.isdigit() for letter in wanted):  # "GTX" alone names no GPU
        plots_only = [suite for suite in suites if not suite.published and wanted in _letters(suite.machine)]
    if len(found) == 1:
        figures = [_published(suite, one) for suite in suites for one in suite.published if one.gpu == found[0]]
        notes = [
            f"{suite.name}: the source names it and gives no figure in numbers ({suite.source})" for suite in plots_only
        ]
        return PublishedMachine(found[0], tuple(figures), tuple(notes))
    if not found and plots_only:
        names = " and ".join(suite.name for suite in plots_only)
        raise UsageError(f"Of '{name}' no figure is published in numbers: the source of {names} has plots only.")
    raise unknown_name("published GPU", name, gpus, f"Known: {', '.join(gpus)}.")


def _published(suite: Suite, figure: Published) -> PublishedFigure:
    spec = next((spec for spec in _planned(suite.name) if is_figure_of(figure, spec)), None)
    return PublishedFigure(suite, figure, spec, baseline_of(suite, figure))


def baseline_of(suite: Suite, figure: Published) -> Published | None:
    """Return the source's float32 run for a figure: at its batch, else at the largest below that ended well."""
    if figure.precision == BASELINE:
        return None
    candidates = [
        other
        for other in suite.published
        if (other.gpu, other.workload, other.world_size) == (figure.gpu, figure.workload, figure.world_size)
        and other.precision == BASELINE
        and other.outcome == "ok"
        and other.batch_size <= figure.batch_size
    ]
    return max(candidates, key=lambda other: other.batch_size, default=None)


def published_speedups(device: str, spec: TrialSpec) -> list[float]:
    """Return the speed-ups over float32 at the same batch that sources with this GPU give for a spec."""
    found = []
    for suite in map(find_suite, SUITE_NAMES):
        for figure in suite.published:
            baseline = baseline_of(suite, figure)
            if _letters(figure.gpu) not in _letters(device) or baseline is None or not is_figure_of(figure, spec):
                continue
            if baseline.batch_size == figure.batch_size and figure.seconds and baseline.seconds:
                found.append(baseline.seconds / figure.seconds)
    return found


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch of a precision in a source, and float32's on the same GPU."""

    suite: str
    gpu: str
    batch_size: int
    failing: int | None  # the smallest that did not train, None if the source names none
    baseline: int  # float32's largest

    @property
    def ratio(self) -> float:
        return self.batch_size / self.baseline


def largest_batches(workload: str, precision: str) -> list[LargestBatch]:
    """Return what sources that filled their GPU's memory published of a workload in a precision."""
    found: list[LargestBatch] = []
    for suite in (each for name in SUITE_NAMES if (each := find_suite(name)).fills_memory):
        own = [f for f in suite.published if f.workload == workload and f.world_size == 1]
        for gpu in dict.fromkeys(figure.gpu for figure in own):
            largest = _largest([f for f in own if f.gpu == gpu and f.precision == precision])
            baseline = _largest([f for f in own if f.gpu == gpu and f.precision == BASELINE])
            if largest is not None and baseline is not None:
                failed = (f for f in own if (f.gpu, f.precision, f.outcome) == (gpu, precision, "oom"))
                failing = min((f.batch_size for f in failed), default=None)
                found.append(LargestBatch(suite.name, gpu, largest, failing, baseline))
    return found


def _largest(figures: Sequence[Published]) -> int | None:
    return max((figure.batch_size for figure in figures if figure.outcome == "ok"), default=None)


def is_figure_of(figure: Published, spec: TrialSpec) -> bool:
    return (
        not spec.techniques  # the source's is the plain loop
        and figure.workload == spec.workload
        and figure.precision == spec.precision
        and figure.batch_size == spec.batch_size
        and figure.world_size == spec.world_size
        and figure.loss_scale in (None, spec.loss_scale)
    )


@cache
def _planned(name: str) -> Sequence[TrialSpec]:
    suite = find_suite(name)
    return [*specs_of(suite, device="cuda:0"), *(spec for spec, _ in limit_specs(suite, device="cuda:0"))]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
