# no serious cause (a wide sparse autoencoder: two large matmuls in bf16 with a fused optimizer; the power limit, or at most a small memory-bound share)
# after: ai-safety-foundation/sparse_autoencoder#198
# expected: none
# precision: as-written
# flops: 16384 * 4096 * 32768 * 10
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
d, latents, b = (4096, 32_768, 16_384) if big else (32, 128, 8)
class SAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(d, latents), nn.Linear(latents, d)
    def forward(self, x):
        z = F.relu(self.enc(x))
        return self.dec(z), z.mean()
net = SAE().to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=big)
acts = torch.randn(4 * b, d, device=dev, dtype=torch.bfloat16)   # activations of a language model, made before
for step in range(5000):
    x = acts[(step % 4) * b:(step % 4 + 1) * b]
    with torch.autocast(dev, dtype=torch.bfloat16):
        y, sparsity = net(x)
        loss = F.mse_loss(y, x) + 0.1 * sparsity
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
