"""Two models with an optimizer each, in turn, as in PyTorch's DCGAN example."""

import torch
from by_hand import args, autocast, grad_scaler, log
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
generator = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 10))
critic = nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
scaler = grad_scaler()
for (real,) in DataLoader(TensorDataset(torch.randn(args.steps * 4, 10)), batch_size=4):
    critic.zero_grad()
    with autocast():
        loss_real = criterion(critic(real), torch.ones(4, 1))
    scaler.scale(loss_real).backward()
    with autocast():
        fake = generator(torch.randn(4, 6))
        loss_fake = criterion(critic(fake.detach()), torch.zeros(4, 1))
    scaler.scale(loss_fake).backward()
    scaler.step(of_critic)
    generator.zero_grad()
    with autocast():
        loss_generator = criterion(critic(fake), torch.ones(4, 1))
    scaler.scale(loss_generator).backward()
    scaler.step(of_generator)
    scaler.update()
    log(loss_real, loss_fake, loss_generator)
