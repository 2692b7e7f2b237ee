"""Does what no precision from outside can be had with: the line that does is told."""

import sys

import torch
from case import STEPS, args, batch, log
from torch import nn


class OwnScaler(torch.amp.GradScaler):
    pass


class Net(nn.Linear):
    def forward(self, x):
        with torch.autocast(args.device, enabled=is_precise):
            return super().forward(x)


is_precise = "".startswith("x")
model = (Net if args.way == "switch" else nn.Linear)(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if args.way == "scaler":
    scaler = OwnScaler(args.device)
if args.way == "extension":
    torch._C.set_autocast_dtype(args.device, torch.bfloat16)
    torch._C.set_autocast_enabled(args.device, True)
if args.way == "ranks":
    torch.multiprocessing.spawn(sys.exit, nprocs=2)
for _ in STEPS:
    x, y = batch()
    loss = nn.functional.mse_loss(model(x), y)
    if args.way == "grad":
        loss = loss + torch.autograd.grad(loss, model.weight, create_graph=True)[0].square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log(loss)
