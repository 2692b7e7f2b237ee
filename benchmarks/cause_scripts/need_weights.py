# attention that is not fused (nn.MultiheadAttention with its default need_weights=True computes the whole T x T matrix, softmax in float32, and its mean over heads, which nobody reads: memory traffic); pass need_weights=False so that scaled_dot_product_attention's flash kernel runs
# after: pytorch/pytorch#100347
# expected: attention
# precision: bf16-mixed
# flops: 16384 * (6 * 6 * 12 * 512**2 + 128 * 512 * (4 + 6)) + 6 * 12 * 8 * 8 * 2048**2 * 64
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
d, heads, layers, b, t = (512, 8, 6, 8, 2048) if big else (32, 2, 1, 2, 16)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
    def forward(self, x):
        h = self.n1(x)
        z, _ = self.attn(h, h, h)
        x = x + z
        return x + self.ff(self.n2(x))
net = nn.Sequential(nn.Linear(128, d), *[Layer() for _ in range(layers)], nn.Linear(d, 128)).to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=big)
x, y = torch.randn(b, t, 128, device=dev), torch.randn(b, t, 128, device=dev)
for step in range(4000):
    loss = F.mse_loss(net(x), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
