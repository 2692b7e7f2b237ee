# precision: as-written
# expected: none
# because: a byte-level GPT of width 2,048 with bf16 autocast, causal flash attention, fused AdamW and 16,384 tokens a step: about four fifths of the time is in large aligned products
# after: karpathy/nanoGPT#182
# flops: 41334765256704 + 3*8*2*16*1024**2*2048
#   = 3*(2*B*T*(8*12*2048^2 + 512*2048) + 8*2*B*T^2*2048), B = 16, T = 1024, causal attention counted half
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
B, T, D, HEAD, DEPTH, V, STEPS = (2, 16, 64, 32, 2, 64, 3) if TINY else (16, 1024, 2048, 128, 8, 512, 300)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Parameter(0.02 * torch.randn(T, D))
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)], nn.LayerNorm(D))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, idx):
        return self.head(self.blocks(self.tok(idx) + self.pos))


net = GPT().to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=dev == "cuda")
for step in range(STEPS):
    data = torch.randint(V, (B, T + 1), device=dev)
    with torch.autocast(dev, torch.bfloat16):
        loss = F.cross_entropy(net(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
    opt.zero_grad(set_to_none=True); loss.backward(); opt.step()
    if step % 100 == 0:
        print(step, loss.item())
