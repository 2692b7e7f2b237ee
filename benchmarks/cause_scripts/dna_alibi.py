# precision: as-written
# expected: attention
# because: the additive ALiBi bias keeps scaled_dot_product_attention from the flash kernel, and the kernels with a bias, which also read 0.5 GB of it, take most of the step at 4096 tokens
# after: pytorch/pytorch#96099 (also PiotrNawrot/nanoT5#28)
# flops: 6 * 3 * (24*4*4096*1024**2 + 4*4*4096**2*1024) + 3*2*4*4096*1024*64
import os, torch, torch.nn as nn, torch.nn.functional as F
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True
B, N, D, L, H, V, steps = (2, 64, 64, 2, 4, 64, 2) if tiny else (4, 4096, 1024, 6, 16, 64, 300)

def alibi():
    slope = 2.0 ** (-8.0 * torch.arange(1, H + 1, device=dev) / H)
    pos = torch.arange(N, device=dev)
    dist = (pos[None] - pos[:, None]).abs()
    return (-slope[:, None, None] * dist)[None].to(torch.bfloat16)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
    def forward(self, x, bias):
        q, k, v = self.qkv(self.n1(x)).view(B, N, 3, H, D // H).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.o(a.transpose(1, 2).reshape(B, N, D))
        return x + self.mlp(self.n2(x))

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.blocks = nn.ModuleList([Block() for _ in range(L)])
        self.register_buffer("bias", alibi(), persistent=False)
    def forward(self, t):
        x = self.emb(t)
        for b in self.blocks:
            x = b(x, self.bias)
        return self.head(x)

model = Encoder().to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=dev == "cuda")
seq = torch.randint(0, V, (4, B, N), device=dev)
for step in range(steps):
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(seq[step % 4]).flatten(0, 1), seq[step % 4].flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
