"""Clips and guards gradients by code of its own, after unscale_.

Without fp16 --way late leaves that out, and --way none does not use its scaler at all.
"""

import torch
from case import STEPS, amp, args, batch, grad_scaler, log
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), grad_scaler()
for step in STEPS:
    x, y = batch()
    for part in (x[:8], x[8:]):
        with amp():
            loss = nn.functional.mse_loss(model(part), y[: len(part)])
        (loss if args.way == "none" and args.amp != "fp16" else scaler.scale(loss)).backward()
    if args.way != "late" or args.amp == "fp16":
        scaler.unscale_(optimizer)
    for weight in model.parameters():
        size, limit = weight.grad.norm(), 0.05 * weight.detach().norm()
        if size > limit:
            weight.grad.mul_(limit / size)
    if torch.stack([weight.grad.norm() for weight in model.parameters()]).norm() < 10:  # a guard
        if args.way == "none" and args.amp != "fp16":
            optimizer.step()
        else:
            scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    log(loss)
