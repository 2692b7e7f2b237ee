"""`castwise max-batch`, and `castwise fit`, its former name."""

import sys

from castwise.cli.options import PrintOptions
from castwise.max_batch.options import MaxBatchOptions

EXAMPLES = """\
Examples:

    castwise max-batch resnet50            the largest batch of every precision
    castwise max-batch train_me.py:build   a model of your own
    castwise max-batch mnist-cnn --memory 500MiB      on a CPU, within a limit
    castwise max-batch resnet50 --memory 8GiB --margin 5%    5 % of it stay free
    castwise max-batch resnet50 --precision fp32,bf16-mixed --exact
    castwise max-batch gpt2 --techniques none,activation-checkpointing
"""


def max_batch(options: MaxBatchOptions, output: PrintOptions) -> int:
    """Find the largest batch that trains, by training on it; and what throughput, memory and energy are below it."""
    from castwise.cli.measuring import FAILED, measuring, next_step, say_logs, search
    from castwise.cli.output import show
    from castwise.errors import UsageError
    from castwise.max_batch.render import present, raise_if_nothing_fits
    from castwise.max_batch.search import prepare_max_batch
    from castwise.show.units import format_duration

    with measuring(options, output) as progress:
        _, found = search(options, progress, prepare_max_batch)
        if not found.trials:
            raise UsageError(f"A --budget of {format_duration(options.budget_seconds or 0.0)} ended before any trial.")
        if output.verbose:
            say_logs([trial for trial in found.trials if trial.status != "oom"])
        raise_if_nothing_fits(found.max_batches)
        is_long = output.format == "markdown"
        shown = present(found, wide=output.wide or is_long, verbose=output.verbose or is_long)
        show(output.format, shown, next_step(options.results, len(found.trials)))
        if found.ending == "interrupted":
            raise KeyboardInterrupt
    # That float16 without masters diverges, or that a batch does not fit, is what a search is there to find out.
    failed = any(trial.status in ("crashed", "timeout") for trial in found.trials)
    return FAILED if failed or not any(loop.largest for loop in found.max_batches) else 0


def fit(options: MaxBatchOptions, output: PrintOptions) -> int:
    """Find the largest batch that trains: the former name of `castwise max-batch`."""
    print("`castwise fit` is `castwise max-batch` now; the old name still works.", file=sys.stderr)
    return max_batch(options, output)
