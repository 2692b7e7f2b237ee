# a large embedding under dense AdamW
# after: open case
# expected: optimizer
# precision: bf16-mixed
# flops: 2048 * 6 * (2560 * 512 + 512)
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
dev = "cuda" if torch.cuda.is_available() else "cpu"
big = dev == "cuda"
n = 1_500_000 if big else 20_000
emb = nn.Embedding(n, 128).to(dev); mlp = nn.Sequential(nn.Linear(128 * 20, 512), nn.ReLU(), nn.Linear(512, 1)).to(dev)
opt = torch.optim.AdamW([*emb.parameters(), *mlp.parameters()], lr=1e-3)
net = nn.ModuleDict({"e": emb, "m": mlp})
class Rec(nn.Module):
    def __init__(self): super().__init__(); self.e, self.m = emb, mlp
    def forward(self, ids): return self.m(self.e(ids).flatten(1))
net = Rec().to(dev)
ids, y = torch.randint(n, (2048, 20), device=dev), torch.rand(2048, 1, device=dev)
for step in range(3000):
    loss = F.binary_cross_entropy_with_logits(net(ids), y); opt.zero_grad(); loss.backward(); opt.step()
