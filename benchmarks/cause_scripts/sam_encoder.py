# precision: bf16-mixed
# expected: attention
# because: global attention over 4,096 tokens is written out with decomposed relative positions, so scores of 400 M elements are written and read many times
# after: huggingface/transformers#34110
# flops: 4.00e12
#   = 3*6*(24*8192*768**2 + 4*2*4096**2*768 + 2*2*8192*768*64) + 2*2*8192*768*768 + 3*2*8192*768*256 (the patch embedding needs no gradient of its input)
import os, torch, torch.nn as nn, torch.nn.functional as F
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, S, D, DEPTH, STEPS = (1, 8, 128, 1, 3) if TINY else (2, 64, 768, 6, 400)
torch.backends.cuda.matmul.allow_tf32 = True

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
        self.rel_h = nn.Parameter(torch.zeros(2 * S - 1, 64))
        self.rel_w = nn.Parameter(torch.zeros(2 * S - 1, 64))
        r = torch.arange(S)
        self.register_buffer("idx", r[:, None] - r[None, :] + S - 1)
    def attention(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, d // 64, 64).permute(2, 0, 3, 1, 4).reshape(3, -1, n, 64).unbind(0)
        attn = (q * 64 ** -0.5) @ k.transpose(-2, -1)
        r_q = q.reshape(-1, S, S, 64)
        h = torch.einsum("bhwc,hkc->bhwk", r_q, self.rel_h[self.idx])
        w = torch.einsum("bhwc,wkc->bhwk", r_q, self.rel_w[self.idx])
        attn = attn.view(-1, S, S, S, S) + h[..., :, None] + w[..., None, :]
        out = attn.view(-1, n, n).softmax(-1) @ v
        return self.proj(out.view(b, -1, n, 64).transpose(1, 2).reshape(b, n, d))
    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))

model = nn.Sequential(nn.Linear(768, D), *[Block() for _ in range(DEPTH)], nn.Linear(D, 256)).to(dev)
opt = torch.optim.AdamW(model.parameters(), 1e-4, fused=dev == "cuda")
patches = torch.randn(B, S * S, 768, device=dev)
target = torch.randn(B, S * S, 256, device=dev)
for step in range(STEPS):
    loss = F.mse_loss(model(patches), target)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print("done", float(loss))
