"""The Python API: the commands as functions, with the commands' options as keywords."""

import inspect
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar, Unpack, overload

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from castwise.accuracy.advice import accuracy_of, answer_of
from castwise.accuracy.options import AccuracyOptions
from castwise.analysis.causes import Diagnosis, LeftOut, diagnose, left_out_of
from castwise.analysis.decide import Advice
from castwise.analysis.result_table import MARGIN, Row, rows_of_steps
from castwise.errors import UsageError
from castwise.fits.options import FitsOptions
from castwise.max_batch.options import MaxBatchOptions
from castwise.orchestrator.job import prepare, prepare_profiles
from castwise.orchestrator.pickling import pickle_user_objects
from castwise.orchestrator.runner import Listener, NullListener
from castwise.records.schema import Trial
from castwise.report.files import ReportOptions, find, write_card, write_pictures, write_report
from castwise.show import run_report, why_report
from castwise.show.presentation import Presentation, html, print_parts
from castwise.show.progress import LiveProgress
from castwise.show.table import DataTable, json_document, plain
from castwise.spec.options import RunOptions, SharedOptions, WhyOptions, options_of, parse_options
from castwise.spec.trial import TrialSpec
from castwise.tune.options import TuneOptions

if TYPE_CHECKING:
    from castwise.accuracy.result import AccuracyResult, Runs
    from castwise.fits.predict import Prediction
    from castwise.max_batch.result import MaxBatch, MaxBatchResult
    from castwise.orchestrator.job import Job
    from castwise.report.collection import Collection, FileOf
    from castwise.tune.result import TuningResult

_WIDTH = 120  # of str(result), which has no terminal to ask

_Options = TypeVar("_Options")
_Asking = TypeVar("_Asking", bound=SharedOptions | FitsOptions)
_Function = TypeVar("_Function", bound=Callable[..., object])
_PathLike = str | PathLike[str]


class SharedKeywords(TypedDict, total=False):
    """The options of all commands that measure."""

    timeout_seconds: str | float | None
    device: str | None
    data: _PathLike | None
    results: _PathLike | None
    again: bool
    retry: bool


class StepKeywords(SharedKeywords, total=False):
    """The options of all commands that time training steps."""

    data_set: str | None
    seed: int


class GridKeywords(StepKeywords, total=False):
    """What is crossed with what."""

    precision: str | Sequence[str] | None
    batch_size: str | int | Sequence[int] | None
    seq_len: str | int | Sequence[int] | None
    techniques: str | Sequence[str] | None
    optimizer_state: str | Sequence[str] | None
    gpus: str | int | Sequence[int] | None
    parallelism: str | Sequence[str] | None
    loss_scale: str | float | Sequence[str | float] | None


class ScriptKeywords(TypedDict, total=False):
    """How a script is measured."""

    steps: int | None
    warm_up: int | None
    units_per_step: int | None
    step_unit: str | None
    scratch: _PathLike | None


class RunKeywords(GridKeywords, ScriptKeywords, total=False):
    """The options of `castwise run`."""

    budget: str | float | None
    within: str | float | None
    rounds: int | None
    seconds: float | None
    margin: str | float | None
    nodes_per_trial: int | None


class ReportKeywords(TypedDict, total=False):
    """The options of `castwise report`."""

    output: _PathLike | None
    title: str
    card: _PathLike | None
    charts: _PathLike | None
    workload: str | Sequence[str] | None
    precision: str | Sequence[str] | None
    example: bool


class ModelKeywords(TypedDict, total=False):
    """What else a model is trained with, if it is given as objects."""

    training_step: Any
    optimizer: Any
    scheduler: Any
    accumulate: int
    clip_grad_norm: float | None
    unit: str | None
    units_per_sample: int | None
    progress: bool


# For the docstrings of the functions that take a model.
_MODEL_HELP = {
    "training_step": "Takes model and batch and returns the loss, in the place of `loss`.",
    "optimizer": "An optimizer of the model's parameters, or a function that returns one from them; None takes AdamW.",
    "scheduler": "A scheduler of that optimizer, or a function that returns one from it; stepped after each step.",
    "accumulate": "Batches, each of batch_size / accumulate samples, for one optimizer step.",
    "clip_grad_norm": "The norm that gradients are clipped to, after the loss scale is taken out of them.",
    "unit": "What throughput counts: images, tokens or samples. None takes samples.",
    "units_per_sample": "How many of them are in a sample.",
    "progress": "Whether progress is printed on stderr.",
}
_MODEL_DEFAULTS = {"accumulate": 1, "progress": True}
# And of those functions that take it as `compare` does.
_AS_COMPARE = """
    Args:
        model: The model, or a workload's name, as `castwise.compare` takes it.
        batch: As `castwise.compare` takes it.
        loss: As `castwise.compare` takes it.
        **options: The options.
    """


