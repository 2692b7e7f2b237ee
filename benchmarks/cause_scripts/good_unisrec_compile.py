# precision: as-written
# expected: none
# because: a compiled bf16 recommender with flash attention, widths that are multiples of 64, large batch and fused AdamW on items with precomputed text embeddings
# after: MTSWebServices/RecTools#306
# flops: 2.17e13
#   = 3*8*T*(24*1024**2 + 4*512*1024) + 2*2*T*768*1024 + 3*2*T*1024*768, T = 64*512 (attention counted without the causal half)
import os, torch, torch.nn as nn, torch.nn.functional as F
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, L, D, DEPTH, ITEMS, STEPS = (2, 16, 64, 1, 64, 3) if TINY else (64, 512, 1024, 8, 65536, 400)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
    def forward(self, x):
        b, l, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, l, 3, d // 64, 64).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, l, d))
        return x + self.mlp(self.n2(x))

model = nn.Sequential(nn.Linear(768, D), *[Block() for _ in range(DEPTH)], nn.LayerNorm(D), nn.Linear(D, 768)).to(dev)
fast = model if TINY else torch.compile(model)
opt = torch.optim.AdamW(model.parameters(), 1e-4, fused=dev == "cuda")
table = F.normalize(torch.randn(ITEMS, 768, device=dev), dim=-1).to(torch.bfloat16)
for step in range(STEPS):
    items = torch.randint(0, ITEMS, (B, L + 1), device=dev)
    text = table[items]
    with torch.autocast(dev, torch.bfloat16):
        out = fast(text[:, :-1])
        loss = (1 - F.cosine_similarity(out, text[:, 1:], dim=-1)).mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print("done", float(loss))
