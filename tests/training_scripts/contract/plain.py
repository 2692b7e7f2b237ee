"""Has no AMP unless --amp is given, which is then around forward and loss, with unscale_ where gradients are read.

With --way hook it clips them by hooks on its weights.
"""

from contextlib import nullcontext

import torch
from case import STEPS, amp, args, batch, is_on, log
from torch import nn

torch.manual_seed(0)
encoder, decoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 1)
optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
scaler = torch.amp.GradScaler("cpu") if args.amp == "fp16" else None
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
    if scaler:
        scaler.unscale_(optimizer)
    for weight in weights if args.way == "" else ():
        weight.grad.clamp_(-0.01, 0.01)
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
