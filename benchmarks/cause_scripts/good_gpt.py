# no serious cause (a well-made GPT: large matmuls dominate; at most the power limit, or the memory-bound share of norms, GELU and loss, which torch.compile would lessen)
# after: karpathy/nanoGPT#182
# expected: none
# precision: bf16-mixed
# flops: 16384 * 6 * (6 * 12 * 2048**2 + 2048 * 32768) + 6 * 12 * 16 * 16 * 1024**2 * 128
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
d, heads, layers, vocab, b, t = (2048, 16, 6, 32_768, 16, 1024) if big else (32, 2, 1, 64, 2, 16)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))
net = nn.Sequential(nn.Embedding(vocab, d), *[Block() for _ in range(layers)], nn.LayerNorm(d, bias=False), nn.Linear(d, vocab, bias=False)).to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=big)
ids = torch.randint(vocab, (b, t + 1), device=dev)
x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
for step in range(4000):
    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
