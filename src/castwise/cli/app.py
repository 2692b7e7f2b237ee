"""The command line: parse, call one function, print."""

import faulthandler
import shutil
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from castwise._version import __version__
from castwise.cli import accuracy, compare, export, fits, max_batch, merge, report, run, share, suite, tune, why
from castwise.cli.options import HelpCommand, HelpGroup, add_command
from castwise.cli.output import check_stdout, prepare_streams
from castwise.errors import CastwiseError, EngineError, StoreError, printable, shortened
from castwise.show.units import wrap

# Click's error for what cannot be parsed. Typer has a Click of its own, older ones the package; of its errors they
# export this subclass alone.
_PARSING_ERROR: type[Any] = typer.BadParameter.__bases__[0]

# What `castwise` alone shows.
_START = """\
castwise finds the fastest precision for training your model on this machine.

  castwise doctor                   what this machine can do
  castwise run                      a short job, to begin with
  castwise run -- python train.py   your own script, in every precision
  castwise why -- python train.py   why one is no faster
  castwise run FILE.py:build        your own model, without its script
  castwise tune FILE.py:build       the fastest training loop for it
  castwise report                   charts of what was measured (or --example)

`castwise init FILE.py` writes a model of your own to start from.
`castwise --help` shows every command, `castwise run --help` its options.
"""

app = typer.Typer(
    name="castwise",
    cls=HelpGroup,
    rich_markup_mode="rich",  # markdown would cost `castwise --help` 0.1 s
    pretty_exceptions_enable=False,
    help="In which numeric precision should this model be trained on this GPU, and why? castwise measures it.",
    epilog="Exit codes: 0 done, 1 a trial crashed or hung, 2 usage, 3 records, 4 standard output, 130 interrupted.",
)


# What can be listed: functions of castwise.cli.listings.
Listing = StrEnum("Listing", ["WORKLOADS", "PRECISIONS", "TECHNIQUES", "GPUS", "DEVICES", "SUITES"])


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"castwise {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    del version
    if context.invoked_subcommand is None:
        print(wrap(_START, shutil.get_terminal_size().columns), end="")


add_command(app, "run", run.run, run.EXAMPLES)
add_command(app, "why", why.why, why.EXAMPLES)
add_command(app, "tune", tune.tune, tune.EXAMPLES)
add_command(app, "max-batch", max_batch.max_batch, max_batch.EXAMPLES)
add_command(app, "fits", fits.fits, fits.EXAMPLES)
add_command(app, "fit", max_batch.fit, max_batch.EXAMPLES, hidden=True)
add_command(app, "accuracy", accuracy.accuracy, accuracy.EXAMPLES)
add_command(app, "suite", suite.suite, suite.EXAMPLES)
add_command(app, "report", report.report, report.EXAMPLES)
add_command(app, "compare", compare.compare, compare.EXAMPLES)
add_command(app, "export", export.export, export.EXAMPLES)
add_command(app, "merge", merge.merge, merge.EXAMPLES)
add_command(app, "share", share.share, share.EXAMPLES)


@app.command(cls=HelpCommand)
def init(file: Annotated[Path, typer.Argument(help="The file to write, such as my_bench.py.")]) -> None:
    """Write a commented file that measures a model of your own, to start from; it runs as it is."""
    from castwise.cli.init_template import write_starter

    write_starter(file)
    print(printable(f"Wrote {file}. It runs as it is: castwise run {file}"))


@app.command("list", cls=HelpCommand)
def list_(
    what: Annotated[
        Listing | None, typer.Argument(help="What to list. Without it: everything.", case_sensitive=False)
    ] = None,
) -> None:
    """List workloads, precisions, techniques, gpus (their generations), devices (GPUs by name, peaks) or suites."""
    from castwise.cli import listings
    from castwise.show.console import result_console
    from castwise.show.presentation import print_parts

    console = result_console()
    for listing in Listing if what is None else [what]:
        print_parts(getattr(listings, listing.value)(), console)
        if what is None:
            console.print()


@app.command(cls=HelpCommand)
def doctor() -> None:
    """Show GPU, driver, torch and TF32 state, which precisions this machine has, and who else uses the GPU."""
    from castwise.cli.doctor import doctor as examine

    raise typer.Exit(examine())


def main() -> NoReturn:
    """Run the command line; every error in what was typed, or raised on purpose, is one line and an exit code."""
    prepare_streams()
    with suppress(ValueError, OSError):  # stderr is closed
        faulthandler.enable()  # if a library crashes, Python's lines that called it are printed
    try:
        # Also as `python -m castwise`: what its help shows can be typed.
        code = app(prog_name="castwise", standalone_mode=False)
        check_stdout()
    except CastwiseError as error:
        _exit(str(error), error.exit_code)
    except _PARSING_ERROR as error:
        _exit(_parsing_line(error), error.exit_code)
    except BrokenPipeError:
        raise
    except OSError as error:
        _exit(_system_line(error), StoreError.exit_code)
    except RuntimeError as error:
        if "start new thread" not in str(error):  # Source: CPython, Modules/_threadmodule.c
            raise
        _exit("No further thread can be started. `ulimit -u` shows how many there may be.", EngineError.exit_code)
    sys.exit(code or 0)


def _exit(line: str, code: int) -> NoReturn:
    line = f"castwise: {shortened(line)}"
    if sys.stderr.isatty():
        line = wrap(line, shutil.get_terminal_size().columns)
    print(line, file=sys.stderr)
    sys.exit(code)


def _system_line(error: OSError) -> str:
    """Return what the system refused."""
    try:
        Path.cwd()
    except OSError:
        return "The present folder does not exist any more. Change to another one."
    named = "" if error.filename is None else f"'{error.filename}': "
    return f"{named}{error.strerror or error}."


def _parsing_line(error: Any) -> str:
    """Return what was wrong, and which help says more."""
    # Some versions put the words of pydantic's own errors before theirs.
    message = " ".join(error.format_message().replace("Value error, ", "").split())
    if near := getattr(error, "possibilities", None):  # the nearest first; the message has them by the alphabet
        message = f"{error.message}. Did you mean {near[0]}?"
    if not message.endswith((".", "?")):
        message += "."
    if message == "Missing argument 'WORKLOAD'.":
        message = f"{message[:-1]}, as in: {' '.join(error.ctx.command.epilog.split()[1:4])}."
    return message if error.ctx is None else f"{message} `{error.ctx.command_path} --help` says what there is."
