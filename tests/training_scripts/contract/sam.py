"""Sharpness-aware minimisation: two optimizers hold the same weights, and read gradients between two backwards."""

import torch
from case import STEPS, amp, args, batch, log
from torch import nn

scale = 65536.0 if args.amp == "fp16" else 1.0


class SharpnessAware(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        weights = self.param_groups[0]["params"]
        factor = 0.05 / torch.stack([each.grad.norm() for each in weights]).norm()
        self.before = [each.detach().clone() for each in weights]
        for weight in weights:
            weight.add_(weight.grad * factor)
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for weight, before in zip(self.param_groups[0]["params"], self.before, strict=True):
            weight.copy_(before)
        self.base.step()
        self.zero_grad()


def backward(x, y):
    with amp():
        loss = nn.functional.mse_loss(model(x), y)
    (loss * scale).backward()
    for weight in model.parameters():
        weight.grad = weight.grad / scale
    return loss


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = SharpnessAware(model.parameters(), lr=0.1)
for step in STEPS:
    x, y = batch()
    if args.way == "overflow" and step == 3:
        y *= 1e6
    loss = backward(x, y)
    optimizer.climb()
    backward(x, y)
    if args.way == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.descend()
    log(loss)
