# precision: as-written
# expected: none
# because: a dense graph network in TF32 with batched adjacency products, width 4096, in-place ReLU and fused Adam; nearly all time is large matrix products.
# after: pyg-team/pytorch_geometric#445
# flops: 8*(2*2*8192*512*4096 + 3*2*8192*4096*4096) - 2*8192*512*4096 - 2*8192*4096*4096 + 3*2*8192*4096*64
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
GRAPHS, NODES, D, DEPTH, STEPS = (2, 16, 32, 2, 3) if TINY else (16, 512, 4096, 8, 400)
torch.backends.cuda.matmul.allow_tf32 = True

class DenseGCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(DEPTH))
        self.head = nn.Linear(D, 64)
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, x, adj):
        for layer in self.layers:
            x = F.relu(layer(torch.bmm(adj, x)), inplace=True)
        return self.head(x)

def graphs():
    a = (torch.rand(GRAPHS, NODES, NODES, device=dev) < 0.2).float()
    a = ((a + a.transpose(1, 2)) > 0).float() + torch.eye(NODES, device=dev)
    d = a.sum(-1).rsqrt()
    return d[:, :, None] * a * d[:, None, :]        # symmetric normalisation, once

model = DenseGCN().to(dev)
opt = torch.optim.Adam(model.parameters(), lr=1e-4, fused=dev == "cuda")
data = [
    (torch.randn(GRAPHS, NODES, D, device=dev), graphs(),
     torch.randint(0, 64, (GRAPHS * NODES,), device=dev))
    for _ in range(4)
]

for step in range(STEPS):
    x, adj, y = data[step % 4]
    loss = F.cross_entropy(model(x, adj).flatten(0, 1), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
