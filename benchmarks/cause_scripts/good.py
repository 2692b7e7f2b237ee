# a well-made wide MLP
# after: open case
# expected: none
# precision: bf16-mixed
# flops: 16384 * (4096**2 * (8 * 6 - 2) + 4096 * 64 * 6)
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
dev = "cuda" if torch.cuda.is_available() else "cpu"
big = dev == "cuda"
d = 4096
net = nn.Sequential(*[nn.Sequential(nn.Linear(d, d), nn.ReLU()) for _ in range(8)], nn.Linear(d, 64)).to(dev)
opt = torch.optim.SGD(net.parameters(), lr=1e-2, fused=big)
b = 16384 if big else 64
x, y = torch.randn(b, d, device=dev), torch.randint(64, (b,), device=dev)
for step in range(3000):
    loss = F.cross_entropy(net(x), y); opt.zero_grad(set_to_none=True); loss.backward(); opt.step()
