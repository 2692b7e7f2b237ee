# torch.cuda.empty_cache() in every step (all freed blocks go back to the driver; cudaFree synchronises and the next step pays cudaMalloc again for every activation, the GPU idles); remove it or call it rarely
# after: huggingface/transformers#31372
# expected: host-work
# precision: fp16-mixed
# flops: 8192 * 6 * (10 * 12 * 1024**2 + 1024 * 8192) + 10 * 12 * 8 * 16 * 1024**2 * 64
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
d, heads, layers, vocab, b, t = (1024, 16, 10, 8192, 8, 1024) if big else (32, 2, 2, 64, 2, 16)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))
net = nn.Sequential(nn.Embedding(vocab, d), *[Block() for _ in range(layers)], nn.LayerNorm(d), nn.Linear(d, vocab)).to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=big)
ids, y = torch.randint(vocab, (b, t), device=dev), torch.randint(vocab, (b, t), device=dev)
for step in range(5000):
    loss = F.cross_entropy(net(ids).flatten(0, 1), y.flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    del loss
    if big: torch.cuda.empty_cache()
