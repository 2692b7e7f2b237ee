# a float32 video batch copied each step
# after: open case
# expected: host-copies
# precision: bf16-mixed
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
dev = "cuda" if torch.cuda.is_available() else "cpu"
big = dev == "cuda"
net = nn.Sequential(nn.Conv3d(3, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 5)).to(dev)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
x, y = torch.randn(32 if big else 2, 3, 16, 112, 112), torch.randint(5, (32 if big else 2,))
for step in range(3000):
    loss = F.cross_entropy(net(x.to(dev)), y.to(dev)); opt.zero_grad(); loss.backward(); opt.step()
