"""`castwise max-batch`: parse, call one function, print."""

import sys
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

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
    Techniques,
    Timeout,
    Verbose,
    check_single,
    complete_precisions,
)

_EXAMPLES = """\
Examples:

    castwise max-batch resnet50                       the largest batch of every precision the GPU has

    castwise max-batch resnet50 --precision fp32,bf16-mixed --exact

    castwise max-batch resnet50 --memory 8GiB --margin 5%  and within 8 GiB, of which 5 % stay free

    castwise max-batch lstm-lm --techniques none,chunked-loss

    castwise max-batch train_me.py:build              a model of your own

    castwise max-batch mnist-cnn --memory 500MiB      on a CPU, within a limit
"""


def add_to(app: typer.Typer) -> None:
    """Add the command to the command line, under its former name, too."""
    app.command("max-batch", epilog=_EXAMPLES)(max_batch)

    @wraps(max_batch)
    def fit(**options: Any) -> None:
        print("`castwise fit` is `castwise max-batch` now; the old name still works.", file=sys.stderr)
        max_batch(**options)

    app.command("fit", hidden=True, epilog=_EXAMPLES)(fit)


def max_batch(  # noqa: PLR0913, PLR0917  an option each
    workload: OneWorkload,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precisions, comma-separated. Without it: all that the device has.",
            autocompletion=complete_precisions,
        ),
    ] = None,
    techniques: Techniques = None,
    exact: Annotated[bool, typer.Option("--exact", help="To the sample; else to a multiple of 8.")] = False,
    margin: Annotated[
        str | None, typer.Option(help="The share of the memory that is to stay free: 5%.", metavar="SHARE")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="The most that a trial may take: 8GiB. Without it: all that the GPU has; a CPU needs it.",
            metavar="SIZE",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps that a batch must train to fit, at the least. Without it: 5.", metavar="N")
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve/--no-curve", help="Measure batches below the largest, for the curve and its knee.")
    ] = True,
    device: Device = None,
    data_set: Annotated[str, typer.Option(help="synthetic, or a real data set.")] = "synthetic",
    data: Data = None,
    results: Results = Path("castwise-results"),
    output: Output = Format.TABLE,
    timeout: Timeout = None,
    seed: Seed = 0,
    retry: Retry = False,
    again: Again = False,
    verbose: Verbose = False,
) -> None:
    """Find the largest batch that trains, by training on it; and what throughput, memory and energy are below it."""
    from castwise.cli.actions import max_batch as carry_out
    from castwise.max_batch.search import MaxBatchRequest
    from castwise.spec.quantities import parse_limit, parse_list, parse_memory, parse_share

    request = MaxBatchRequest(
        workload=check_single("max-batch", workload),
        precisions=parse_list("--precision", precision),
        techniques=parse_list("--techniques", techniques),
        exact=exact,
        margin=0.0 if margin is None else parse_share("--margin", margin),
        memory_bytes=None if memory is None else parse_memory("--memory", memory),
        steps=MaxBatchRequest.steps if steps is None else steps,
        curve=curve,
        device=device,
        data_set=data_set,
        data_dir=data,
        results=results,
        timeout_seconds=parse_limit("--timeout", timeout),
        seed=seed,
        retry=retry,
        again=again,
    )
    raise typer.Exit(carry_out(request, output.value, verbose=verbose))
