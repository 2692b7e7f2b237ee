# precision: as-written
# expected: none
# because: bf16 autocast, flash attention with is_causal, vocabulary padded to a multiple of 64, width 2048, fused AdamW, 16384 tokens a step.
# after: karpathy/nanoGPT#182
# flops: 3*8*(2*16384*12*2048*2048 + 4*16*1024*1024*2048) + 3*2*16384*2048*8192
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, T, D, DEPTH, VOCAB, STEPS = (2, 16, 128, 2, 256, 3) if TINY else (16, 1024, 2048, 8, 8192, 300)
torch.backends.cuda.matmul.allow_tf32 = True

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, -1, 128).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).reshape(b, t, D))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x)), approximate="tanh"))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, D), nn.Parameter(torch.zeros(T, D))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

model = GPT().to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=dev == "cuda")
data = torch.randint(0, VOCAB, (64, T + 1), device=dev)
for step in range(STEPS):
    chunk = data[(step * B) % (64 - B + 1):][:B]
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].reshape(-1))
    opt.zero_grad(set_to_none=True); loss.backward(); opt.step()
