# precision: as-written
# expected: indexing
# because: GraphNorm reads mean[batch] and var[batch], whose backward adds 2,048 rows into each of 64 graphs one after the other, besides the index_add sums
# after: pyg-team/pytorch_geometric#3503
# flops: 1.246e12
#   = 3*6*131072*2*(256*512 + 512*256) + 2*2*131072*64*256 + 3*2*64*256*8
import os, torch, torch.nn as nn, torch.nn.functional as F
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
GRAPHS, NODES, D, DEPTH, STEPS = (4, 16, 32, 2, 3) if TINY else (64, 2048, 256, 6, 400)

class GraphNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))
        self.scale = nn.Parameter(torch.ones(D))
    def forward(self, x, batch, count):
        mean = x.new_zeros(count.shape[0], D).index_add_(0, batch, x) / count
        out = x - mean[batch] * self.scale
        var = x.new_zeros(count.shape[0], D).index_add_(0, batch, out.square()) / count
        return self.weight * out / (var + 1e-5).sqrt()[batch] + self.bias

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D))
        self.norm = GraphNorm()
    def forward(self, h, batch, count):
        neighbours = h + torch.roll(h, 1, 0) + torch.roll(h, -1, 0)
        return h + F.relu(self.norm(self.mlp(neighbours).float(), batch, count)).to(h.dtype)

model = nn.ModuleList([nn.Linear(64, D), *[Layer() for _ in range(DEPTH)], nn.Linear(D, 8)]).to(dev)
opt, scaler = torch.optim.Adam(model.parameters(), 1e-3, fused=dev == "cuda"), torch.amp.GradScaler(dev)
x, y = torch.randn(GRAPHS * NODES, 64, device=dev), torch.randn(GRAPHS, 8, device=dev)
batch = torch.arange(GRAPHS, device=dev).repeat_interleave(NODES)
count = torch.full((GRAPHS, 1), float(NODES), device=dev)
for step in range(STEPS):
    with torch.autocast(dev, torch.float16):
        h = model[0](x)
        for layer in model[1:-1]:
            h = layer(h, batch, count)
        loss = F.mse_loss(model[-1](h.view(-1, NODES, D).mean(1)).float(), y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt), scaler.update()
print("done", float(loss))
