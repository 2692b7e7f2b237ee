"""Trains weights in 16 bits; by hand, with --way ending in wide, the same values in float32, loaded so.

The model has tied weights, a buffer, batch norm, an adapter on a layer that is frozen in 16 bits, and is evaluated
before it is trained. It gets 16 bits by conversion, with --way default by PyTorch's default, with --way late after its
optimizer is made. With --way kept the script unfreezes that layer later; with --way mixes types do not fit.
"""

import copy
import pickle
from contextlib import nullcontext

import torch
from case import STEPS, amp, args, batch, is_on, log
from torch import nn

way, _, wide = args.way.partition(" ")
low = torch.float16 if way == "half" else torch.bfloat16


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.adapter = nn.Linear(8, 16).requires_grad_(False), nn.Linear(8, 16)

    def forward(self, x):
        return self.frozen(x.to(self.frozen.weight.dtype)) + self.adapter(x.to(self.adapter.weight.dtype))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = Adapted() if way != "late" else nn.Linear(8, 16), nn.Linear(16, 16)
        self.norm, self.again, self.head = nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.again.weight = self.out.weight
        self.register_buffer("scale", torch.full((16,), 1.1))

    def forward(self, x, more=None):
        x = self.norm(self.into(x + more)) * self.scale
        if way == "default":
            x = x + torch.ones(16)
        if way == "mixes":
            x = x.bfloat16()
        return self.head(torch.tanh(self.again(torch.tanh(self.out(x)))))


torch.manual_seed(0)
if way == "default":
    torch.set_default_dtype(low)
model = Net()
if way not in ("late", "default"):
    model.to(low)
if wide and way != "late":
    for part in model.modules():
        if not isinstance(part, Adapted) and part is not getattr(model.into, "frozen", None):
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                tensor.data = tensor.data.float()
    torch.set_default_dtype(torch.float32)


def cast(x):
    return x.to(low).float() if wide else x.to(low)


if way != "late":
    with torch.no_grad():
        model.eval()(cast(torch.ones(2, 8)), more=cast(torch.ones(1)))
    model.train()
kind = torch.optim.Adagrad if way == "state" else torch.optim.AdamW
optimizer = kind(model.parameters(), lr=1e-2)
if way == "late":
    model.to(low)
    if wide:
        model.float()
averaged = copy.deepcopy(model)
scaler = torch.amp.GradScaler(args.device) if args.amp == "fp16" else None
for step in STEPS:
    x, y = batch()
    with amp() if is_on else nullcontext():
        z = model(cast(x), more=cast(torch.ones(1, dtype=torch.float32)))
        loss = nn.functional.mse_loss(z if is_on else z.float(), y)
    optimizer.zero_grad()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        for mean, weight in zip(averaged.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.1)
    with torch.no_grad():  # as a checkpoint of the whole model has it
        pickle.loads(pickle.dumps(copy.deepcopy(model)))(cast(x), more=cast(torch.ones(1)))
    if way == "kept" and step == 2:
        model.into.frozen.requires_grad_(True)
    log(loss, sum(weight.double().sum() for weight in averaged.parameters()))
