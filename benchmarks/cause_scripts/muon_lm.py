# precision: as-written
# expected: optimizer
# because: five Newton-Schulz iterations on 300 million parameters cost 15.5 TFLOP an update, twice what forward and backward of 4096 tokens cost
# after: KellerJordan/Muon#47 (also MoonshotAI/Moonlight#33)
# FLOPs: 2.39e13 = model 3*2*4096*(6*12*2048**2 + 2048*8192) = 7.83e12 + attention 3*4*2*2048*2048*2048*6 = 1.24e12 counted full (half of it if causal is skipped: 6.2e11) + Muon 6*5*60*2048**3 = 1.546e13, summing to 2.45e13 full, 2.39e13 causal
import os, torch, torch.nn as nn, torch.nn.functional as F
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, T, D, L, V, steps = (2, 16, 64, 2, 128, 2) if tiny else (2, 2048, 2048, 6, 8192, 300)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.up = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, 4 * D, bias=False)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.down = nn.Linear(4 * D, D, bias=False)
    def forward(self, x):
        h = self.n1(x)
        q, k, v = (m(h).view(B, T, D // 64, 64).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.n2(x))))
class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))
    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                if "m" not in self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
                buf = self.state[p]["m"]
                buf.lerp_(p.grad, 1 - g["momentum"])
                x = (buf.T if buf.size(0) > buf.size(1) else buf).bfloat16()
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
                p.add_(x.T if p.size(0) > p.size(1) else x, alpha=-g["lr"])

body = nn.Sequential(*[Block() for _ in range(L)])
model = nn.Sequential(nn.Embedding(V, D), body, nn.LayerNorm(D), nn.Linear(D, V, bias=False)).to(dev)
mats = [p for p in body.parameters() if p.ndim == 2]
rest = [p for p in model.parameters() if all(p is not m for m in mats)]
opts = [Muon(mats), torch.optim.AdamW(rest, lr=3e-4, fused=dev == "cuda")]
tok = torch.randint(0, V, (4, B, T + 1), device=dev)
for step in range(steps):
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(tok[step % 4, :, :-1]).flatten(0, 1), tok[step % 4, :, 1:].flatten())
    model.zero_grad(set_to_none=True)
    loss.backward()
    [o.step() for o in opts]
