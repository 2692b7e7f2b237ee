"""Computes beside its model: before it trains, after spectral norm's first call, and between the model's calls.

By hand autocast is around the model's calls alone.
"""

import torch
from case import STEPS, amp, batch, grad_scaler, log
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(0)
critic = nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(), nn.Linear(16, 1))
critic(torch.randn(2, 8))  # a dummy pass
before = (torch.eye(8) @ torch.eye(8)).dtype
optimizer, scaler = torch.optim.Adam(critic.parameters(), lr=1e-2), grad_scaler()
critic.eval()
with torch.no_grad():
    critic(torch.ones(2, 8))
critic.train()
for _ in STEPS:
    x, y = batch()
    total = 0
    for _ in range(2):
        with amp():
            score = critic(x)
        score = score.float()
        x = x @ torch.eye(8) * 0.9  # the simulator
        total = total + nn.functional.softplus(-y * score).mean()
    optimizer.zero_grad()
    scaler.scale(total).backward()
    scaler.step(optimizer)
    scaler.update()
    log(total, before, x.dtype)
