# precision: bf16-mixed
# expected: optimizer
# because: plain Adam updates all 8 million embedding rows (0.5 billion values, 2 GB each for weight, gradient and two moments) though a batch touches 0.13 million.
# after: pytorch/pytorch#5309
# flops: 3 * 2 * 16384 * (512*1024 + 1024*512 + 512)
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, DIM, FIELDS, B, STEPS = (1000, 16, 4, 32, 3) if TINY else (8_000_000, 64, 8, 16384, 500)


class CTR(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)        # all fields hashed into one table
        self.mlp = nn.Sequential(
            nn.Linear(FIELDS * DIM, 1024), nn.ReLU(),
            nn.Linear(1024, 512), nn.ReLU(),
            nn.Linear(512, 1),
        )

    def forward(self, ids):
        return self.mlp(self.table(ids).flatten(1)).squeeze(1)


torch.manual_seed(0)
with torch.device(dev):
    model = CTR()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = [
    (torch.randint(0, ROWS, (B, FIELDS), device=dev), torch.randint(0, 2, (B,), device=dev).float())
    for _ in range(8)
]

running = torch.zeros((), device=dev)
for step in range(STEPS):
    ids, click = batches[step % 8]
    loss = F.binary_cross_entropy_with_logits(model(ids), click)
    opt.zero_grad()
    loss.backward()
    opt.step()
    running += loss.detach()
    if step % 100 == 99:
        print(step, running.item() / 100)
        running.zero_()