class CompareKeywords(ModelKeywords, RunKeywords, total=False):
    """The keywords of `castwise.compare`."""


class TuneModelKeywords(ModelKeywords, StepKeywords, ScriptKeywords, total=False):
    """The keywords of `castwise.tune`."""

    precision: str | Sequence[str] | None
    allow: str
    batch_size: int | None
    gpus: int | None
    parallelism: str | None
    memory: str | float | None
    budget: str | float | None
    training: bool
    larger_batches: bool


class WhyModelKeywords(ModelKeywords, GridKeywords, ScriptKeywords, total=False):
    """The keywords of `castwise.why`."""

    trace: _PathLike | None
    numerics: bool
    budget: str | float | None


class MaxBatchModelKeywords(ModelKeywords, StepKeywords, total=False):
    """The keywords of `castwise.max_batch`."""

    precision: str | Sequence[str] | None
    techniques: str | Sequence[str] | None
    optimizer_state: str | Sequence[str] | None
    gpus: str | int | Sequence[int] | None
    parallelism: str | Sequence[str] | None
    exact: bool
    margin: str | float | None
    memory: str | float | None
    steps: int | None
    budget: str | float | None
    curve: bool


class FitsModelKeywords(ModelKeywords, total=False):
    """The keywords of `castwise.fits`."""

    gpu: str | Sequence[str] | None
    batch_size: int | None
    precision: str | Sequence[str] | None
    techniques: str | Sequence[str] | None
    optimizer_state: str | Sequence[str] | None
    timeout_seconds: str | float | None


class AccuracyKeywords(SharedKeywords, total=False):
    """The options of `castwise.accuracy`."""

    precision: str | Sequence[str] | None
    margin: str | float | None
    seeds: int | None
    budget: str | float | None
    epochs: int | None
    max_steps: int | None
    techniques: str | None
    optimizer_state: str | Sequence[str] | None
    loss_scale: str | float | None
    data_set: str | None


class Result:
    """What a command found: as a text, in a notebook, as a dict, and as a data frame."""

    trials: tuple[Trial, ...]
    margin: float = MARGIN
    _pictures: ClassVar[tuple[str, ...]] = ()  # how the names of the report's charts end that a notebook shows

    @property
    def _shown(self) -> Presentation:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the document that the command prints with `--format json`."""
        assert self._shown.document is not None
        return dict(self._shown.document())

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each configuration and the columns of `castwise export --level cells`.

        Raises:
            UsageError: pandas is not installed.
        """
        from castwise.report.export import to_pandas

        table = self._configurations()
        return to_pandas(DataTable([column for column in table.columns if column.name != "file"], table.rows))

    def _configurations(self) -> DataTable[Any]:
        from castwise.report.collection import collect
        from castwise.report.export import flat_table

        return flat_table("cells", collect(self.trials, self.margin), lambda _: "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the tables as rich's console has room for them."""
        yield Text.from_ansi(self._rendered(options.max_width, color=console.color_system is not None))

    def __str__(self) -> str:
        """Return what the command prints as plain text."""
        return self._rendered(_WIDTH, color=False)

    def _repr_html_(self) -> str:
        """Return what Jupyter shows: the tables, and beside them the report's chart of each comparison."""
        from castwise.report.charts.registry import pictures_of
        from castwise.report.collection import collect

        pictures = pictures_of(collect(self.trials, self.margin), lambda _: "") if self._pictures else ()
        fits = '<svg style="max-width:100%;height:auto"'
        charts = [svg.replace("<svg", fits, 1) for name, svg in pictures if name.endswith(self._pictures)]
        sides = (f'<div style="flex:1 1 30em;min-width:0">{each}</div>' for each in (html(self._shown.parts), *charts))
        return f'<div style="display:flex;flex-wrap:wrap;gap:1em">{"".join(sides)}</div>'

    def _rendered(self, width: int, *, color: bool) -> str:
        text = io.StringIO()
        # Without force_jupyter rich would also display the table in a notebook, whatever the console's file is.
        console = Console(file=text, width=width, force_terminal=color, emoji=False, force_jupyter=False)
        print_parts(self._shown.parts, console)
        return text.getvalue().rstrip("\n")


@dataclass(frozen=True, repr=False)
class Comparison(Result, Sequence[Trial]):
    """What `castwise.run` and `castwise.compare` found; also the sequence of its trials.

    Attributes:
        trials: The records, one for each configuration; in rounds one for each configuration and round.
        rows: Each configuration's figures, compared with those of PyTorch's default and of fp32.
        advice: Which precision to take, in words and as code; what it says of accuracy rests on all records.
        margin: The largest difference of a speed-up from 1 that counts as "the same", if it has an interval.
    """

    trials: tuple[Trial, ...]
    rows: tuple[Row, ...]
    advice: tuple[Advice, ...]
    margin: float = MARGIN
    _pictures = ("-throughput.svg",)

    @property
    def best(self) -> str | None:
        """Return the precision to take; None if that is undecided, or nothing could be measured."""
        return self.advice[0].precision if self.advice else None

    @property
    def _shown(self) -> Presentation:
        return run_report.present(self.rows, self.advice)

    def __repr__(self) -> str:
        """Return it in a line; `print` shows the table."""
        workloads = ", ".join(dict.fromkeys(row.trial.spec.workload for row in self.rows))
        return f"Comparison({workloads}: {len(self.rows)} rows of {len(self.trials)} trials, best: {self.best})"

    @overload
    def __getitem__(self, index: int) -> Trial: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Trial, ...]: ...
    def __getitem__(self, index: int | slice) -> Trial | tuple[Trial, ...]:
        """Return a trial."""
        return self.trials[index]

    def __len__(self) -> int:
        """Return the number of trials."""
        return len(self.trials)


