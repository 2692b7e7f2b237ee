"""`castwise tune`."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from castwise.cli.options import PrintOptions
from castwise.spec.options import Option
from castwise.tune.options import TuneOptions

if TYPE_CHECKING:
    from castwise.orchestrator.job import Job
    from castwise.tune.result import TuningResult

EXAMPLES = """\
Examples:

    castwise tune mnist-cnn                   from the plain loop to the fastest
    castwise tune train_me.py:build           a model of your own
    castwise tune -- python train.py          your training script as it is
    castwise tune resnet50 --memory 8GiB      and the fastest that fits into 8 GiB
    castwise tune resnet50 --emit train.py    and the winner as a script
    castwise tune lstm-lm --allow shape       changes to the model, too
    castwise tune mnist-cnn --data-set mnist  whole epochs, as in its suite
    castwise tune lstm-lm --precision fp32,tf32,bf16-mixed --budget 5min
    castwise tune resnet50 --emit patch       what to change in your loop
"""


@dataclass(frozen=True, kw_only=True)
class TunePrintOptions(PrintOptions):
    emit: Annotated[
        Path | None,
        Option(
            "Write the fastest loop, the one within --memory if that is given, as a script in plain PyTorch, without "
            "castwise; `patch` prints what to change in your loop instead of the table.",
            "Output",
            metavar="FILE|patch",
        ),
    ] = None
    simple: Annotated[
        bool, Option("Emit the simplest loop that is at most 25 % slower than the fastest.", "Output")
    ] = False


_PATCH = Path("patch")


def tune(options: TuneOptions, output: TunePrintOptions) -> int:
    """Search from the plain loop for the fastest that computes the same, and say what each technique gains."""
    from castwise.accuracy.advice import accuracy_of
    from castwise.cli.measuring import FAILED, REPORT, measuring, next_step, say_logs, search
    from castwise.cli.output import show
    from castwise.errors import printable
    from castwise.spec.typed import read_line
    from castwise.spec.user_model import is_script
    from castwise.tune import render
    from castwise.tune.measurements import key_of
    from castwise.tune.search import prepare_tuning

    if output.emit is not None and output.emit != _PATCH:
        _check_emitted(options, output.emit)

    with measuring(options, output) as progress:
        job, found = search(options, progress, prepare_tuning)
        if found.chosen is not None and found.was_compared:
            typed = read_line(output.words, TuneOptions, TunePrintOptions)
            found = replace(found, accuracy=accuracy_of(job, found.measured.of(found.chosen), typed))
        emits_patch = output.emit == _PATCH and found.was_compared

        if emits_patch and output.format == "table":
            spec = found.simplest if output.simple else found.chosen
            if spec is not None:
                print(printable(f"{render.patch_summary(found, spec)}\n{render.patch(found, spec)}"), flush=True)
        else:
            command = REPORT
            if output.emit is None and found.was_compared and key_of(found.winner) != key_of(found.start):
                what = "patch" if is_script(options.workload) or found.start.world_size > 1 else "train.py"
                command = f"the same command with --emit {what}"
            elif found.ending == "budget":
                command = "the same command with a longer --budget"
            shown = render.present(found, wide=output.wide, verbose=output.verbose)
            show(output.format, shown, next_step(options.results, len(found.trials), command))
        if output.verbose:
            say_logs(found.trials)
        if found.ending == "interrupted":
            raise KeyboardInterrupt
    if found.ending == "failed":
        return FAILED
    # That a technique fails is what a search is there to find out.
    if output.emit in (None, _PATCH):
        return 0
    return _write_script(output.emit, job, found, options, simple=output.simple)


def _check_emitted(options: TuneOptions, emit: Path) -> None:
    """Raise UsageError if no script can be written of what is searched."""
    from castwise.emit.script import check_script
    from castwise.errors import UsageError, file_exists
    from castwise.spec.user_model import is_script
    from castwise.tune.render import MEASURED
    from castwise.tune.search import source_of

    if is_script(options.workload):
        raise UsageError("Your script stays as it is: --emit patch prints what to change in it.")
    if (options.num_gpus or 1) > 1:
        raise UsageError("A script is of one GPU: --emit patch prints what to change in a loop on several.")
    if emit.is_file() and MEASURED not in emit.read_text(errors="replace"):
        raise file_exists(emit)
    data_set, recipe = source_of(options) or (options.data_set or "synthetic", None)
    check_script(options.workload, data_set, recipe, emit)


def _write_script(file: Path, job: "Job", found: "TuningResult", options: TuneOptions, *, simple: bool) -> int:
    """Write the loop that was asked for as a script, the one that fits if there is a limit; return the exit code."""
    from castwise.cli.measuring import FAILED
    from castwise.emit.script import script_of
    from castwise.report.files import atomic_write
    from castwise.spec.quantities import format_bytes
    from castwise.spec.user_model import locate
    from castwise.tune.measurements import key_of
    from castwise.tune.render import measured_words

    limit = options.memory_bytes
    spec = found.simplest if simple else found.chosen
    which = f"the {'simplest' if simple else 'fastest'} loop"
    which += "" if limit is None else f" within {format_bytes(limit)}"
    if spec is None or not found.was_compared:
        why = "nothing was compared with the plain loop"
        if found.was_compared:
            why = f"no loop that was tried fits into {format_bytes(limit)}"
        print(f"{file} is not written: {why}.", file=sys.stderr)
        return FAILED
    if key_of(spec) == key_of(found.start):
        print(f"{file} is not written: {which} is the plain one. Keep yours.", file=sys.stderr)
        return 0
    measured = measured_words(found, spec)
    parts = None
    if spec.user_model is not None:  # records leave out the folder, which a script has to know
        spec = spec.model_copy(update={"user_model": locate(options.workload)})
        parts = job.user_workloads[options.workload].parts
    files = script_of(spec, file, measured, parts)
    for path, text in files.items():
        atomic_write(path, text.encode())
    print(f"{' and '.join(map(str, files))}: {which} as a script", file=sys.stderr)
    return 0
