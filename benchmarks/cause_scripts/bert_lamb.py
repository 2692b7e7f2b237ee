# precision: as-written
# expected: optimizer
# because: LAMB written out tensor by tensor passes over 629 M float32 parameters and their states some 20 times, longer than forward and backward of 2,048 tokens
# after: pytorch/pytorch#45268
# flops: 8.12e12
#   = 3*8*2048*(24*2560**2 + 4*512*2560) + 3*2*2048*2560*4096 (the embedding is a table)
import os, torch, torch.nn as nn, torch.nn.functional as F
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, L, D, DEPTH, V, STEPS = (2, 16, 128, 1, 128, 3) if TINY else (4, 512, 2560, 8, 4096, 400)

class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            s = self.state[p]
            if not s:
                s["m"], s["v"] = torch.zeros_like(p), torch.zeros_like(p)
            m, v = s["m"], s["v"]
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            update = m / v.sqrt().add_(1e-6)
            update.add_(p, alpha=0.01)
            weight_norm = p.pow(2).sum().sqrt().clamp(0, 10)
            ratio = weight_norm / update.pow(2).sum().sqrt().clamp(min=1e-6)
            p.sub_(update * ratio * self.param_groups[0]["lr"])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
    def forward(self, x):
        b, l, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, l, 3, d // 128, 128).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, l, d))
        return x + self.mlp(self.n2(x))

model = nn.Sequential(nn.Embedding(V, D), *[Block() for _ in range(DEPTH)], nn.Linear(D, V)).to(dev)
opt = Lamb(model.parameters(), 1e-3)
ids = torch.randint(0, V, (B, L), device=dev)
for step in range(STEPS):
    with torch.autocast(dev, torch.bfloat16):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print("done", float(loss))
