"""Two models with an optimizer each, in turn, as in PyTorch's DCGAN example."""

import torch
from by_hand import SAMPLES, More, args, autocast, grad_scaler, log, moved
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
n = args.size
generator = nn.Sequential(nn.Linear(6, 16 * n), nn.ReLU(), More(16 * n), nn.Linear(16 * n, 10 * n)).to(args.device)
critic = nn.Sequential(nn.Linear(10 * n, 16 * n), nn.LeakyReLU(0.2), More(16 * n), nn.Linear(16 * n, 1)).to(args.device)
criterion = nn.BCEWithLogitsLoss()
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3 / n, betas=(0.5, 0.999))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3 / n, betas=(0.5, 0.999))
scaler = grad_scaler()
batch = 4 * SAMPLES
for (real,) in moved(DataLoader(TensorDataset(torch.randn(args.steps * batch, 10 * n)), batch_size=batch)):
    ones, zeros = torch.ones(batch, 1).to(args.device), torch.zeros(batch, 1).to(args.device)
    critic.zero_grad()
    with autocast():
        loss_real = criterion(critic(real), ones)
    scaler.scale(loss_real).backward()
    with autocast():
        fake = generator(torch.randn(batch, 6).to(args.device))
        loss_fake = criterion(critic(fake.detach()), zeros)
    scaler.scale(loss_fake).backward()
    scaler.step(of_critic)
    generator.zero_grad()
    with autocast():
        loss_generator = criterion(critic(fake), ones)
    scaler.scale(loss_generator).backward()
    scaler.step(of_generator)
    scaler.update()
    log(loss_real, loss_fake, loss_generator)
