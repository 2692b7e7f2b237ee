"""Train a wide network with bitsandbytes' AdamW, whose state has 8 bits."""

import bitsandbytes
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)], nn.Linear(2048, 100))
model.cuda()
optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-4)
for _ in range(2000):
    inputs, targets = torch.randn(2048, 2048, device="cuda"), torch.randint(100, (2048,), device="cuda")
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
