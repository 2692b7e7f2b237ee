# precision: bf16-mixed
# expected: small-kernels or missing-kernel
# because: GroupNorm with one group over long waveforms computes the moments of a batch of 4 with only 4 thread blocks on 132 SMs, millisecond after millisecond.
# after: pytorch/pytorch#28201
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, LENGTH, WIDTH, STEPS = (2, 1024, 8, 3) if TINY else (4, 262144, 64, 300)
torch.backends.cuda.matmul.allow_tf32 = True

class Down(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv, self.n1 = nn.Conv1d(i, o, 8, 4, 2), nn.GroupNorm(1, o)
        self.mix, self.n2 = nn.Conv1d(o, 2 * o, 1), nn.GroupNorm(1, 2 * o)
    def forward(self, x):
        return F.glu(self.n2(self.mix(F.gelu(self.n1(self.conv(x))))), 1)

class Up(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.mix, self.n1 = nn.Conv1d(i, 2 * i, 1), nn.GroupNorm(1, 2 * i)
        self.conv = nn.ConvTranspose1d(i, o, 8, 4, 2)
    def forward(self, x, skip):
        return F.gelu(self.conv(F.glu(self.n1(self.mix(x + skip)), 1)))

class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        pairs = [(2, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, 4 * WIDTH)]
        self.down = nn.ModuleList(Down(a, b) for a, b in pairs)
        self.up = nn.ModuleList(Up(b, a if a > 2 else 8) for a, b in pairs[::-1])
    def forward(self, x):
        skips = []
        for d in self.down:
            skips.append(x := d(x))
        for u in self.up:
            x = u(x, skips.pop())
        return x
model = Separator().to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=dev == "cuda")
mixes = [torch.randn(B, 2, LENGTH, device=dev) for _ in range(4)]
stems = [torch.randn(B, 8, LENGTH, device=dev) for _ in range(4)]
for step in range(STEPS):
    loss = F.l1_loss(model(mixes[step % 4]), stems[step % 4])
    opt.zero_grad(set_to_none=True); loss.backward(); opt.step()
