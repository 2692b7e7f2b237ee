# precision: as-written
# expected: float32-units
# because: the quantiser leaves autocast and compares 65536 vectors with 16384 codes in float32 without TF32, 1.1 TFLOP on the plain units against 3.5 TFLOP of bf16 convolutions.
# after: lucidrains/vector-quantize-pytorch#114
# flops: 2*65536*512*16384 + 3*(4*2*64*1024*512*4096 + 2*2*64*16384*128*48) - 2*64*16384*128*48
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, RES, W, CODES, STEPS = (2, 32, 8, 32, 3) if TINY else (64, 256, 128, 16384, 300)
torch.backends.cudnn.benchmark = True

class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(CODES, 4 * W)

    @torch.autocast(dev, enabled=False)
    def forward(self, z):
        flat = z.float().permute(0, 2, 3, 1).reshape(-1, 4 * W)
        with torch.no_grad():                       # |e|^2 - 2 z.e, the |z|^2 changes no argmin
            e = self.codes.weight
            idx = torch.addmm(e.square().sum(1), flat, e.t(), alpha=-2).argmin(1)
        q = self.codes(idx)
        loss = F.mse_loss(q, flat.detach()) + 0.25 * F.mse_loss(flat, q.detach())
        q = flat + (q - flat).detach()
        return q.view(z.shape[0], z.shape[2], z.shape[3], -1).permute(0, 3, 1, 2), loss

def act():
    return nn.ReLU(inplace=True)

enc = nn.Sequential(
    nn.Conv2d(3, W, 4, 2, 1), act(), nn.Conv2d(W, 2 * W, 4, 2, 1), act(), nn.Conv2d(2 * W, 4 * W, 4, 2, 1))
dec = nn.Sequential(
    nn.ConvTranspose2d(4 * W, 2 * W, 4, 2, 1), act(), nn.ConvTranspose2d(2 * W, W, 4, 2, 1), act(),
    nn.ConvTranspose2d(W, 3, 4, 2, 1))
model = nn.ModuleList([enc, Quantiser(), dec]).to(dev, memory_format=torch.channels_last)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=dev == "cuda")
images = [torch.rand(B, 3, RES, RES, device=dev).to(memory_format=torch.channels_last) for _ in range(4)]

for step in range(STEPS):
    x = images[step % 4]
    with torch.autocast(dev, dtype=torch.bfloat16):
        q, commit = model[1](model[0](x))
        loss = F.mse_loss(model[2](q), x) + commit
    opt.zero_grad(set_to_none=True); loss.backward(); opt.step()
