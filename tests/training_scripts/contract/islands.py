"""Keeps a part in float32 by autocast: its dtype, a helper, the old switch, a generator, or a cast of a function.

With --way other it keeps that part in bfloat16.
"""

from contextlib import contextmanager

import torch
from case import STEPS, Exact, amp, args, batch, grad_scaler, log
from torch import nn

seen = []


@contextmanager
def switched_off():
    was_on = torch.is_autocast_enabled(args.device)
    torch.set_autocast_enabled(args.device, False)
    yield
    torch.set_autocast_enabled(args.device, was_on)


@contextmanager
def generated(on):
    with amp(on):
        yield


def island():
    if args.way == "dtype":
        return torch.autocast(args.device, dtype=torch.float32)
    if args.way == "switch":
        return switched_off()
    if args.way == "other":
        return torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.amp != "none")
    return {"helper": amp, "generator": generated}.get(args.way, amp)(False)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.into, self.out = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x):
        if args.way == "function":
            e = Exact.apply(x.sin(), self.time.weight.T)
        else:
            with island():
                e = self.time(x.sin())
        seen.append(e.dtype)
        return self.out(torch.relu(self.into(x)) * e)


torch.manual_seed(0)
model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = grad_scaler() if args.amp == "fp16" else None
for _ in STEPS:
    x, y = batch()
    with amp():
        loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    log(loss, seen[-1] == torch.float32)
