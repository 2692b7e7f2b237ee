# the depthwise Conv1d with a long kernel (native conv_depthwise2d kernels, forward, input and weight gradient, without Tensor Cores); use a fused kernel, an FFT convolution, or a scan
# after: pytorch/pytorch#75747
# expected: grouped-convolutions
# precision: bf16-mixed
# flops: 16384 * 6 * (2 * 11 * 768**2 + 768 * 4096 + 2 * 768 * 512)
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
d, t, b, layers, vocab = (768, 512, 32, 2, 4096) if big else (16, 16, 2, 1, 32)
class Mix(nn.Module):                                  # time mixing with one long causal filter per channel
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.kv, self.r, self.o = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.conv = nn.Conv1d(d, d, t, groups=d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(self, x):
        h = self.n1(x)
        c = self.conv(F.pad(self.kv(h).transpose(1, 2), (t - 1, 0))).transpose(1, 2)
        x = x + self.o(torch.sigmoid(self.r(h)) * c)
        return x + self.down(F.gelu(self.up(self.n2(x))))
net = nn.Sequential(nn.Embedding(vocab, d), *[Mix() for _ in range(layers)], nn.LayerNorm(d), nn.Linear(d, vocab)).to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=big)
ids, y = torch.randint(vocab, (b, t), device=dev), torch.randint(vocab, (b, t), device=dev)
for step in range(5000):
    loss = F.cross_entropy(net(ids).flatten(0, 1), y.flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
