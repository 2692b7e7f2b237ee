"""Has autocast of its own, and no GradScaler but in float16.

With --way checkpoint backward computes a layer again. With --way copies the optimizer has copies of the weights, which
get the gradients from the script.
"""

import torch
from case import STEPS, amp, args, batch, is_on, log
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
first, last = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 1)
weights = [*first.parameters(), *last.parameters()]
trained = [weight.detach().clone().requires_grad_() for weight in weights] if args.way == "copies" else weights
optimizer = torch.optim.AdamW(trained, lr=1e-2)
scaler = torch.amp.GradScaler(args.device) if args.amp == "fp16" else None
for _ in STEPS:
    x, y = batch()
    with amp(is_on):
        found = last(checkpoint(first, x, use_reentrant=False) if args.way == "checkpoint" else first(x))
        loss = nn.functional.mse_loss(found, y)
    for weight in weights:
        weight.grad = None
    (loss if scaler is None else scaler.scale(loss)).backward()
    if args.way == "copies":
        for copy, weight in zip(trained, weights, strict=True):
            copy.grad = weight.grad.clone()
    if scaler:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(trained, 0.1)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if args.way == "copies":
        with torch.no_grad():
            for copy, weight in zip(trained, weights, strict=True):
                weight.copy_(copy)
    log(loss)
