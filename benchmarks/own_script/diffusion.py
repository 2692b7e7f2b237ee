"""Train a diffusion model on random images: an ordinary script, in PyTorch's default precision, that knows no castwise.

python diffusion.py --width 64 --size 64 --batch-size 64
"""

import argparse
import copy
import math

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, inputs, outputs, attends):
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv_1, self.conv_2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.skip = nn.Linear(4 * args.width, outputs), nn.Conv2d(inputs, outputs, 1)
        self.qkv, self.out = (nn.Linear(outputs, 3 * outputs), nn.Linear(outputs, outputs)) if attends else (None, None)

    def forward(self, x, time):
        h = self.conv_1(functional.silu(self.norm_1(x))) + self.time(time)[:, :, None, None]
        x = self.skip(x) + self.conv_2(functional.silu(self.norm_2(h)))
        if self.qkv is None:
            return x
        q, k, v = self.qkv(x.flatten(2).mT).unflatten(2, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        attended = self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + attended.mT.unflatten(2, x.shape[2:])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [args.width * factor for factor in (1, 2, 4)]
        self.time = nn.Sequential(
            nn.Linear(args.width, 4 * args.width), nn.SiLU(), nn.Linear(4 * args.width, 4 * args.width)
        )
        self.first, self.last = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.down = nn.ModuleList(
            Residual(a, b, b == widths[-1]) for a, b in zip([widths[0], *widths], widths, strict=False)
        )
        self.middle = Residual(widths[-1], widths[-1], True)
        self.up = nn.ModuleList(Residual(2 * b, a, False) for a, b in zip([widths[0], *widths], widths, strict=False))

    def forward(self, x, time):
        angles = time[:, None] * torch.exp(-math.log(10_000) * torch.linspace(0, 1, args.width // 2, device=x.device))
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in reversed(self.up):
            x = functional.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, kept.pop()], 1), time)
        return self.last(x)


def main():
    torch.manual_seed(0)
    model = UNet().to(args.device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    kept = torch.cos(torch.linspace(0, math.pi / 2, 1000, device=args.device))  # of an image at each time
    for step in range(args.steps):
        images = torch.randn(args.batch_size, 3, args.size, args.size, device=args.device)
        times, noise = torch.randint(1000, (args.batch_size,), device=args.device), torch.randn_like(images)
        share = kept[times, None, None, None]
        loss = functional.mse_loss(model(share * images + (1 - share**2).sqrt() * noise, times.float()), noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1e-3)
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
