# precision: as-written
# expected: alignment
# because: the two large products have 19331 genes (odd) as their leading dimension, so bf16 runs on unaligned kernels at a fraction of the speed; with 19392 they would be several times faster
# after: pytorch/pytorch#146817 (bf16 linear slow on odd sizes; also allenai/allennlp#4868)
# flops: 2*8192*2048*19331*5 + 2*8192*2048*256*3*2
import os, torch, torch.nn as nn, torch.nn.functional as F
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True
B, genes, hidden, latent, steps = (16, 331, 64, 16, 2) if tiny else (8192, 19331, 2048, 256, 400)

class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.e1, self.e2 = nn.Linear(genes, hidden), nn.Linear(hidden, latent)
        self.d1, self.d2 = nn.Linear(latent, hidden), nn.Linear(hidden, genes)

    def forward(self, x):
        z = self.e2(F.relu(self.e1(x), inplace=True))
        return self.d2(F.relu(self.d1(z), inplace=True))

model = AE().to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=dev == "cuda")
cells = [torch.log1p(torch.poisson(torch.rand(B, genes, device=dev))) for _ in range(3)]
for step in range(steps):
    x = cells[step % 3]
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = F.mse_loss(model(x), x)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print(loss.item())
