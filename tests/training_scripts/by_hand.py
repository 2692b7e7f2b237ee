"""What the scripts here share: their arguments, autocast and loss scaling as they are written by hand, and a log."""

import argparse
import os
from contextlib import nullcontext

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--log", required=True)
parser.add_argument("--amp", choices=("none", "bf16", "fp16"), default="none")
args, _ = parser.parse_known_args()

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast():
    return nullcontext() if args.amp == "none" else torch.autocast("cpu", dtype=DTYPES[args.amp])


def grad_scaler():
    return torch.amp.GradScaler("cpu", enabled=args.amp == "fp16")


def log(*losses):
    if os.environ.get("RANK", "0") != "0":
        return
    with open(args.log, "a") as file:
        print(*(loss.item() for loss in losses), file=file)
