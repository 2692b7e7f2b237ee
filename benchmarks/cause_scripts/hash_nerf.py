# precision: as-written
# expected: indexing
# because: 16 hash tables are looked up 2 million times each and the backward pass sorts and scatters these rows, while the MLP is tiny.
# after: yashbhalgat/HashNeRF-pytorch#22
# flops: 3*2*262144*(32*64 + 64*64 + 64*4)
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
N, LOG_T, LEVELS, STEPS = (64, 8, 2, 3) if TINY else (262144, 19, 16, 300)

class HashGrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2 ** LOG_T, 2) for _ in range(LEVELS))
        for t in self.tables:
            nn.init.uniform_(t.weight, -1e-4, 1e-4)
        corners = [[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)]
        self.register_buffer("corners", torch.tensor(corners))
        self.res = [int(16 * 1.38 ** i) for i in range(LEVELS)]

    def forward(self, x):
        out = []
        for table, r in zip(self.tables, self.res):
            low = (x * r).floor()
            f = (x * r - low)[:, None]
            c = low.long()[:, None] + self.corners
            key = (c[..., 0] ^ c[..., 1] * 2654435761 ^ c[..., 2] * 805459861) & (2 ** LOG_T - 1)
            w = torch.where(self.corners.bool(), f, 1 - f).prod(-1, keepdim=True)
            out.append((table(key) * w).sum(1))
        return torch.cat(out, -1)

torch.manual_seed(0)
grid = HashGrid().to(dev)
mlp = nn.Sequential(nn.Linear(2 * LEVELS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).to(dev)
opt = torch.optim.Adam([*grid.parameters(), *mlp.parameters()], lr=1e-2, eps=1e-15, fused=dev == "cuda")
points = [torch.rand(N, 3, device=dev) for _ in range(4)]
colours = [torch.rand(N, 4, device=dev) for _ in range(4)]

for step in range(STEPS):
    feats = grid(points[step % 4])
    with torch.autocast(dev, dtype=torch.bfloat16):
        rgbs = mlp(feats)
    loss = F.mse_loss(torch.sigmoid(rgbs.float()), colours[step % 4])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
