"""In the style of PyTorch's MNIST example: epochs, a loader, and a test after each."""

import torch
import torch.nn.functional as F
from by_hand import SAMPLES, More, args, autocast, grad_scaler, log, moved
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

n = args.size


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4 * n, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(4 * n * 5 * 5, 16 * n)
        self.more, self.fc2 = More(16 * n), nn.Linear(16 * n, 10)

    def forward(self, x):
        x = self.dropout(F.max_pool2d(F.relu(self.conv(x)), 2))
        return F.log_softmax(self.fc2(self.more(F.relu(self.fc1(torch.flatten(x, 1))))), dim=1)


def train(model, loader, optimizer, scaler):
    model.train()
    for data, target in moved(loader):
        optimizer.zero_grad()
        with autocast():
            loss = F.nll_loss(model(data), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log(loss)


def test(model, loader):
    model.eval()
    with torch.no_grad():
        return sum(F.nll_loss(model(data), target, reduction="sum").item() for data, target in moved(loader))


def main():
    torch.manual_seed(1)
    images = TensorDataset(torch.randn(32 * SAMPLES, 1, 12, 12), torch.randint(10, (32 * SAMPLES,)))
    loader = DataLoader(images, batch_size=8 * SAMPLES, shuffle=True)
    model, scaler = Net().to(args.device), grad_scaler()
    optimizer = optim.Adadelta(model.parameters(), lr=0.5 / n)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(args.steps // 4):
        train(model, loader, optimizer, scaler)
        test(model, loader)
        scheduler.step()


if __name__ == "__main__":
    main()
