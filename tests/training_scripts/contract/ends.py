"""Ends its autocast before a loss that needs float32: in a block, a decorated forward, or a loop that never ends it."""

import torch
from case import STEPS, args, batch, dtype, grad_scaler, is_on, log
from torch import nn


class Net(nn.Sequential):
    @torch.autocast(args.device, dtype=dtype, enabled=is_on)
    def forward(self, x):
        return super().forward(x)


torch.manual_seed(0)
model = (Net if args.way == "decorated" else nn.Sequential)(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer, scaler = torch.optim.Adam(model.parameters(), lr=1e-2), grad_scaler()
if args.way in ("global", "entered"):
    torch.set_autocast_cache_enabled(False)
    if args.way == "entered":
        torch.autocast(args.device, dtype=dtype, enabled=is_on).__enter__()
    elif is_on:
        torch.set_autocast_dtype(args.device, dtype)
        torch.set_autocast_enabled(args.device, True)
for _ in STEPS:
    x, _y = batch()
    if args.way in ("global", "entered", "decorated"):
        z = model(x)
    else:
        with torch.autocast(args.device, dtype=dtype, enabled=is_on):
            z = model(x)
    z = nn.functional.normalize(z.float())
    gram = z.T @ z
    loss = -torch.linalg.slogdet(gram.float())[1]
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    log(loss, gram.dtype)
