"""What the scripts here share: their arguments, autocast and loss scaling as they are written by hand, and a log.

`--size` multiplies widths and batches, and `--times` adds to each line of the log when it was written.
"""

import argparse
import os
import time
from contextlib import nullcontext

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--log", required=True)
parser.add_argument("--amp", choices=("none", "bf16", "fp16"), default="none")
parser.add_argument("--device", default="cpu")
parser.add_argument("--size", type=int, default=1)
parser.add_argument("--times", action="store_true")
args, _ = parser.parse_known_args()

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast():
    return nullcontext() if args.amp == "none" else torch.autocast(args.device, dtype=DTYPES[args.amp])


def grad_scaler():
    return torch.amp.GradScaler(args.device, enabled=args.amp == "fp16")


def moved(batches):
    """Yield batches on the device."""
    for batch in batches:
        yield [part.to(args.device) for part in batch]


def log(*losses):
    if os.environ.get("RANK", "0") != "0":
        return
    with open(args.log, "a") as file:
        values = [loss.item() for loss in losses]
        print(*values, *([time.perf_counter()] if args.times else []), file=file)
