"""`castwise fits`."""

from castwise.cli.options import PrintOptions
from castwise.fits.options import FitsOptions

EXAMPLES = """\
Examples:

    castwise fits resnet50                              on some usual GPUs
    castwise fits train_me.py:build --gpu "RTX 4090,L4,H100"
    castwise fits --gpu "L4,H100" -- python train.py    your training script as it is
    castwise fits gpt2 --gpu A100 --batch-size 64 --precision bf16-mixed
    castwise fits gpt2 --precision bf16-mixed --optimizer-state fp32,8-bit
"""


def fits(options: FitsOptions, output: PrintOptions) -> int:
    """Predict without a GPU what a training step takes on GPUs, whether it fits, and the largest batch."""
    from castwise.cli.measuring import looking
    from castwise.cli.output import show
    from castwise.fits.predict import predict
    from castwise.fits.render import present

    with looking() as progress:
        found = predict(options, on_note=progress.remark, on_log=progress.remark if output.verbose else None)
    show(output.format, present(found, wide=output.wide or output.format == "markdown"))
    return 0
