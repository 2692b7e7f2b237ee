"""A training loop as one writes it by hand; it imports nothing of castwise. `against_plain.py` starts it.

    python benchmarks/plain_loop.py WORKLOAD PRECISION SECONDS

WORKLOAD is resnet50 or wrn-28-10, with the batch size and the optimizer of castwise's workload of that name. Prints one
line of JSON: images per second over the timed steps, the number of steps, and the last loss.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional

AUTOCAST = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class WideBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(before), nn.Conv2d(before, width, 3, padding=1)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, stride, 1)
        self.skip = nn.Conv2d(before, width, 1, stride) if stride > 1 or before != width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(self.conv1(functional.relu(self.bn1(x))), 0.3, self.training)
        return self.conv2(functional.relu(self.bn2(y))) + self.skip(x)


def wide_resnet() -> nn.Module:
    widths, layers = [16, 160, 320, 640], [nn.Conv2d(3, 16, 3, padding=1)]
    for before, width, stride in zip(widths, widths[1:], (1, 2, 2), strict=False):
        layers += [WideBlock(before, width, stride), *(WideBlock(width, width, 1) for _ in range(3))]
    return nn.Sequential(*layers, nn.BatchNorm2d(640), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(640, 10))


def resnet50() -> nn.Module:
    from torchvision.models import resnet50 as model

    return model()


def main() -> None:
    workload, precision, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    torch.manual_seed(0)
    if workload == "resnet50":
        model, batch_size, side, classes = resnet50().cuda(), 256, 224, 1000
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, weight_decay=1e-5)
    else:
        model, batch_size, side, classes = wide_resnet().cuda(), 128, 32, 10
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    if precision == "fp32":
        torch.backends.cudnn.allow_tf32 = False
    elif precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    images = [torch.randn(batch_size, 3, side, side, device="cuda") for _ in range(2)]
    labels = [torch.randint(classes, (batch_size,), device="cuda") for _ in range(2)]
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16-mixed")

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        half = AUTOCAST.get(precision)
        with torch.autocast("cuda", dtype=half) if half else nullcontext():
            loss = functional.cross_entropy(model(images[number % 2]), labels[number % 2])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    def timed(steps: int, step: Callable[[int], torch.Tensor]) -> tuple[float, float]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for number in range(steps):
            loss = step(number)
        torch.cuda.synchronize()
        return time.perf_counter() - started, loss.item()

    timed(10, step)
    probe, _ = timed(10, step)
    steps = max(10, round(seconds * 10 / probe))
    elapsed, loss = timed(steps, step)
    print(json.dumps({"images_per_second": steps * batch_size / elapsed, "steps": steps, "loss": loss}))


if __name__ == "__main__":
    main()
