"""What the scripts here share: their arguments, autocast and loss scaling as they are written by hand, and a log.

`--size` multiplies widths, and batches as long as their samples take the CPU little time, and `--depth` adds layers, so
that a GPU has something to do. With `--times` lines of the log name the process and when they were written. But for the
first, nothing then waits for a loss, and only the lines that are named wait for the device.
"""

import argparse
import itertools
import os
import time
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--log", required=True)
parser.add_argument("--amp", choices=("none", "bf16", "fp16"), default="none")
parser.add_argument("--device", default="cpu")
parser.add_argument("--size", type=int, default=1)
parser.add_argument("--depth", type=int, default=0)
parser.add_argument("--times", type=int, nargs="*", metavar="LINE")
args, _ = parser.parse_known_args()

NUM_LOSSES = 32  # of a log with times
SAMPLES = min(args.size, 32)  # by which a batch of single samples is multiplied
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast():
    return nullcontext() if args.amp == "none" else torch.autocast(args.device, dtype=DTYPES[args.amp])


def grad_scaler():
    return torch.amp.GradScaler(args.device, enabled=args.amp == "fp16")


def moved(batches):
    """Yield batches on the device."""
    for batch in batches:
        yield [part.to(args.device) for part in batch]


class More(nn.Module):
    """As many residual layers as --depth says, which keep the shape."""

    def __init__(self, width, kernel_size=None):
        super().__init__()
        shape = (width, width) if kernel_size is None else (width, width, kernel_size)
        kind = nn.Linear if kernel_size is None else partial(nn.Conv2d, padding="same")
        self.layers = nn.ModuleList(kind(*shape) for _ in range(args.depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x)) / args.depth
        return x


counted = itertools.count()


def log(*losses):
    if os.environ.get("RANK", "0") != "0":
        return
    line = next(counted)
    with open(args.log, "a") as file:
        if args.times is not None:
            if line in args.times and args.device == "cuda":
                torch.cuda.synchronize()
            print(os.getpid(), time.perf_counter(), file=file, end=" ")
        has_losses = args.times is None or line < NUM_LOSSES
        print(*([loss.item() for loss in losses] if has_losses else []), file=file)
