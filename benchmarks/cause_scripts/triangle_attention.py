# precision: as-written
# expected: attention
# because: the triangle attention with pair bias is written out, so 226 million logits per call go through memory several times (bias, float32 softmax, casts, backward), about 14 GB per call, where a fused kernel would keep them on chip
# after: Dao-AILab/flash-attention#17
# flops: 1755165229056
#   = 4 blocks * 3 * (2*(5*2*N^2*128^2 + 2*N^2*128*4 + 4*N^3*128) + 4*N^2*128*512) + 4*N^2*64*128 + 6*N^2*128*64, N = 384
import os
import torch
import torch.nn as nn
import torch.nn.functional as F
TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
N, C, H, BLOCKS, STEPS = (16, 128, 4, 1, 3) if TINY else (384, 128, 4, 4, 300)

class TriangleAttention(nn.Module):
    def __init__(self, starting):
        super().__init__()
        self.starting, self.norm = starting, nn.LayerNorm(C)
        self.qkvg = nn.Linear(C, 4 * C, bias=False)
        self.bias, self.out = nn.Linear(C, H, bias=False), nn.Linear(C, C)

    def forward(self, z):
        z = z if self.starting else z.transpose(0, 1)
        x = self.norm(z)
        q, k, v, g = self.qkvg(x).view(N, N, 4, H, C // H).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-1, -2) * (C // H) ** -0.5
        logits = logits + self.bias(x).permute(2, 0, 1).unsqueeze(0)
        o = (logits.softmax(-1) @ v) * g.sigmoid()
        o = self.out(o.transpose(1, 2).reshape(N, N, C))
        return o if self.starting else o.transpose(0, 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.end = TriangleAttention(True), TriangleAttention(False)
        self.ff = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.ReLU(), nn.Linear(4 * C, C))

    def forward(self, z):
        z = z + self.start(z)
        z = z + self.end(z)
        return z + self.ff(z)


net = nn.Sequential(nn.Linear(64, C), *[Block() for _ in range(BLOCKS)], nn.Linear(C, 64)).to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=dev == "cuda")
for step in range(STEPS):
    pair, bins = torch.randn(N, N, 64, device=dev), torch.randint(64, (N, N), device=dev)
    with torch.autocast(dev, torch.bfloat16):
        loss = F.cross_entropy(net(pair).flatten(0, 1), bins.flatten())
    opt.zero_grad(); loss.backward(); opt.step()
