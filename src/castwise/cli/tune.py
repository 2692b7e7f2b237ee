"""`castwise tune`: parse, call one function, print."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from castwise.cli.options import (
    Again,
    Data,
    Device,
    Format,
    OneWorkload,
    Output,
    Results,
    Retry,
    Seed,
    Verbose,
    check_single,
    complete_precisions,
)

if TYPE_CHECKING:
    from castwise.tune.search import TuningResult

_EXAMPLES = """\
Examples:

    castwise tune mnist-cnn                         from the plain loop to the fastest

    castwise tune resnet50 --memory 8GiB            and the fastest that fits into 8 GiB

    castwise tune lstm-lm --precision fp32,tf32,bf16-mixed --budget 5min

    castwise tune resnet50 --emit train.py          and the winner as a script

    castwise tune lstm-lm --allow shape             changes to the model, too

    castwise tune mnist-cnn --data-set mnist        whole epochs, read as the source reads them
"""


class Allowed(StrEnum):
    """What a technique may do to the numbers at the most."""

    BITS = "bits"
    ROUNDING = "rounding"
    DRAWS = "draws"
    SHAPE = "shape"


def add_to(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=_EXAMPLES)(tune)


def tune(  # noqa: PLR0913, PLR0917  an option each
    workload: OneWorkload,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precisions to try, comma-separated; the first is the plain loop's. Without it: fp32 and all that "
            "keep float32 weights.",
            autocompletion=complete_precisions,
        ),
    ] = None,
    allow: Annotated[
        Allowed,
        typer.Option(
            help="What a technique may change at the most: bits (nothing), rounding, draws (other random numbers of "
            "the same distribution), shape (the model)."
        ),
    ] = Allowed.DRAWS,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Find the fastest loop within this memory too, on a smaller batch where need be: 8GiB.", metavar="SIZE"
        ),
    ] = None,
    emit: Annotated[
        Path | None,
        typer.Option(
            help="Write the fastest loop, the one within --memory if that is given, as a script in plain PyTorch, "
            "without castwise.",
            metavar="FILE",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Wall time after which nothing further is tried: 5min. Without it: 9min, or 160s where a GPU's step "
            "takes less than 10 ms.",
            metavar="TIME",
        ),
    ] = None,
    device: Device = None,
    data_set: Annotated[
        str | None,
        typer.Option(
            help="synthetic; or a real data set, or random samples in its shape (synthetic:NAME), whose epochs are "
            "then timed as the source's suite reads them."
        ),
    ] = None,
    training: Annotated[
        bool, typer.Option("--training", help="Time epochs as the source's suite runs them, on the suite's data.")
    ] = False,
    larger_batches: Annotated[
        bool, typer.Option("--larger-batches", help="Try 2, 4 and 8 times the batch, too: that changes the training.")
    ] = False,
    data: Data = None,
    results: Results = Path("castwise-results"),
    output: Output = Format.TABLE,
    timeout: Annotated[
        str | None,
        typer.Option(
            help="How long one phase of a trial, a compilation for one, may take. Without it: half of --budget, 3min "
            "at the least.",
            metavar="TIME",
        ),
    ] = None,
    seed: Seed = 0,
    retry: Retry = False,
    again: Again = False,
    verbose: Verbose = False,
) -> None:
    """Climb from the plain loop to the fastest that computes the same, and say what each technique bought."""
    from castwise.cli.actions import tune as carry_out
    from castwise.spec.quantities import parse_limit, parse_list, parse_memory
    from castwise.tune.request import TuneRequest, source_of

    limit = None if memory is None else parse_memory("--memory", memory)
    request = TuneRequest(
        workload=check_single("tune", workload),
        precisions=parse_list("--precision", precision),
        numerics=allow.value,
        batch_size=batch_size,
        device=device,
        data_set=data_set,
        training=training,
        larger_batches=larger_batches,
        memory_bytes=limit,
        data_dir=data,
        results=results,
        budget_seconds=parse_limit("--budget", budget),
        timeout_seconds=parse_limit("--timeout", timeout),
        seed=seed,
        retry=retry,
        again=again,
    )
    if emit is not None:
        from castwise.render.emit.script import check_script

        wanted, recipe = source_of(request) or (request.data_set or "synthetic", None)
        check_script(request.workload, wanted, recipe, emit)
    code, climbed = carry_out(request, output.value, limit, verbose=verbose)
    if emit is not None and climbed is not None and climbed.ending != "failed":
        code = _emit(emit, climbed, limit, request.workload)
    raise typer.Exit(code)


def _emit(file: Path, climbed: "TuningResult", limit: float | None, workload: str) -> int:
    """Write the loop that was asked for as a script, the one that fits where there is a limit; return the exit code."""
    from castwise.cli.report_actions import atomic_write
    from castwise.render.emit.script import script_of
    from castwise.render.units import format_bytes
    from castwise.spec.user_model import locate
    from castwise.tune.render import chosen, measured_words

    spec = chosen(climbed, limit)
    if spec is None:
        print(f"{file} is not written: no loop that was tried fits into {format_bytes(limit)}.", file=sys.stderr)
        return 1
    measured = measured_words(climbed, spec)
    if spec.user_model is not None:  # records leave out the folder, which a script has to know
        spec = spec.model_copy(update={"user_model": locate(workload)})
    atomic_write(file, script_of(spec, measured).encode())
    within = "" if limit is None else f" within {format_bytes(limit)}"
    print(f"{file}: the fastest loop{within} as a script", file=sys.stderr)
    return 0
