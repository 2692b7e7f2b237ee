"""Gradient accumulation that ends a step every third batch of a loader, with clipping by value and by norm."""

import torch
from by_hand import SAMPLES, More, args, autocast, grad_scaler, log, moved
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
n = args.size
model = nn.Sequential(
    nn.Embedding(30, 8 * n), nn.Flatten(), nn.Linear(48 * n, 16 * n), nn.Tanh(), More(16 * n), nn.Linear(16 * n, 2)
).to(args.device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3 / n)
scaler = grad_scaler()
count = args.steps * 6 * SAMPLES
data = TensorDataset(torch.randint(30, (count, 6)), torch.randint(2, (count,)))
for index, (words, labels) in enumerate(moved(DataLoader(data, batch_size=2 * SAMPLES))):
    with autocast():
        loss = nn.functional.cross_entropy(model(words), labels)
    scaler.scale(loss / 3).backward()
    log(loss)
    if (index + 1) % 3 == 0:
        scaler.unscale_(optimizer)
        clip_grad_value_(model.parameters(), 0.1)
        clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
