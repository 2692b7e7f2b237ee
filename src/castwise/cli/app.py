"""The command line: parse, call one function, print."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from castwise._version import __version__
from castwise.cli import max_batch, reports, tune
from castwise.cli.errors import PARSING_ERROR, parsing_line
from castwise.cli.options import (
    WORKLOAD_NAMES,
    Again,
    Data,
    Device,
    Format,
    Output,
    Results,
    Retry,
    Seed,
    SuiteTechniques,
    Techniques,
    Timeout,
    Verbose,
    complete_precisions,
    complete_suites,
    complete_workloads,
)
from castwise.errors import CastwiseError, UsageError
from castwise.spec.quantities import parse_limit, parse_list, parse_numbers

_EXAMPLES = """\
Examples:

    castwise run                  a short job that suits this machine

    castwise run resnet50         every precision the GPU has

    castwise tune resnet50        from the plain loop to the fastest, technique by technique

    castwise max-batch resnet50   the largest batch that trains, in every precision

    castwise report               what was measured, as a page with charts

    castwise doctor               what this machine can do

Exit codes: 0 done, 1 a trial failed, 2 usage, 3 store, 130 interrupted.
"""

app = typer.Typer(
    name="castwise",
    no_args_is_help=True,
    rich_markup_mode="rich",  # markdown would cost `castwise --help` 0.1 s
    pretty_exceptions_enable=False,
    help="In which numeric precision should this model be trained on this GPU, and why? castwise measures it.",
    epilog=_EXAMPLES,
)

_RUN_EXAMPLES = """\
Examples:

    castwise run                                    a short job that suits this machine

    castwise run resnet50                           every precision the GPU has

    castwise run resnet50 --precision fp32,bf16-mixed --batch-size 128,256

    castwise run dpn92 --precision fp16-master --loss-scale dynamic,128

    castwise run resnet50 --precision bf16-mixed --gpus 1,2,4

    castwise run mnist-cnn --data-set mnist --data DIR --format markdown

    castwise run resnet50 --precision bf16-mixed --techniques none,tuned,compiled

    castwise run resnet50 --within 1%               in rounds, until every speed-up is known within 1 %

    castwise run train_me.py:build                  a model of your own; `castwise init FILE` writes one to start from
"""


_SUITE_EXAMPLES = """\
Examples:

    castwise suite tensorcore --quick               a few steps of each run

    castwise suite wrn-cifar10 --precision O1,O2    two of its precisions, in full

    castwise suite wrn-cifar10 --precision O0 --epochs 2

    castwise suite --all --quick --synthetic        every suite, without any data

    castwise suite mine.toml                        a suite of your own
