# precision: as-written
# expected: synchronisation
# because: each step reads the norm of the gradient and of the weight of all 292 parameters with .item(), some 590 round trips of 25 us with an idle GPU.
# after: kohya-ss/musubi-tuner#988
# flops: 3*24*(2*16384*12*512*512 + 4*32*512*512*512)
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, N, D, DEPTH, STEPS = (2, 8, 64, 2, 3) if TINY else (32, 512, 512, 24, 400)
PATCH, HORIZON = 64, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, -1, 64).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(out.transpose(1, 2).reshape(b, n, D))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


model = nn.Sequential(nn.Linear(PATCH, D), *[Block() for _ in range(DEPTH)], nn.Linear(D, HORIZON)).to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=dev == "cuda")
series = [torch.randn(B, N, PATCH, device=dev) for _ in range(4)]
future = torch.randn(B, N, HORIZON, device=dev)
history = []

for step in range(STEPS):
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = F.mse_loss(model(series[step % 4]), future)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    logs = {}
    for name, p in model.named_parameters():        # for the dashboard
        logs[f"grad/{name}"] = p.grad.norm().item()
        logs[f"weight/{name}"] = p.detach().norm().item()
    history = (history + [logs])[-10:]
    opt.step()