@dataclass(frozen=True, repr=False)
class Diagnoses(Result):
    """What `castwise.why` found.

    Attributes:
        trials: The records; those with a profile have `profile`.
        left_out: The configurations that were asked for and were not timed, each with its `status` and `reason`.
        found: A diagnosis of each of the others: `causes` with their evidence, `shares` of the step's time.
    """

    trials: tuple[Trial, ...]
    left_out: tuple[LeftOut, ...] = ()
    _pictures = ("-profile.svg",)

    @cached_property
    def found(self) -> tuple[Diagnosis, ...]:
        """Return a diagnosis of each configuration that was timed."""
        return tuple(diagnose(rows_of_steps(self.trials)))

    @property
    def _shown(self) -> Presentation:
        return why_report.present(self.found, self.left_out)

    def __repr__(self) -> str:
        """Return it in a line; `print` shows the causes."""
        first = {
            diagnosis.row.precision: diagnosis.causes[0].name if diagnosis.causes else "none"
            for diagnosis in self.found
        }
        return f"Diagnoses({first})"


class _Found(Result):
    """What a search found, whose trials are the records."""

    found: "TuningResult | MaxBatchResult | AccuracyResult"

    @property
    def trials(self) -> tuple[Trial, ...]:  # type: ignore[override]
        """Return the records."""
        return self.found.trials


@dataclass(frozen=True, repr=False)
class Tuning(_Found):
    """What `castwise.tune` found."""

    found: "TuningResult"
    _pictures = ("-ladder.svg", "-throughput.svg")

    @property
    def fastest(self) -> TrialSpec | None:
        """Return the fastest loop, within a memory limit if there is one; None if there is none."""
        return self.found.chosen if self.found.was_compared else None

    @property
    def memory_bytes(self) -> float | None:
        """Return the memory limit that was asked for."""
        return self.found.memory_bytes

    @property
    def sentences(self) -> list[str]:
        """Return the answer in words."""
        from castwise.tune.render import conclusions

        return conclusions(self.found)

    @property
    def _shown(self) -> Presentation:
        from castwise.tune.render import present

        return present(self.found)

    def __repr__(self) -> str:
        """Return it in a line; `print` shows the table."""
        fastest = None if self.fastest is None else self.fastest.label
        return f"Tuning({self.found.start.label}: {len(self.found.tried)} changes tried, fastest: {fastest})"


