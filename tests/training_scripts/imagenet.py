"""In the style of PyTorch's ImageNet example on fake data: batch norm, momentum, a loader with a worker."""

import torch
from by_hand import args, autocast, grad_scaler, log
from torch import nn
from torch.utils.data import DataLoader, Dataset


class FakeImages(Dataset):
    def __len__(self):
        return args.steps * 4

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=generator), index % 5


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scaler = grad_scaler()
    model.train()
    for images, target in DataLoader(FakeImages(), batch_size=4, shuffle=True, num_workers=1):
        with autocast():
            loss = criterion(model(images), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log(loss)


if __name__ == "__main__":
    main()
