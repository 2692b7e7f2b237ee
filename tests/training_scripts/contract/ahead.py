"""Lookahead: every third step weights are set half way back to slow copies. By hand masters are another model."""

import copy

import torch
from case import STEPS, args, batch, log
from torch import nn


class Lookahead:
    def __init__(self, base):
        self.base, self.count = base, 0
        self.weights = base.param_groups[0]["params"]
        self.slow = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            for slow, weight in zip(self.slow, self.weights, strict=True):
                slow.add_(0.5 * (weight - slow))
                weight.data.copy_(slow) if args.way == "data" else weight.copy_(slow)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer, low = Lookahead(torch.optim.SGD(model.parameters(), lr=0.3)), None
for _ in range(2 * len(STEPS)):
    x, y = batch()
    loss = nn.functional.mse_loss(low(x.bfloat16()).float() if low else model(x), y)
    optimizer.base.zero_grad()
    loss.backward()
    if low:
        for master, weight in zip(model.parameters(), low.parameters(), strict=True):
            master.grad = weight.grad.float()
    optimizer.step()
    if args.amp == "bf16":
        low = copy.deepcopy(model).bfloat16()
    log(loss)