@dataclass(frozen=True, repr=False)
class MaxBatches(_Found):
    """What `castwise.max_batch` found."""

    found: "MaxBatchResult"
    _pictures = ("-batch.svg", "-largest.svg")

    @property
    def max_batches(self) -> tuple["MaxBatch", ...]:
        """Return each loop's trials, with what follows from them."""
        return self.found.max_batches

    @property
    def largest(self) -> dict[str, int | None]:
        """Return the largest batch that trained, by precision and techniques; None if none did."""
        return {
            found.spec.loop_name: None if found.largest is None else found.largest.spec.batch_size
            for found in self.max_batches
        }

    @property
    def _shown(self) -> Presentation:
        from castwise.max_batch.render import present

        return present(self.found)

    def __repr__(self) -> str:
        """Return it in a line; `print` shows the tables."""
        return f"MaxBatches({self.max_batches[0].spec.workload}: {self.largest})"


@dataclass(frozen=True, repr=False)
class Fits(Result):
    """What `castwise.fits` predicts."""

    found: "Prediction"
    trials: tuple[Trial, ...] = ()  # nothing is measured

    @property
    def largest(self) -> dict[str, dict[str, int | None]]:
        """Return the largest batch that fits, by GPU and by precision and techniques; None if it is not known."""
        by_gpu: dict[str, dict[str, int | None]] = {}
        for fit in self.found.fits:
            by_gpu.setdefault(fit.gpu_name, {})[fit.loop.spec.loop_name] = fit.largest()
        return by_gpu

    @property
    def _shown(self) -> Presentation:
        from castwise.fits.render import present

        return present(self.found)

    def _configurations(self) -> DataTable[Any]:
        assert self._shown.csv is not None
        return self._shown.csv()

    def __repr__(self) -> str:
        """Return it in a line; `print` shows the tables."""
        return f"Fits({self.found.loops[0].spec.workload} on {', '.join(self.largest)})"


@dataclass(frozen=True, repr=False)
class Accuracies(_Found):
    """What `castwise.accuracy` found."""

    found: "AccuracyResult"
    _pictures = ("-equivalence.svg",)

    @property
    def runs(self) -> "tuple[Runs, ...]":
        """Return each precision's runs with `scores`, `verdict`, `speedup` and `gain`; those of the baseline first."""
        return self.found.runs

    @property
    def sentences(self) -> list[str]:
        """Return the answer in words."""
        from castwise.accuracy.render import sentences

        return sentences(self.found)

    @property
    def _shown(self) -> Presentation:
        from castwise.accuracy.render import present

        return present(self.found)

    def __repr__(self) -> str:
        """Return it in a line; `print` shows the table."""
        kinds = {runs.name: runs.verdict.kind if runs.verdict else "no score" for runs in self.runs[1:]}
        return f"Accuracies({self.runs[0].spec.workload}: {kinds})"


@dataclass(frozen=True, repr=False)
class Report(Result):
    """What `castwise.report` read, and where it wrote it."""

    collection: "Collection"
    output: Path | None = None  # the file that was written
    problems: list[tuple[str, str]] = field(default_factory=list)  # files that are no records, each with its reason
    file_of: "FileOf" = lambda _: ""  # names a trial's file

    @property
    def trials(self) -> tuple[Trial, ...]:  # type: ignore[override]
        """Return the records."""
        return self.collection.trials

    def to_dict(self) -> dict[str, Any]:
        """Return the rows of `castwise export --level cells --format json`, and what is in the report besides."""
        table = self._configurations()
        return json_document(
            summary=self.collection.summary,
            notes=list(self.collection.notes),
            cells=[plain(table.columns, row) for row in table.rows],
        )

    def __repr__(self) -> str:
        """Return it in a line; `print` shows the tables."""
        where = "" if self.output is None else f", in '{self.output}'"
        return f"Report({self.collection.summary}{where})"

    def _configurations(self) -> DataTable[Any]:
        from castwise.report.export import flat_table

        return flat_table("cells", self.collection, self.file_of)

    @property
    def _shown(self) -> Presentation:
        from castwise.report.text_report import present

        return present(self.collection)


