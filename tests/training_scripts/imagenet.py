"""In the style of PyTorch's ImageNet example on fake data: batch norm, momentum, a loader with a worker."""

import torch
from by_hand import More, args, autocast, grad_scaler, log, moved
from torch import nn
from torch.utils.data import DataLoader, Dataset

n = args.size


class FakeImages(Dataset):
    def __len__(self):
        return args.steps * 4 * n

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=generator), index % 5


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8 * n, 3, stride=2),
        nn.BatchNorm2d(8 * n),
        nn.ReLU(),
        More(8 * n, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * n, 5),
    ).to(args.device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1 / n, momentum=0.9, weight_decay=1e-4)
    scaler = grad_scaler()
    model.train()
    loader = DataLoader(FakeImages(), batch_size=4 * n, shuffle=True, num_workers=min(n, 8))
    for images, target in moved(loader):
        with autocast():
            loss = criterion(model(images), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log(loss)


if __name__ == "__main__":
    main()