"""


class Listing(StrEnum):
    """What can be listed."""

    WORKLOADS = "workloads"
    PRECISIONS = "precisions"
    TECHNIQUES = "techniques"
    DEVICES = "devices"
    SUITES = "suites"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"castwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    del version


@app.command(epilog=_RUN_EXAMPLES)
def run(  # noqa: PLR0913, PLR0917  an option each
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD",
            help=f"Workloads {WORKLOAD_NAMES}; several apart by spaces or commas. Without one: a short job that suits "
            "this machine.",
            autocompletion=complete_workloads,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precisions, comma-separated; O0 to O3 are understood. Without it: all that the device has.",
            autocompletion=complete_precisions,
        ),
    ] = None,
    batch_size: Annotated[str | None, typer.Option(help="Samples per step, comma-separated.")] = None,
    loss_scale: Annotated[
        str | None,
        typer.Option(help="none, dynamic, dynamic-apex or numbers, comma-separated; for precisions that scale."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="Numbers of GPUs, comma-separated; each trains on --batch-size samples. Without it: 1."),
    ] = None,
    parallelism: Annotated[
        str | None,
        typer.Option(help="How GPUs share a step: ddp (a process each) or dp (DataParallel). Without it: ddp."),
    ] = None,
    techniques: Techniques = None,
    device: Device = None,
    data_set: Annotated[
        str | None, typer.Option(help="synthetic, or a real data set: mnist, cifar10, wikitext-2.")
    ] = None,
    data: Data = None,
    results: Results = Path("castwise-results"),
    output: Output = Format.TABLE,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds to time each trial for, at the most.", metavar="S")
    ] = None,
    timeout: Timeout = None,
    within: Annotated[
        str | None,
        typer.Option(help="Measure in rounds until every speed-up is known within this share.", metavar="SHARE"),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Measure in rounds for this wall time: 60s, 5min.", metavar="TIME")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds at the most, each with fresh processes that take turns.", metavar="N"),
    ] = None,
    margin: Annotated[
        str | None,
        typer.Option(help="In rounds: how far from 1 a speed-up still is the same; 1% without it.", metavar="SHARE"),
    ] = None,
    seed: Seed = 0,
    retry: Retry = False,
    again: Again = False,
    price_kwh: Annotated[
        float | None, typer.Option(help="What a kilowatt-hour costs you; prints what an epoch does.", metavar="X")
    ] = None,
    price_gpu_hour: Annotated[
        float | None, typer.Option(help="What an hour of a GPU costs you; prints what an epoch does.", metavar="Y")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Measure a workload in every precision: time, throughput, memory, loss, and which precision to take."""
    from castwise.analysis.energy import Prices
    from castwise.cli.actions import measure
    from castwise.orchestrator.job import Request
    from castwise.orchestrator.rounds import StopRule
    from castwise.spec.plan import ParameterGrid

    request = Request(
        axes=ParameterGrid(
            workloads=parse_list("WORKLOAD", ",".join(workloads) if workloads else None),
            precisions=parse_list("--precision", precision),
            batch_sizes=parse_numbers("--batch-size", batch_size),
            loss_scales=parse_list("--loss-scale", loss_scale),
            world_sizes=parse_numbers("--gpus", gpus),
            parallelisms=parse_list("--parallelism", parallelism),
            techniques=parse_list("--techniques", techniques),
        ),
        device=device,
        data_set=data_set,
        data_dir=data,
        results=results,
        seconds=seconds,
        timeout_seconds=parse_limit("--timeout", timeout),
        seed=seed,
        rule=StopRule.of(within, budget, rounds, margin, dashes="--"),
        retry=retry,
        again=again,
    )
    raise typer.Exit(measure(request, output.value, prices=Prices(price_kwh, price_gpu_hour), verbose=verbose))


