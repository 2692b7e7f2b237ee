# precision: as-written
# expected: float32-units
# because: the 8-layer NeRF perceptron is in float32 with TF32 left off, so all its products run on the ordinary float32 units
# after: threestudio-project/threestudio#138
# flops: 1.845e12
#   = 3*2*P*(7*256**2 + 316*256 + 256 + 280*128 + 128*3) + 2*2*P*60*256 + 2*2*4096*128**2, P = 4096*128
import os, torch, torch.nn as nn, torch.nn.functional as F
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
RAYS, SAMPLES, W, STEPS = (16, 8, 32, 3) if TINY else (4096, 128, 256, 400)

def encode(x, freqs):
    x = (x[..., None, :] * (2.0 ** torch.arange(freqs, device=x.device))[:, None]).flatten(-2)
    return torch.cat([x.sin(), x.cos()], -1)

class NeRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(60, W)
        self.a = nn.ModuleList([nn.Linear(W, W) for _ in range(4)])
        self.skip = nn.Linear(W + 60, W)
        self.b = nn.ModuleList([nn.Linear(W, W) for _ in range(2)])
        self.sigma, self.feature = nn.Linear(W, 1), nn.Linear(W, W)
        self.view, self.rgb = nn.Linear(W + 24, W // 2), nn.Linear(W // 2, 3)
    def forward(self, p, d):
        p, d = encode(p, 10), encode(d, 4)
        h = F.relu(self.first(p))
        for layer in self.a:
            h = F.relu(layer(h))
        h = F.relu(self.skip(torch.cat([h, p], -1)))
        for layer in self.b:
            h = F.relu(layer(h))
        c = F.relu(self.view(torch.cat([self.feature(h), d], -1)))
        return F.softplus(self.sigma(h))[..., 0], self.rgb(c).sigmoid()

model = NeRF().to(dev)
opt = torch.optim.Adam(model.parameters(), 5e-4, fused=dev == "cuda")
origin, target = torch.randn(RAYS, 1, 3, device=dev), torch.rand(RAYS, 3, device=dev)
direction = F.normalize(torch.randn(RAYS, 1, 3, device=dev), dim=-1)
for step in range(STEPS):
    t = torch.rand(RAYS, SAMPLES, 1, device=dev).sort(1)[0] * 4 + 2
    sigma, rgb = model(origin + t * direction, direction.expand(-1, SAMPLES, -1))
    delta = F.pad(t[:, 1:, 0] - t[:, :-1, 0], (0, 1), value=0.1)
    tau = sigma * delta
    shadow = tau @ torch.triu(torch.ones(SAMPLES, SAMPLES, device=dev), 1)
    weights = torch.exp(-shadow) * (1 - torch.exp(-tau))
    loss = F.mse_loss((weights[..., None] * rgb).sum(1), target)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print("done", float(loss))
