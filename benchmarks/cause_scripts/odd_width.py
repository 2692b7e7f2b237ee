# width 1021
# after: open case
# expected: alignment
# precision: bf16-mixed
# flops: 8192 * (2045**2 * (8 * 6 - 2) + 2045 * 11 * 6)
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
dev = "cuda" if torch.cuda.is_available() else "cpu"
big = dev == "cuda"
d = 2045
net = nn.Sequential(*[nn.Sequential(nn.Linear(d, d), nn.ReLU()) for _ in range(8)], nn.Linear(d, 11)).to(dev)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
b = 8192 if big else 64
x, y = torch.randn(b, d, device=dev), torch.randint(11, (b,), device=dev)
for step in range(3000):
    loss = F.cross_entropy(net(x), y); opt.zero_grad(); loss.backward(); opt.step()
