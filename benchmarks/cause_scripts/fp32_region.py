# a region with autocast off computes in float32
# after: open case
# expected: float32-units
# precision: bf16-mixed
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
dev = "cuda" if torch.cuda.is_available() else "cpu"
big = dev == "cuda"
class Block(nn.Module):
    def __init__(self, d=1024, h=16):
        super().__init__(); self.h = h; self.qkv, self.o, self.n, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        with torch.autocast(x.device.type, enabled=False):
            a = (q.float() @ k.float().transpose(-1, -2)) / (d // self.h) ** 0.5
            z = torch.softmax(a, -1) @ v.float()
            x = x + F.linear(z.transpose(1, 2).reshape(b, t, d), self.o.weight, self.o.bias)
            return x + F.linear(F.gelu(F.linear(x.float(), self.up.weight, self.up.bias)), self.down.weight, self.down.bias)
t = 512 if big else 32
net = nn.Sequential(*[Block() for _ in range(6 if big else 1)], nn.Linear(1024, 128)).to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=big)
x, y = torch.randn(16 if big else 2, t, 1024, device=dev), torch.randint(128, (16 if big else 2, t), device=dev)
for step in range(3000):
    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten()); opt.zero_grad(); loss.backward(); opt.step()
