"""What the cases share: their arguments, random batches, and a log of a line a step."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--log", required=True)
parser.add_argument("--amp", choices=("none", "bf16", "fp16"), default="none")
parser.add_argument("--way", default="", help="a variant of the case")
args = parser.parse_args()

STEPS = range(6)
is_on = args.amp != "none"
dtype = torch.float16 if args.amp == "fp16" else torch.bfloat16
random = torch.Generator().manual_seed(1)


class Exact(torch.autograd.Function):
    """Keeps its inputs in float32 within autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


def amp(on=is_on):
    return torch.autocast("cpu", dtype=dtype, enabled=on)


def grad_scaler():
    return torch.amp.GradScaler("cpu", enabled=args.amp == "fp16")


def batch():
    x = torch.randn(16, 8, generator=random)
    return x, (3 * x[:, :2]).sum(1, keepdim=True).sin()


def log(*values):
    with open(args.log, "a") as file:
        print(*(value.item() if isinstance(value, torch.Tensor) else value for value in values), file=file)
