# precision: fp16-mixed
# expected: grouped-convolutions
# because: 31x31 depthwise convolutions run in slow direct kernels without Tensor Cores in any precision and take most of the step.
# after: pytorch/pytorch#18631
# flops: 3*4*(2*25088*128*961 + 2*25088*2*128*512) + 2*2*25088*192*128
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, C, DEPTH, K, RES, STEPS = (2, 16, 1, 7, 64, 3) if TINY else (32, 128, 4, 31, 224, 400)
torch.backends.cuda.matmul.allow_tf32 = True


class Block(nn.Module):
    def __init__(self, c, k):
        super().__init__()
        self.dw = nn.Conv2d(c, c, k, padding=k // 2, groups=c, bias=False)
        self.bn = nn.BatchNorm2d(c)
        self.up = nn.Conv2d(c, 4 * c, 1)
        self.down = nn.Conv2d(4 * c, c, 1)

    def forward(self, x):
        x = x + self.bn(self.dw(x))
        return x + self.down(F.gelu(self.up(x)))


model = nn.Sequential(
    nn.Conv2d(3, C, 8, stride=8),
    *[Block(C, K) for _ in range(DEPTH)],
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, 1000),
).to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=dev == "cuda")
images = [torch.randn(B, 3, RES, RES, device=dev) for _ in range(4)]
labels = [torch.randint(0, 1000, (B,), device=dev) for _ in range(4)]

for step in range(STEPS):
    x, y = images[step % 4], labels[step % 4]
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 100 == 0:
        print(step, loss.item())
