# no serious cause but memory-bound work (ResNet-50 in bf16 autocast and channels_last, batch 192: batch norm, ReLU and residual additions take about half the step; nothing is wrong)
# after: NVIDIA/apex#1445
# expected: none
# precision: as-written
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
torch.backends.cudnn.benchmark = True
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
def cbr(i, o, k, s=1): return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o))
class Bottleneck(nn.Module):
    def __init__(self, i, m, s):
        super().__init__()
        self.a, self.b, self.c = cbr(i, m, 1), cbr(m, m, 3, s), cbr(m, 4 * m, 1)
        self.skip = cbr(i, 4 * m, 1, s) if s > 1 or i != 4 * m else nn.Identity()
    def forward(self, x):
        h = F.relu(self.a(x), inplace=True); h = F.relu(self.b(h), inplace=True)
        return F.relu(self.c(h) + self.skip(x), inplace=True)
layers, i = [cbr(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
for m, n, s in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)] if big else [(8, 1, 2)]:
    for j in range(n): layers.append(Bottleneck(i, m, s if j == 0 else 1)); i = 4 * m
net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 1000)).to(dev, memory_format=torch.channels_last)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, fused=big)
b, px = (192, 224) if big else (2, 32)
x = torch.randn(b, 3, px, px, device=dev).to(memory_format=torch.channels_last)
y = torch.randint(1000, (b,), device=dev)
for step in range(4000):
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = F.cross_entropy(net(x), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
