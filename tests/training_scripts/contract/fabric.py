"""Lets Fabric take the model, in Fabric's own mixed precision if --amp is bf16: it casts the inputs to that, too."""

import torch
from case import STEPS, args, batch, log
from lightning.fabric import Fabric
from torch import nn

torch.manual_seed(0)
fabric = Fabric(accelerator=args.device, devices=1, precision="bf16-mixed" if args.amp == "bf16" else "32-true")
model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for _ in STEPS:
    x, y = batch()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
    log(loss)
