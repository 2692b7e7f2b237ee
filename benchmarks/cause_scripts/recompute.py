# activation checkpointing though memory is plentiful
# after: open case
# expected: recomputation
# precision: bf16-mixed
# flops: 8192 * (2048**2 * (6 * 8 * 6 - 8) + 2048 * 64 * 6)
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
dev = "cuda" if torch.cuda.is_available() else "cpu"
big = dev == "cuda"
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self, d=2048): super().__init__(); self.b = nn.ModuleList(nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(6 if big else 1)); self.h = nn.Linear(d, 64)
    def forward(self, x):
        for b in self.b: x = x + checkpoint(b, x, use_reentrant=False)
        return self.h(x)
net = Net().to(dev); opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=big)
b = 8192 if big else 8
x, y = torch.randn(b, 2048, device=dev), torch.randint(64, (b,), device=dev)
for step in range(3000):
    loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
