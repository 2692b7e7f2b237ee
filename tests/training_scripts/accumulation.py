"""Gradient accumulation that ends a step every third batch of a loader, with clipping by value and by norm."""

import torch
from by_hand import args, autocast, grad_scaler, log
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
model = nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
scaler = grad_scaler()
data = TensorDataset(torch.randint(30, (args.steps * 6, 6)), torch.randint(2, (args.steps * 6,)))
for index, (words, labels) in enumerate(DataLoader(data, batch_size=2)):
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
