"""`castwise.compare`: a model of the session's own in every precision, from a script or a notebook."""

import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from castwise.analysis.advice import Advice, recommend
from castwise.analysis.result_table import MARGIN, Row
from castwise.analysis.result_table import compare as compare_trials
from castwise.errors import UsageError
from castwise.orchestrator.job import Request, prepare
from castwise.orchestrator.pickling import pickle_user_objects
from castwise.orchestrator.rounds import StopRule
from castwise.orchestrator.trial import NullListener
from castwise.records.schema import Trial
from castwise.render.progress import LiveProgress
from castwise.render.run_report import print_table, to_html
from castwise.spec.plan import ParameterGrid
from castwise.spec.quantities import as_tuple, split_names

_WIDTH = 120  # of what print shows, which knows of no terminal


@dataclass(frozen=True)
class Comparison:
    """What `castwise.compare` found: a table in a terminal, an HTML table in a notebook, and all records.

    Attributes:
        trials: The records, one a precision; in rounds one a precision and round.
        margin: How far from 1 a speed-up still is "the same", where speed-ups have intervals.
    """

    trials: tuple[Trial, ...]
    margin: float = MARGIN

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Return each precision's figures beside fp32's."""
        return tuple(compare_trials(self.trials, self.margin))

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Return which precision to take, in words and as code."""
        return tuple(recommend(self.rows))

    @property
    def best(self) -> str | None:
        """Return the precision to take; None where nothing could be measured."""
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
        # In a notebook rich shows what it prints, to whatever file, and IPython asks for the text of what it shows.
        console = Console(file=text, width=width, force_terminal=color, emoji=False, force_jupyter=False)
        print_table(self.rows, self.advice, console)
        return text.getvalue().rstrip("\n")


def compare(  # noqa: PLR0913  the contract's names and the command line's, all but three by keyword
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
    batch_size: int | Sequence[int] | None = None,
    precision: str | Sequence[str] | None = None,
    loss_scale: str | float | Sequence[str | float] | None = None,
    gpus: int | Sequence[int] | None = None,
    techniques: str | Sequence[str] | None = None,
    device: str | None = None,
    seconds: float | None = None,
    timeout_seconds: float | None = None,
    within: str | float | None = None,
    budget: str | float | None = None,
    rounds: int | None = None,
    margin: str | float | None = None,
    results: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Comparison:
    """Train a model in every precision, each in a process of its own, and return what that took, side by side.

    The objects may be defined in a script or in a notebook's cell: their code travels with them.

    Args:
        model: The model; a function without arguments that returns it, or everything (docs/own-model.md); or a
            workload's name, such as "train_me.py:build" or "resnet50".
        batch: An example batch, a function that returns a batch of as many samples as it is asked for, or a data
            loader, whose first batch is the example.
        loss: Takes output and target, the last part of the batch; None takes the output's own `loss` or mean square.
        training_step: Takes model and batch and returns the loss, in the place of `loss`.
        optimizer: An optimizer of the model's parameters, or a function that returns one from them; None takes AdamW.
        scheduler: A scheduler of that optimizer, or a function that returns one from it; stepped after each step.
        accumulate: Batches, each of batch_size / accumulate samples, for one optimizer step.
        clip_grad_norm: The norm that gradients are clipped to, after the loss scale is taken out of them.
        unit: What throughput counts: images, tokens or samples. None takes samples.
        units_per_sample: How many of them are in a sample.
        batch_size: Samples per optimizer step; None takes the example's own number.
        precision: One name or several; None takes all that the GPU has, or the four that are worth it on a CPU.
        loss_scale: `none`, `dynamic`, `dynamic-apex` or numbers, for the precisions that scale their loss.
        gpus: Numbers of GPUs, each of which trains on `batch_size` samples; None takes one.
        techniques: Changes to the loop, joined by "+": "channels-last", "fused-optimizer+compile", "cuda-graph".
        device: "cpu", "cuda" or "cuda:N"; None takes the first GPU, or the CPU where there is none.
        seconds: Seconds to time each trial for; None takes 4 on a GPU and 0.4 on a CPU.
        timeout_seconds: Seconds one phase may take before a trial is given up.
        within: Measure in rounds of fresh processes until every speed-up is known within this share: "1%" or 0.01. With
            this, `budget` or `rounds` speed-ups have 95 % intervals and verdicts.
        budget: Measure in rounds for this wall time: "60s", or seconds. On a CPU rounds take 75 s without it.
        rounds: Rounds at the most; 12 without it.
        margin: In rounds: how far from 1 a speed-up still is the same; None takes 1 %.
        results: The folder for records; None keeps them in memory only, and measures everything.
        seed: Seeds weights, data and dropout.
        progress: Whether stderr is told of progress.

    Raises:
        UsageError: The request cannot be carried out as it stands, or an object cannot travel.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    given = {"batch": batch, "loss": loss, "training_step": training_step, "optimizer": optimizer}
    given |= {"scheduler": scheduler, "clip_grad_norm": clip_grad_norm, "unit": unit}
    given |= {"units_per_sample": units_per_sample, "accumulate": accumulate if accumulate != 1 else None}
    parts = {"model": model} | {name: value for name, value in given.items() if value is not None}
    scales: tuple[str | float, ...] | None = as_tuple(loss_scale)
    rule = StopRule.of(within, budget, rounds, margin)
    folder = None if results is None else Path(results)
    with _reference(parts, folder) as reference:
        request = Request(
            axes=ParameterGrid(
                workloads=(reference,),
                precisions=split_names(precision),
                batch_sizes=as_tuple(batch_size),
                loss_scales=tuple(str(scale) for scale in scales) if scales is not None else None,
                world_sizes=as_tuple(gpus),
                techniques=split_names(techniques),
            ),
            device=device,
            results=folder,
            seconds=seconds,
            timeout_seconds=timeout_seconds,
            seed=seed,
            rule=rule,
            short=True,
        )
        return Comparison(tuple(_run(request, progress)), MARGIN if rule is None else rule.margin)


def _run(request: Request, progress: bool) -> list[Trial]:
    if not progress:
        return prepare(request, NullListener()).run()
    live = LiveProgress(Console(stderr=True, highlight=False, emoji=False, force_jupyter=False))
    job = prepare(request, live)
    with live:
        return job.run()


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
