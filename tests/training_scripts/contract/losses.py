"""Has no AMP unless --amp is given, which is then around forward and loss: one of a class without weights.

With --way own the loss is a function of the script's, which castwise leaves in float32, as this does by hand.
"""

from contextlib import nullcontext

import torch
from case import STEPS, amp, args, batch, grad_scaler, is_on, log
from torch import nn


class Contrast(nn.Module):
    """A loss that compares each sample with each other, by a product."""

    def forward(self, found, *, wanted):
        return self.distance((found @ found.T).tanh(), wanted @ wanted.T)

    def distance(self, found, wanted):
        return (found - wanted).square().mean()


torch.manual_seed(0)
model, contrast = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), Contrast()
optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), grad_scaler()
for _ in STEPS:
    x, y = batch()
    with amp() if is_on else nullcontext():
        found = model(x)
        loss = None if args.way == "own" else contrast(found, wanted=y)
    if loss is None:
        loss = contrast.forward(found.float(), wanted=y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    log(loss)