def _with_options(options: type, keywords: Any) -> Callable[[_Function], _Function]:
    """Return a decorator that lists options in a function's signature and docstring, in the place of `**options`."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        annotations = keywords.__annotations__
        defaults = {name: _MODEL_DEFAULTS.get(name) for name in _MODEL_HELP if name in annotations}
        lines = [f"        {name}: {_MODEL_HELP[name]}" for name in defaults]
        for option in options_of(options):
            if option.keyword in annotations:
                defaults[option.keyword] = option.field_default
                lines.append(f"        {option.keyword}: {option.help}")
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotations[name])
            for name, default in defaults.items()
            if name not in signature.parameters
        ]
        document = function.__doc__ or ""
        document = document if "Args:" in document else document.rstrip() + "\n" + _AS_COMPARE
        function.__doc__ = document.replace("        **options: The options.", "\n".join(lines))
        function.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return function

    return decorate


def _parse(options: type[_Options], given: Mapping[str, object], function: str) -> _Options:
    known = {option.keyword for option in options_of(options) if not option.hidden}
    for keyword in given:
        if keyword not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument '{keyword}'")
    return parse_options(options, given)


@_with_options(RunOptions, RunKeywords)
def run(workload: str | Sequence[str] | None = None, **options: Unpack[RunKeywords]) -> Comparison:
    """Measure a workload in every precision, as `castwise run` does.

    Lists are one value, a sequence, or a text with commas; durations are seconds or texts such as "5min", shares are
    numbers or texts such as "1%". Without `results` nothing is kept on disk, and everything is measured.

    Args:
        workload: One name or several; None takes a short job that suits the machine.
        **options: The options.

    Returns:
        The figures and the advice, with a trial for each combination, in the order workload, batch size, GPUs,
        parallelism, techniques, precision, loss scale; in rounds one for each combination and round.

    Raises:
        UsageError: The request cannot be carried out.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    job = prepare(_parse(RunOptions, {"workload": workload, **options}, "run"))
    return _comparison(job, job.run())


@_with_options(RunOptions, CompareKeywords)
def compare(model: Any, batch: Any = None, loss: Any = None, **options: Unpack[CompareKeywords]) -> Comparison:
    """Train a model in every precision, each in a process of its own, and return what that took, side by side.

    The objects may be defined in a script or in a notebook: their code travels with them. On a CPU a process times
    0.4 s of steps unless `seconds` says otherwise, and rounds end after 75 s unless `budget` or `rounds` is given.

    Args:
        model: The model; a function without arguments that returns it, or everything, as a file for `castwise run`
            does; or a workload's name, such as "train_me.py:build" or "resnet50".
        batch: An example batch, a function that returns a batch of as many samples as it is asked for, or a data
            loader, whose first batch is the example.
        loss: Takes output and target, the last part of the batch; None takes the output's own `loss`.
        **options: The options.

    Raises:
        UsageError: The request cannot be carried out, or an object cannot travel.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    with _asked(RunOptions, "compare", (model, batch, loss), options) as (request, listener):
        job = prepare(request, listener, short=True)
        trials = job.run()
    return _comparison(job, trials)


def _comparison(job: "Job", trials: Sequence[Trial]) -> Comparison:
    rows, advice = answer_of(job, trials)
    return Comparison(tuple(trials), tuple(rows), tuple(advice), MARGIN if job.rule is None else job.rule.margin)


@_with_options(TuneOptions, TuneModelKeywords)
def tune(model: Any, batch: Any = None, loss: Any = None, **options: Unpack[TuneModelKeywords]) -> Tuning:
    """Search from the plain loop for the fastest that computes the same, as `castwise tune` does.

    Model, batch, loss and errors are those of `castwise.compare`. It raises KeyboardInterrupt if it was interrupted;
    what was measured is in `results`.
    """
    from castwise.tune.search import prepare_tuning

    with _asked(TuneOptions, "tune", (model, batch, loss), options) as (request, listener):
        tuning = prepare_tuning(request, listener)
        found = tuning.run()
        if found.chosen is not None and found.was_compared:
            found = replace(found, accuracy=accuracy_of(tuning.job, found.measured.of(found.chosen)))
    if found.ending == "interrupted":
        raise KeyboardInterrupt
    return Tuning(found)


@_with_options(WhyOptions, WhyModelKeywords)
def why(model: Any, batch: Any = None, loss: Any = None, **options: Unpack[WhyModelKeywords]) -> Diagnoses:
    """Say why a precision is no faster, as `castwise why` does: where the time of a step goes, and what to try.

    Model, batch, loss and errors are those of `castwise.compare`.
    """
    with _asked(WhyOptions, "why", (model, batch, loss), options) as (request, listener):
        job = prepare_profiles(request, listener)
        trials = job.run()
    return Diagnoses(tuple(trials), tuple(left_out_of(job.specs, trials)))


@_with_options(MaxBatchOptions, MaxBatchModelKeywords)
def max_batch(model: Any, batch: Any = None, loss: Any = None, **options: Unpack[MaxBatchModelKeywords]) -> MaxBatches:
    """Find the largest batch that trains, in every precision, as `castwise max-batch` does.

    Model, batch, loss and errors are those of `castwise.compare`. It also raises UsageError if memory is too small for
    any batch.
    """
    from castwise.max_batch.render import raise_if_nothing_fits
    from castwise.max_batch.search import prepare_max_batch

    with _asked(MaxBatchOptions, "max_batch", (model, batch, loss), options) as (request, listener):
        found = prepare_max_batch(request, listener).run()
    raise_if_nothing_fits(found.max_batches)
    return MaxBatches(found)


@_with_options(FitsOptions, FitsModelKeywords)
def fits(model: Any, batch: Any = None, loss: Any = None, **options: Unpack[FitsModelKeywords]) -> Fits:
    """Predict what a training step takes on GPUs that are not there, as `castwise fits` does.

    Model, batch, loss and errors are those of `castwise.compare`.
    """
    from castwise.fits.predict import predict

    with _asked(FitsOptions, "fits", (model, batch, loss), options) as (request, _):
        return Fits(predict(request))


@_with_options(AccuracyOptions, AccuracyKeywords)
def accuracy(workload: str, **options: Unpack[AccuracyKeywords]) -> Accuracies:
    """Train pairs of runs on real data, and say in which precision the model becomes as good.

    Args:
        workload: A workload that a suite trains on real data.
        **options: The options.

    Raises:
        UsageError: The request cannot be carried out, or the budget is too short for two runs of each precision.
        DataError: The data set is damaged, or missing and cannot be downloaded.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    from castwise.accuracy.search import prepare_accuracy

    request = _parse(AccuracyOptions, {"workload": workload, **options}, "accuracy")
    with _listening({}) as listener:
        return Accuracies(prepare_accuracy(request, listener).run())


