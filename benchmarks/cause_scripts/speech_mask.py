# precision: as-written
# expected: alignment
# because: every Linear is 1025x1025 (n_fft 2048), so all bf16 products have odd leading dimensions and use the slow unaligned kernels.
# after: allenai/allennlp#4868
# flops: 3*2*65536*1025*1025*12 - 2*65536*1025*1025
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, T, DEPTH, STEPS = (2, 16, 2, 3) if TINY else (128, 512, 12, 400)
BINS = 2048 // 2 + 1


class MaskNet(nn.Module):
    """Speech enhancement: a mask for every frame of a magnitude spectrogram."""
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(BINS, BINS) for _ in range(DEPTH))

    def forward(self, spec):
        h = spec
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i + 1 < len(self.layers):
                h = F.relu(h, inplace=True)
        return torch.sigmoid(h)


model = MaskNet().to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=dev == "cuda")
noisy = [torch.rand(B, T, BINS, device=dev, dtype=torch.bfloat16) for _ in range(4)]
clean = [n * torch.rand_like(n) for n in noisy]

for step in range(STEPS):
    x, y = noisy[step % 4], clean[step % 4]
    with torch.autocast(dev, dtype=torch.bfloat16):
        mask = model(x)
        loss = (mask * x - y).abs().mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 100 == 0:
        print(step, loss.item())
