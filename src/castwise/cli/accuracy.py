"""`castwise accuracy`."""

from dataclasses import replace

from castwise.accuracy.options import AccuracyOptions
from castwise.cli.options import PrintOptions

EXAMPLES = """\
Examples:

    castwise accuracy mnist-cnn                     four precisions, up to 12 seeds
    castwise accuracy wrn-28-10 --techniques tuned --precision fp32,bf16-mixed
    castwise accuracy lstm-lm --margin 1% --budget 10min
    castwise accuracy mnist-cnn --seeds 30          more seeds, if 12 do not decide
"""


def accuracy(options: AccuracyOptions, output: PrintOptions) -> int:
    """Train pairs of runs on real data, and say in which precision the model becomes as good."""
    from castwise.accuracy.render import present
    from castwise.accuracy.search import prepare_accuracy
    from castwise.cli.measuring import FAILED, measuring, next_step, say_logs, search
    from castwise.cli.output import show
    from castwise.spec.typed import read_line

    with measuring(options, output) as progress:
        _, found = search(options, progress, prepare_accuracy)
    found = replace(found, typed=read_line(output.words, AccuracyOptions, PrintOptions))
    if output.verbose:
        say_logs(found.trials)
    show(output.format, present(found, wide=output.wide), next_step(options.results, len(found.trials)))
    # That a precision diverges is what the command is there to find out; without a baseline it finds out nothing.
    return FAILED if found.baseline.mean is None or any(runs.failed is not None for runs in found.runs) else 0
