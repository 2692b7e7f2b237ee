"""`castwise why`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from castwise.cli.options import PrintOptions
from castwise.spec.options import Option, WhyOptions

if TYPE_CHECKING:
    from castwise.orchestrator.job import Job

EXAMPLES = """\
Examples:

    castwise why resnet50              five precisions, where the time goes
    castwise why resnet50 --precision fp32,bf16-mixed
    castwise why train_me.py:build     a model of your own
    castwise why -- python train.py    your training script as it is
    castwise why resnet50 --precision bf16-mixed --techniques none,channels-last
    castwise why lstm-lm --precision bf16-mixed --kernels
    castwise why lstm-lm --precision bf16-mixed --trace trace.json
"""


@dataclass(frozen=True, kw_only=True)
class WhyPrintOptions(PrintOptions):
    format: Annotated[Literal["table", "json", "markdown"], Option("How results are printed on stdout.", "Output")] = (
        "table"
    )
    kernels: Annotated[bool, Option("Print the kernels and the modules that take longest.", "Output")] = False


def why(options: WhyOptions, output: WhyPrintOptions) -> int:
    """Say why a precision is no faster: where the time of a step goes, what takes it, and what to try."""
    from castwise.analysis.causes import diagnose, left_out_of
    from castwise.analysis.result_table import rows_of_steps
    from castwise.cli.measuring import announce_notes, exit_code, measuring, say_logs, search
    from castwise.cli.output import show
    from castwise.orchestrator.job import prepare_profiles, profile_outlook
    from castwise.show.why_report import present
    from castwise.spec.typed import read_line

    def announce(job: "Job") -> None:
        announce_notes(job)
        progress.known(job.recorded.values())

    with measuring(options, output) as progress:
        job, trials = search(options, progress, prepare_profiles, announce, outlook=profile_outlook(options))
    typed = read_line(output.words, WhyOptions, WhyPrintOptions)
    found = diagnose(rows_of_steps(trials), typed=typed)
    left_out = left_out_of(job.specs, trials, options.precisions or ())
    if output.verbose:
        say_logs(trials)
    verbose = output.verbose or output.format == "markdown"
    show(output.format, present(found, left_out, kernels=output.kernels, verbose=verbose))
    return exit_code(trials)
