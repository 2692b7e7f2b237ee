# precision: as-written
# expected: indexing
# because: x[:, spiral] copies nine neighbours of each vertex and its backward is a sorted, accumulating index_put over 185 million floats a layer; the TF32 products on them are far shorter
# after: pytorch/pytorch#15245 (also choderalab/modelforge#143)
# flops: 8*3*2*64*5024*576*64 + 2*2*64*5024*3*64 + 3*2*64*5024*64*3
import os, torch, torch.nn as nn, torch.nn.functional as F
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True
B, V, S, C, L, steps = (2, 64, 9, 16, 2, 2) if tiny else (64, 5024, 9, 64, 8, 300)

class SpiralConv(nn.Module):
    """Each vertex sees itself and its neighbours in the order of a fixed spiral."""

    def __init__(self, spiral):
        super().__init__()
        self.spiral = spiral
        self.lin = nn.Linear(S * C, C)

    def forward(self, x):
        n = x.size(0)
        nb = x[:, self.spiral.reshape(-1)]
        return F.elu(self.lin(nb.view(n, V, S * C)))

class Net(nn.Module):
    def __init__(self, spiral):
        super().__init__()
        self.inp = nn.Linear(3, C)
        self.convs = nn.ModuleList([SpiralConv(spiral) for _ in range(L)])
        self.out = nn.Linear(C, 3)

    def forward(self, x):
        x = self.inp(x)
        for c in self.convs:
            x = c(x)
        return self.out(x)

offsets = torch.tensor([0, 1, -1, 71, -71, 72, -72, 70, -70])
spiral = ((torch.arange(V)[:, None] + offsets) % V).to(dev)
model = Net(spiral).to(dev)
opt = torch.optim.Adam(model.parameters(), lr=1e-3, fused=dev == "cuda")
meshes = [torch.randn(B, V, 3, device=dev) for _ in range(4)]
for step in range(steps):
    x = meshes[step % 4]
    loss = F.l1_loss(model(x + 0.05 * torch.randn_like(x)), x)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print(loss.item())
