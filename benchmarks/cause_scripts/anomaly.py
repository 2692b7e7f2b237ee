# autograd's anomaly detection was left on (a Python stack trace for each forward operation, a NaN check with a read-back to the CPU for each gradient: the GPU waits for the CPU); remove set_detect_anomaly(True)
# after: yenchenlin/nerf-pytorch#42
# expected: settings
# precision: as-written
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
torch.autograd.set_detect_anomaly(True)
torch.set_float32_matmul_precision("high")
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
rays, samples, w, octaves = (1024, 64, 256, 10) if big else (4, 4, 16, 2)
def encode(p):
    out = [p]
    for i in range(octaves): out += [torch.sin(p * 2 ** i), torch.cos(p * 2 ** i)]
    return torch.cat(out, -1)
class Nerf(nn.Module):
    def __init__(self):
        super().__init__()
        c = 3 + 6 * octaves
        self.pts = nn.ModuleList([nn.Linear(c, w)] + [nn.Linear(w + c if i == 4 else w, w) for i in range(7)])
        self.out = nn.Linear(w, 4)
    def forward(self, p):
        e = encode(p); h = e
        for i, l in enumerate(self.pts):
            if i == 5: h = torch.cat([e, h], -1)
            h = F.relu(l(h))
        raw = self.out(h)
        return (torch.sigmoid(raw[..., :3]) * torch.softmax(raw[..., 3:], 1)).sum(1)
net = Nerf().to(dev)
opt = torch.optim.Adam(net.parameters(), lr=5e-4)
o, d, rgb = torch.randn(rays, 1, 3, device=dev), torch.randn(rays, 1, 3, device=dev), torch.rand(rays, 3, device=dev)
for step in range(10000):
    t = torch.linspace(2, 6, samples, device=dev).view(1, -1, 1) + torch.rand(rays, samples, 1, device=dev) * 0.06
    loss = F.mse_loss(net(o + d * t), rgb)
    opt.zero_grad(); loss.backward(); opt.step()