@_with_options(ReportOptions, ReportKeywords)
def report(records: _PathLike | Sequence[_PathLike] | None = None, **options: Unpack[ReportKeywords]) -> Report:
    """Read records and make a report of them, as `castwise report` does; it is written if `output` names a file.

    Args:
        records: Results folders, or single records; None takes castwise-results.
        **options: The options.

    Raises:
        UsageError: There are no such records, or what the report needs is not installed.
        StoreError: A folder cannot be read, or a file cannot be written.
    """
    folders = [records] if isinstance(records, str | PathLike) else records
    request = _parse(ReportOptions, {"records": folders, **options}, "report")
    found = find(request.folders("report"), request)
    if request.output is not None:
        write_report(found, request.output, request.title)
    if request.card is not None:
        write_card(found, request.card)
    if request.charts is not None:
        from castwise.report.charts.registry import pictures_of

        write_pictures(pictures_of(found.collection, found.file_of), request.charts)
    return Report(found.collection, request.output, found.problems, found.file_of)


@contextmanager
def _asked(
    kind: type[_Asking], function: str, model: tuple[Any, Any, Any], options: Mapping[str, Any]
) -> Iterator[tuple[_Asking, Listener]]:
    """Yield what a function is asked for with model, batch, loss and its keywords, and what listens."""
    parts = dict(zip(("model", "batch", "loss"), model, strict=True))
    parts |= {name: options.get(name) for name in _MODEL_HELP if name != "progress"}
    parts = {name: value for name, value in parts.items() if value is not None and (name, value) != ("accumulate", 1)}
    given = {name: value for name, value in options.items() if name not in _MODEL_HELP}
    is_named = isinstance(parts["model"], str)
    request = _parse(kind, {"workload": parts["model"] if is_named else "model", **given}, function)
    if is_named and len(parts) > 1:
        others = ", ".join(name for name in parts if name != "model")
        raise UsageError(f"The workload '{parts['model']}' has its own {others}. Leave it out, or give a model.")
    with ExitStack() as ends:
        reference = parts["model"]
        if not is_named:
            results = request.results if isinstance(request, SharedOptions) else None
            folder = None if results is None else results / "objects"
            folder = folder or Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="castwise-objects-")))
            reference = pickle_user_objects(parts, folder)
        (workload,) = (option for option in options_of(kind) if option.keyword == "workload")
        named: dict[str, Any] = {workload.name: reference if workload.type is str else (reference,)}
        yield replace(request, **named), ends.enter_context(_listening(options))


@contextmanager
def _listening(options: Mapping[str, Any]) -> Iterator[Listener]:
    """Yield what shows progress on stderr, or nothing if it is not wanted."""
    live = LiveProgress(Console(stderr=True, highlight=False, emoji=False, force_jupyter=False))
    is_wanted = options.get("progress", True)
    with live if is_wanted else nullcontext():
        yield live if is_wanted else NullListener()
