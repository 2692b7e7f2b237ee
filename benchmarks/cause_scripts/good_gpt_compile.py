# precision: as-written
# expected: none
# because: bf16, flash attention, torch.compile, fused AdamW, 16384 tokens of multiples of 64: the products are the step
# after: karpathy/nanoGPT#392 (what compile brings)
# flops: 3*2*16384*(12*12*1024**2 + 1024*8192) + 12*3*4*16*1024**3
import os, torch, torch.nn as nn, torch.nn.functional as F
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
B, T, D, L, V, steps = (2, 16, 64, 2, 128, 2) if tiny else (16, 1024, 1024, 12, 8192, 400)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(approximate="tanh"), nn.Linear(4 * D, D))

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, D // 64, 64).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.n2(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(V, D), nn.Parameter(torch.zeros(T, D))
        self.blocks = nn.Sequential(*[Block() for _ in range(L)])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, t, y):
        h = self.norm(self.blocks(self.emb(t) + self.pos))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

model = GPT().to(dev)
fwd = model if tiny else torch.compile(model)
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=dev == "cuda")
tok = torch.randint(0, V, (8, B, T + 1), device=dev)
xs, ys = tok[..., :-1].contiguous(), tok[..., 1:].contiguous()
for step in range(steps):
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = fwd(xs[step % 8], ys[step % 8])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 100 == 99:
        print(step, loss.item())
