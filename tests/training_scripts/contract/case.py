"""What the cases share: their arguments, random batches, and a log of a line a step."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--log", required=True)
parser.add_argument("--amp", choices=("none", "tf32", "bf16", "fp16"), default="none")
parser.add_argument("--way", default="", help="a variant of the case")
parser.add_argument("--device", default="cpu")
args = parser.parse_args()
torch.set_default_device(args.device)

STEPS = range(6)
torch.backends.cuda.matmul.allow_tf32 = args.amp == "tf32"
is_on = args.amp in ("bf16", "fp16")
dtype = torch.float16 if args.amp == "fp16" else torch.bfloat16
random = torch.Generator("cpu").manual_seed(1)


class Exact(torch.autograd.Function):
    """Keeps its inputs in float32 within autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type=args.device, cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type=args.device)
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


def amp(on=is_on):
    return torch.autocast(args.device, dtype=dtype, enabled=on)


def grad_scaler():
    return torch.amp.GradScaler(args.device, enabled=args.amp == "fp16")


def batch():
    x = torch.randn(16, 8, generator=random, device="cpu").to(args.device)
    return x, (3 * x[:, :2]).sum(1, keepdim=True).sin()


def log(*values):
    with open(args.log, "a") as file:
        print(*(value.item() if isinstance(value, torch.Tensor) else value for value in values), file=file)
