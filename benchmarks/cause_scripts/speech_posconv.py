# precision: as-written
# expected: grouped-convolutions
# because: the positional convolution (kernel 128, 16 groups of 64 channels) has no good bf16 kernel and takes longer than several transformer layers
# after: pytorch/pytorch#43544
# flops: 2.236e13
#   = 3*T*(2*1024*128*64 + 6*(24*1024**2 + 4*1504*1024)) + 2*2*T*1024*512 + 3*2*T*1024*512, T = 24*1504
import os, torch, torch.nn as nn, torch.nn.functional as F
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, L, D, DEPTH, STEPS = (2, 64, 64, 1, 3) if TINY else (24, 1504, 1024, 6, 400)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
    def forward(self, x):
        b, l, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, l, 3, d // 64, 64).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, l, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(512, D)
        self.pos = nn.Conv1d(D, D, 128, padding=64, groups=16)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.head = nn.Linear(D, 512)
    def forward(self, x):
        x = self.proj(x)
        p = self.pos(x.transpose(1, 2))[..., :-1]
        x = x + F.gelu(p).transpose(1, 2)
        for b in self.blocks:
            x = b(x)
        return self.head(x)

model = Encoder().to(dev)
opt = torch.optim.AdamW(model.parameters(), 1e-4, fused=dev == "cuda")
feats = torch.randn(B, L, 512, device=dev)
units = torch.randint(0, 512, (B, L), device=dev)
for step in range(STEPS):
    with torch.autocast(dev, torch.bfloat16):
        logits = model(feats)
        loss = F.cross_entropy(logits.flatten(0, 1), units.flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print("done", float(loss))
