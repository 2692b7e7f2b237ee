# casts of the same float32 weights to bf16 again and again (autocast with cache_enabled=False around a weight-tied loop; the gradient is cast back and added in float32 at each use); leave autocast's cache on, or hold bf16 weights
# after: Lightning-AI/pytorch-lightning#21611
# expected: casts
# precision: as-written
# flops: 128 * 6 * (12 * 8 * 4096**2 + 4096 * 64)
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
d, b, iters = (4096, 128, 12) if big else (32, 4, 3)
class Recurrent(nn.Module):                            # one block applied many times, as in iterative decoding
    def __init__(self):
        super().__init__()
        self.n, self.up, self.down, self.head = nn.LayerNorm(d), nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False), nn.Linear(d, 64)
    def forward(self, x):
        for _ in range(iters):
            x = x + self.down(F.gelu(self.up(self.n(x))))
        return self.head(x)
net = Recurrent().to(dev)
opt = torch.optim.SGD(net.parameters(), lr=1e-3, fused=big)
x, y = torch.randn(b, d, device=dev), torch.randint(64, (b,), device=dev)
for step in range(5000):
    with torch.autocast(dev, dtype=torch.bfloat16, cache_enabled=False):
        loss = F.cross_entropy(net(x), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
