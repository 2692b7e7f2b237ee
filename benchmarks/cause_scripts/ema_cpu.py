# a moving average of the weights kept on the CPU is updated in every step (all weights copied to the host, one blocking pageable copy per parameter, then CPU arithmetic while the GPU waits); keep the average on the GPU (torch._foreach_lerp_, AveragedModel) or update it every n steps
# after: lucidrains/ema-pytorch#5
# expected: host-work or host-copies
# precision: bf16-mixed
# flops: 8192 * (12 * 4 * 1024**2 * 6 + 64 * 1024 * (4 + 6))
import copy, torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
d, blocks, b = (1024, 12, 8192) if big else (32, 2, 8)
class Res(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
    def forward(self, x):
        return x + self.down(F.silu(self.up(self.n(x))))
net = nn.Sequential(nn.Linear(64, d), *[Res() for _ in range(blocks)], nn.Linear(d, 64)).to(dev)
ema = copy.deepcopy(net).cpu()
opt = torch.optim.AdamW(net.parameters(), lr=2e-4, fused=big)
@torch.no_grad()
def update_ema(decay=0.999):
    for e, p in zip(ema.parameters(), net.parameters()):
        e.lerp_(p.detach().to("cpu"), 1 - decay)
x0 = torch.randn(b, 64, device=dev)
for step in range(5000):                               # a denoising step on vectors
    t = torch.rand(b, 1, device=dev)
    noise = torch.randn_like(x0)
    loss = F.mse_loss(net(x0 * (1 - t) + noise * t), noise - x0)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    update_ema()
