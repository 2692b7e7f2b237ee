# precision: as-written
# expected: indexing
# because: mean[batch] and std[batch] of GraphNorm are gathers whose backward is index_put with accumulate over about 4,096 equal indices per graph, which adds serially, and the means are scatter_adds with as many collisions
# after: pyg-team/pytorch_geometric#3503
# flops: 214748413952
#   = 4 layers * 6*N*256*256 + 4*N*64*256 (input layer, no input gradient) + 6*G*256, N = 131072 nodes, G = 32 graphs
import os
import torch
import torch.nn as nn
import torch.nn.functional as F
TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
G, PER, C, STEPS = (2, 16, 32, 3) if TINY else (32, 4096, 256, 400)

def scatter_mean(x, batch, g):
    return x.new_zeros(g, x.size(1)).scatter_add_(0, batch[:, None].expand_as(x), x) / count[:, None]

class GraphNorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w, self.b, self.a = (nn.Parameter(torch.ones(c)) for _ in range(3))

    def forward(self, x, batch):
        out = x - scatter_mean(x, batch, G)[batch] * self.a
        std = (scatter_mean(out * out, batch, G) + 1e-5).sqrt()
        return self.w * out / std[batch] + self.b

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(64, C), nn.Linear(C, 1)
        self.lins = nn.ModuleList(nn.Linear(C, C) for _ in range(4))
        self.norms = nn.ModuleList(GraphNorm(C) for _ in range(4))

    def forward(self, x, batch):
        x = self.inp(x)
        for lin, norm in zip(self.lins, self.norms):
            x = x + F.relu(norm(lin(x), batch))
        return self.out(scatter_mean(x, batch, G)).squeeze(-1)


net = Net().to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=dev == "cuda")
batch = torch.arange(G, device=dev).repeat_interleave(PER)
count = torch.bincount(batch, minlength=G)
for step in range(STEPS):
    x, y = torch.randn(G * PER, 64, device=dev), torch.randn(G, device=dev)
    loss = F.mse_loss(net(x, batch), y)
    opt.zero_grad(); loss.backward(); opt.step()
