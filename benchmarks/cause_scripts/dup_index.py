# backward of advanced indexing with many equal indices (table[etype]: indexing_backward_kernel adds the duplicates of one row one after another); use F.embedding or index_select, or one-hot @ table
# after: pytorch/pytorch#41162
# expected: indexing
# precision: as-written
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
nodes, edges, types, d = (20_000, 262_144, 16, 128) if big else (50, 200, 4, 16)
class RelConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.own = nn.Linear(d, d), nn.Linear(d, d)
        self.rel = nn.Parameter(torch.randn(types, d) * 0.1)
    def forward(self, h, src, dst, etype):
        m = self.lin(h.index_select(0, src)) * self.rel[etype]
        agg = torch.zeros_like(h).index_add(0, dst, m.to(h.dtype))
        return F.relu(self.own(h) + agg)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([RelConv() for _ in range(3)]), nn.Linear(d, 8)
    def forward(self, h, src, dst, etype):
        for layer in self.layers: h = layer(h, src, dst, etype)
        return self.head(h)
net = Net().to(dev)
opt = torch.optim.Adam(net.parameters(), lr=1e-3, fused=big)
h = torch.randn(nodes, d, device=dev)
src, dst, etype = torch.randint(nodes, (edges,), device=dev), torch.randint(nodes, (edges,), device=dev), torch.randint(types, (edges,), device=dev)
y = torch.randint(8, (nodes,), device=dev)
for step in range(5000):
    loss = F.cross_entropy(net(h, src, dst, etype), y)
    opt.zero_grad(set_to_none=True); loss.backward(); opt.step()
