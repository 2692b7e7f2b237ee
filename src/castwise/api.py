"""The Python API: `castwise.run` and `castwise.compare`, with the options of `castwise run` as keywords."""

import inspect
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from castwise.analysis.advice import Advice, recommend
from castwise.analysis.result_table import MARGIN, Row
from castwise.analysis.result_table import compare as compare_trials
from castwise.errors import UsageError
from castwise.orchestrator.job import prepare
from castwise.orchestrator.pickling import pickle_user_objects
from castwise.orchestrator.runner import NullListener
from castwise.records.schema import Trial
from castwise.render.progress import LiveProgress
from castwise.render.run_report import print_table, to_html
from castwise.spec.options import RunOptions, options_of, parse_options

_WIDTH = 120  # of str(comparison), which has no terminal to ask


class RunKeywords(TypedDict, total=False):
    """The options of `castwise run` as keywords of `castwise.run` and `castwise.compare`."""

    precision: str | Sequence[str] | None
    batch_size: str | int | Sequence[int] | None
    loss_scale: str | float | Sequence[str | float] | None
    gpus: str | int | Sequence[int] | None
    parallelism: str | Sequence[str] | None
    techniques: str | Sequence[str] | None
    seconds: float | None
    within: str | float | None
    budget: str | float | None
    rounds: int | None
    margin: str | float | None
    data_set: str | None
    seed: int
    device: str | None
    data: str | PathLike[str] | None
    results: str | PathLike[str] | None
    timeout_seconds: str | float | None
    retry: bool
    again: bool


@dataclass(frozen=True)
class Comparison:
    """What `castwise.compare` found: a table in a terminal, an HTML table in a notebook, and all records.

    Attributes:
        trials: The records, one for each precision; in rounds one for each precision and round.
        margin: How far from 1 a speed-up still is "the same", if speed-ups have intervals.
    """

    trials: tuple[Trial, ...]
    margin: float = MARGIN

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Return each precision's figures, compared with fp32's."""
        return tuple(compare_trials(self.trials, self.margin))

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Return which precision to take, in words and as code."""
        return tuple(recommend(self.rows))

    @property
    def best(self) -> str | None:
        """Return the precision to take; None if nothing could be measured."""
        return self.advice[0].precision if self.advice else None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table as rich's console has room for it."""
        yield Text.from_ansi(self._rendered(options.max_width, color=console.color_system is not None))

    def __str__(self) -> str:
        """Return the table, its remarks and the advice as plain text."""
        return self._rendered(_WIDTH, color=False)

    def __repr__(self) -> str:
        """Return the same: at a prompt one wants to see it."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return what Jupyter shows."""
        return to_html(self.rows, self.advice)

    def _rendered(self, width: int, *, color: bool) -> str:
        text = io.StringIO()
        # Without force_jupyter rich would also display the table in a notebook, whatever the console's file is.
        console = Console(file=text, width=width, force_terminal=color, emoji=False, force_jupyter=False)
        print_table(self.rows, self.advice, console)
        return text.getvalue().rstrip("\n")


_Function = TypeVar("_Function", bound=Callable[..., object])
_OPTIONS = "        **options: The options of `castwise run`."


def _with_run_options(function: _Function) -> _Function:
    """List the options of `castwise run` in a function's signature and docstring, in the place of `**options`."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [option for option in options_of(RunOptions) if option.keyword not in signature.parameters]
    keywords = [
        inspect.Parameter(
            option.keyword,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.field_default,
            annotation=RunKeywords.__annotations__[option.keyword],
        )
        for option in options
        if option.keyword in RunKeywords.__annotations__
    ]
    help_lines = "\n".join(f"        {option.keyword}: {option.help}" for option in options)
    function.__doc__ = (function.__doc__ or "").replace(_OPTIONS, help_lines)
    function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
    return function


def _parse(given: Mapping[str, object], function: str) -> RunOptions:
    known = {option.keyword for option in options_of(RunOptions)}
    for keyword in given:
        if keyword not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument '{keyword}'")
    return parse_options(RunOptions, given)


@_with_run_options
def run(workload: str | Sequence[str] | None = None, **options: Unpack[RunKeywords]) -> list[Trial]:
    """Measure a workload in every precision and return the records, as `castwise run` does.

    Lists are one value, a sequence, or a text with commas; durations are seconds or texts such as "5min", shares are
    numbers or texts such as "1%". Without `results` nothing is kept on disk, and everything is measured.

    Args:
        workload: One name or several; None takes a short job that suits the machine.
        **options: The options of `castwise run`.

    Returns:
        A trial for each combination, in the order workload, batch size, GPUs, parallelism, techniques, precision, loss
        scale; in rounds one for each combination and round.

    Raises:
        UsageError: The request cannot be carried out.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    return prepare(_parse({"workload": workload, **options}, "run")).run()


