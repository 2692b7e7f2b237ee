# precision: as-written
# expected: casts
# because: the frozen teacher keeps 1.2 billion float32 weights and autocast caches no casts of tensors that need no gradient, so each of the six Euler steps casts them all again: 43 GB of traffic against 22 GB or less for its products
# after: sgl-project/sglang-omni#2262
# flops: 3852115902464
#   = 6 teacher calls * (2*K*(6*12*4096^2 + 2*128*4096) + 6*4*B*T^2*4096) + student 3*(2*K*(6*12*1024^2 + 2*128*1024) + 6*4*B*T^2*1024) - 2*K*128*1024, B = 2, T = 128, K = 256
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
WIDE, SLIM, LAYERS, STEPS = (64, 64, 1, 3) if TINY else (4096, 1024, 6, 300)
B, T, LATENT, EULER = 2, 128, 128, 6


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, -1, 64).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def dit(d):
    return nn.Sequential(nn.Linear(LATENT, d), *[Layer(d) for _ in range(LAYERS)], nn.Linear(d, LATENT)).to(dev)


teacher, student = dit(WIDE).requires_grad_(False).eval(), dit(SLIM)
opt = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=dev == "cuda")
for step in range(STEPS):
    noise = torch.randn(B, T, LATENT, device=dev)
    with torch.autocast(dev, torch.bfloat16):
        with torch.no_grad():
            x = noise
            for _ in range(EULER):
                x = x + teacher(x).float() / EULER
        loss = F.mse_loss(noise + student(noise).float(), x)
    opt.zero_grad(); loss.backward(); opt.step()
