# precision: as-written
# expected: none
# because: a DiT under torch.compile and bf16 autocast with flash attention, fused AdamW, fixed shapes and sizes that are multiples of 64.
# after: Dao-AILab/flash-attention#462
# flops: 3*12*(2*16384*12*1536*1536 + 4*64*256*256*1536 + 2*64*1536*9216) + 3*2*16384*2*64*1536
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, N, D, DEPTH, STEPS = (2, 16, 64, 2, 3) if TINY else (64, 256, 1536, 12, 300)
torch.backends.cuda.matmul.allow_tf32 = True

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.ada = nn.Linear(D, 6 * D)
    def forward(self, x, c):
        b, n, _ = x.shape
        s1, t1, g1, s2, t2, g2 = self.ada(F.silu(c))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm(x) * (1 + s1) + t1).view(b, n, 3, -1, 64).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, D)
        x = x + g1 * self.proj(out)
        return x + g2 * self.fc2(F.gelu(self.fc1(self.norm(x) * (1 + s2) + t2), approximate="tanh"))

class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.time, self.out = nn.Linear(64, D), nn.Linear(256, D), nn.Linear(D, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
    def forward(self, x, temb):
        x, c = self.embed(x), self.time(temb)
        for block in self.blocks:
            x = block(x, c)
        return self.out(x)
model = DiT().to(dev)
net = torch.compile(model) if dev == "cuda" else model
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=dev == "cuda")
latents, freqs = torch.randn(B, N, 64, device=dev), torch.exp(torch.linspace(0, -8, 128, device=dev))
for step in range(STEPS):
    t, noise = torch.rand(B, 1, device=dev), torch.randn_like(latents)
    temb = torch.cat([(1000 * t * freqs).cos(), (1000 * t * freqs).sin()], 1)
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = F.mse_loss(net((1 - t[..., None]) * latents + t[..., None] * noise, temb), noise - latents)
    opt.zero_grad(set_to_none=True); loss.backward(); opt.step()