@_with_run_options
def compare(  # noqa: PLR0913  what a model is made of
    model: Any,
    batch: Any = None,
    loss: Any = None,
    *,
    training_step: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    unit: str | None = None,
    units_per_sample: int | None = None,
    progress: bool = True,
    **options: Unpack[RunKeywords],
) -> Comparison:
    """Train a model in every precision, each in a process of its own, and return what that took, side by side.

    The objects may be defined in a script or in a notebook: their code travels with them. On a CPU a process times
    0.4 s of steps unless `seconds` says otherwise, and rounds end after 75 s unless `budget` or `rounds` is given.

    Args:
        model: The model; a function without arguments that returns it, or everything (docs/own-model.md); or a
            workload's name, such as "train_me.py:build" or "resnet50".
        batch: An example batch, a function that returns a batch of as many samples as it is asked for, or a data
            loader, whose first batch is the example.
        loss: Takes output and target, the last part of the batch; None takes the output's own `loss`.
        training_step: Takes model and batch and returns the loss, in the place of `loss`.
        optimizer: An optimizer of the model's parameters, or a function that returns one from them; None takes AdamW.
        scheduler: A scheduler of that optimizer, or a function that returns one from it; stepped after each step.
        accumulate: Batches, each of batch_size / accumulate samples, for one optimizer step.
        clip_grad_norm: The norm that gradients are clipped to, after the loss scale is taken out of them.
        unit: What throughput counts: images, tokens or samples. None takes samples.
        units_per_sample: How many of them are in a sample.
        progress: Whether progress is printed on stderr.
        **options: The options of `castwise run`.

    Raises:
        UsageError: The request cannot be carried out, or an object cannot travel.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    parts = {"batch": batch, "loss": loss, "training_step": training_step, "optimizer": optimizer}
    parts |= {"scheduler": scheduler, "clip_grad_norm": clip_grad_norm, "unit": unit}
    parts |= {"units_per_sample": units_per_sample, "accumulate": accumulate if accumulate != 1 else None}
    parts = {"model": model} | {name: value for name, value in parts.items() if value is not None}
    run_options = _parse(options, "compare")
    with _reference(parts, run_options.results) as reference:
        run_options = replace(run_options, workloads=(reference,))
        live = LiveProgress(Console(stderr=True, highlight=False, emoji=False, force_jupyter=False))
        job = prepare(run_options, live if progress else NullListener(), short=True)
        with live if progress else nullcontext():
            trials = job.run()
    return Comparison(tuple(trials), MARGIN if job.rule is None else job.rule.margin)


@contextmanager
def _reference(parts: dict[str, Any], results: Path | None) -> Iterator[str]:
    """Yield the reference of a workload: a name as it is, or that of the objects' file, kept while it is needed."""
    if isinstance(parts["model"], str):
        if len(parts) > 1:
            others = ", ".join(name for name in parts if name != "model")
            raise UsageError(f"The workload '{parts['model']}' has its own {others}. Leave it out, or give a model.")
        yield parts["model"]
    elif results is not None:
        yield pickle_user_objects(parts, results / "objects")
    else:
        with tempfile.TemporaryDirectory(prefix="castwise-objects-") as folder:
            yield pickle_user_objects(parts, Path(folder))
