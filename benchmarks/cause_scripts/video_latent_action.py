# precision: as-written
# expected: attention
# because: attention over 2048 space-time tokens is written out as matmul, softmax, matmul, so 0.4 billion scores a layer go through memory in float32.
# after: showlab/Olaf-World#9
# flops: 3*12*(2*16384*12*768*768 + 4*8*2048*2048*768) + 2*2*16384*1536*768 + 3*2*16384*768*64
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, N, D, H, DEPTH, STEPS = (1, 32, 64, 2, 2, 3) if TINY else (8, 2048, 768, 12, 12, 300)
PATCH = 2 * 16 * 16 * 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, H, D // H).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q * (D // H) ** -0.5, k.transpose(-2, -1))
        out = torch.matmul(scores.softmax(dim=-1), v)
        x = x + self.proj(out.transpose(1, 2).reshape(b, n, D))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


embed = nn.Linear(PATCH, D)
model = nn.Sequential(embed, *[Block() for _ in range(DEPTH)], nn.LayerNorm(D), nn.Linear(D, 64)).to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=dev == "cuda")
scaler = torch.amp.GradScaler(dev, enabled=dev == "cuda")
clips = [torch.randn(B, N, PATCH, device=dev) for _ in range(4)]
target = torch.randn(B, N, 64, device=dev)

for step in range(STEPS):
    with torch.autocast(dev, dtype=torch.float16 if dev == "cuda" else torch.bfloat16):
        loss = F.mse_loss(model(clips[step % 4]), target)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