@app.command(epilog=_SUITE_EXAMPLES)
def suite(  # noqa: PLR0913, PLR0917  an option each
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SUITE",
            help="Suites (`castwise list suites`), or TOML files of your own; several apart by spaces or commas.",
            autocompletion=complete_suites,
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Run every suite.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps of each run: minutes instead of hours.")] = False,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs a run at the most; its schedule stays the source's.", metavar="N")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps an epoch at the most.", metavar="N")] = None,
    seeds: Annotated[int, typer.Option(help="Runs a cell, with seeds 0, 1, …", metavar="N")] = 1,
    workload: Annotated[
        str | None, typer.Option(help="Only these workloads, comma-separated.", autocompletion=complete_workloads)
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Only these precisions, comma-separated.", autocompletion=complete_precisions)
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="Only these numbers of GPUs, comma-separated.")] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Random samples stand in for real data: time comparable, accuracy not.")
    ] = False,
    techniques: SuiteTechniques = None,
    tuned: Annotated[
        bool,
        typer.Option(
            "--tuned",
            help="The published loop and the fastest one known, which the suite's file names, side by side: "
            "--techniques none,tuned.",
        ),
    ] = False,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Validate once behind a run whose source does not, outside its time: how accurate the model is.",
        ),
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(help="Pretrained weights: a file, or a folder of torchvision's files.", metavar="PATH"),
    ] = None,
    keep_weights: Annotated[
        Path | None,
        typer.Option(
            help="Keep the weights of what is trained now here, a state_dict a run, under its record's folder "
            "and name; what is on record already has none.",
            metavar="DIR",
        ),
    ] = None,
    device: Device = None,
    data: Data = None,
    results: Results = Path("castwise-results"),
    output: Output = Format.TABLE,
    timeout: Annotated[
        str | None, typer.Option(help="Wall time without a sign of life: then a run is given up.", metavar="TIME")
    ] = None,
    retry: Retry = False,
    again: Again = False,
    verbose: Verbose = False,
) -> None:
    """Run published benchmarks as their sources do, and set their figures beside what is measured here."""
    from castwise.cli.actions import run_suites
    from castwise.registry.suites import SUITE_NAMES, SuiteFilter, find_suite
    from castwise.suites.run import SuiteRequest, SuitesRequest

    names = parse_list("SUITE", ",".join(suites) if suites else None)
    if (names is None) != all_:
        raise UsageError("Name the suites to run, or say --all. `castwise list suites` shows them.")
    if tuned and techniques is not None:
        raise UsageError("--tuned stands for --techniques none,tuned. Give one of the two.")
    choice = SuiteFilter(
        quick=quick,
        epochs=epochs,
        max_steps=max_steps,
        seeds=seeds,
        workloads=parse_list("--workload", workload),
        precisions=parse_list("--precision", precision),
        world_sizes=parse_numbers("--gpus", gpus),
        synthetic=synthetic,
        techniques=("none", "tuned") if tuned else parse_list("--techniques", techniques) or ("none",),
        validate=validate,
    )
    limit = parse_limit("--timeout", timeout)
    found = [find_suite(each) for each in dict.fromkeys(names or SUITE_NAMES)]
    requests = tuple(SuiteRequest(each, choice, results, weights, limit, retry, again, keep_weights) for each in found)
    raise typer.Exit(run_suites(SuitesRequest(requests, device, data), output.value, verbose=verbose))


@app.command()
def init(file: Annotated[Path, typer.Argument(help="The file to write, such as my_bench.py.")]) -> None:
    """Write a commented file that measures a model of your own, to start from; it runs as it is."""
    from castwise.cli.init_template import write_starter

    write_starter(file)
    print(f"Wrote {file}. It runs as it is: castwise run {file}")


@app.command("list")
def list_(what: Annotated[Listing, typer.Argument(help="What to list.", case_sensitive=False)]) -> None:
    """List the workloads, the precisions, the techniques, the GPUs whose datasheets castwise knows, or the suites."""
    from castwise.cli import listings
    from castwise.render.run_report import result_console

    makers = {
        Listing.WORKLOADS: listings.workloads,
        Listing.PRECISIONS: listings.precisions,
        Listing.TECHNIQUES: listings.techniques,
        Listing.DEVICES: listings.devices,
        Listing.SUITES: listings.suites,
    }
    result_console().print(makers[what]())


@app.command()
def doctor() -> None:
    """Show GPU, driver, torch and TF32 state, which precisions this machine has, and who else uses the GPU."""
    from castwise.cli.actions import examine

    raise typer.Exit(examine())


tune.add_to(app)
max_batch.add_to(app)
reports.add_to(app)
# In the help what measures comes first, then what is made of it, then what helps.
_ORDER = ("run", "tune", "max-batch", "fit", "suite", "report", "compare", "export", "init", "list", "doctor")
app.registered_commands.sort(key=lambda each: _ORDER.index(each.name or getattr(each.callback, "__name__", "")))


def main() -> NoReturn:
    """Run the command line; every error in what was typed, or raised on purpose, is one line and an exit code."""
    try:
        # Also as `python -m castwise`: what its help shows can be typed.
        code = app(prog_name="castwise", standalone_mode=False)
    except CastwiseError as error:
        print(f"castwise: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except PARSING_ERROR as error:
        if line := parsing_line(error):
            print(f"castwise: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(code or 0)
