# cumsum over the first dimension of a tall, narrow tensor (one thread per column walks all rows, the GPU is all but empty), in the loss, forward and backward; transpose so that the scanned dimension is last and contiguous
# after: pytorch/pytorch#122170
# expected: missing-kernel
# precision: bf16-mixed
# flops: 131072 * (64 * 512 * 4 + (2 * 512**2 + 512 * 8) * 6)
import torch
from torch import nn
torch.manual_seed(0)
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
n, f, w, risks = (131_072, 64, 512, 8) if big else (256, 16, 32, 8)
net = nn.Sequential(nn.Linear(f, w), nn.GELU(), nn.Linear(w, w), nn.GELU(), nn.Linear(w, w), nn.GELU(), nn.Linear(w, risks)).to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=big)
x = torch.randn(n, f, device=dev)                      # patients, sorted by falling survival time
event = (torch.rand(n, risks, device=dev) < 0.1).float()
def cox(h, event):                                     # Breslow's partial likelihood, one column per risk
    h = h.float()
    at_risk = torch.cumsum(torch.exp(h), dim=0)
    return -(event * (h - torch.log(at_risk))).sum() / event.sum()
for step in range(5000):
    loss = cox(net(x), event)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
