"""Has no AMP unless --amp is given, which is then around forward and loss, with unscale_ where gradients are read.

With --way hook it clips them by hooks on its weights. With --way replaced it puts others in their places, infinite ones
once. With --way function a part is a function that keeps its inputs in float32 within autocast.
"""

from contextlib import nullcontext

import torch
from case import STEPS, Exact, amp, args, batch, is_on, log
from torch import nn


class Decoder(nn.Linear):
    def forward(self, x):
        return Exact.apply(x, self.weight.T) if args.way == "function" else super().forward(x)


torch.manual_seed(0)
encoder, decoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), Decoder(16, 1, bias=args.way != "function")
optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
scaler = torch.amp.GradScaler(args.device) if args.amp == "fp16" else None
weights = [*encoder.parameters(), *decoder.parameters()]


def clip_in_backward(gradient):
    scale = 1 if scaler is None else scaler.get_scale()
    return (gradient / scale).clamp(-0.01, 0.01) * scale


for weight in weights if args.way == "hook" else ():
    weight.register_hook(clip_in_backward)
for step in STEPS:
    x, y = batch()
    with amp() if is_on else nullcontext():
        loss = nn.functional.smooth_l1_loss(decoder(encoder(x)), y)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler and args.way != "replaced":  # else its step unscales and checks what is there by then
        scaler.unscale_(optimizer)
    for weight in weights if args.way == "" else ():
        weight.grad.clamp_(-0.01, 0.01)
    if args.way == "replaced":
        for weight in weights:
            weight.grad = weight.grad.clone()
            if step == 2:
                weight.grad.div_(0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    if step == 3:
        with torch.no_grad():
            print("evaluates", decoder.eval()(encoder.eval()(x)).dtype)
        decoder.train(), encoder.train()
    log(loss)
