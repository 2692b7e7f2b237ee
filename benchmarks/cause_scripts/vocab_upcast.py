# memory traffic of the float32 logits over a huge vocabulary (upcast, copy by the shift, log_softmax and their gradients) in the loss, not the small body; use a fused or chunked linear cross entropy, no .float() and no .contiguous() copy
# after: huggingface/transformers#30860
# expected: memory or casts
# precision: bf16-mixed
# flops: 4096 * 6 * (4 * 12 * 640**2 + 640 * 262144) + 4 * 12 * 4 * 10 * 1024**2 * 64
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
d, heads, layers, vocab, b, t = (640, 10, 4, 262_144, 4, 1024) if big else (32, 2, 1, 256, 2, 16)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.body, self.norm = nn.Embedding(vocab, d), nn.Sequential(*[Block() for _ in range(layers)]), nn.RMSNorm(d)
        self.head = nn.Linear(d, vocab, bias=False); self.head.weight = self.emb.weight
        nn.init.normal_(self.emb.weight, std=0.02)
    def forward(self, ids, labels):
        logits = self.head(self.norm(self.body(self.emb(ids)))).float()
        shifted = logits[:, :-1, :].contiguous()
        return F.cross_entropy(shifted.view(-1, vocab), labels[:, 1:].reshape(-1))
net = LM().to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=big)
ids = torch.randint(vocab, (b, t), device=dev)
for step in range(4000):
    loss = net(ids, ids)
    opt.zero_grad(set_to_none=True); loss.backward(); opt.step()
