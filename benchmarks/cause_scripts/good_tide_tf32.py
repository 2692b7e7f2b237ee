# precision: as-written
# expected: none
# because: a wide residual forecaster in TF32 with a large batch and fused Adam; products of 4,096 x 4,096 take nearly all the time
# after: huggingface/transformers#14608
# flops: 2.055e13
#   = 3*2*16384*6*2*4096**2 + 2*2*16384*2048*4096 + 3*2*16384*4096*512
import os, torch, torch.nn as nn, torch.nn.functional as F
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
B, PAST, W, DEPTH, FUTURE, STEPS = (8, 64, 64, 1, 64, 3) if TINY else (16384, 2048, 4096, 6, 512, 400)

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(W, W), nn.Linear(W, W)
    def forward(self, x):
        return x + self.down(F.relu(self.up(x), inplace=True))

model = nn.Sequential(nn.Linear(PAST, W), *[Residual() for _ in range(DEPTH)], nn.Linear(W, FUTURE)).to(dev)
opt = torch.optim.AdamW(model.parameters(), 1e-4, fused=dev == "cuda")
series = torch.randn(4, B, PAST + FUTURE, device=dev)
past, future = series[..., :PAST].contiguous(), series[..., PAST:].contiguous()
total = torch.zeros((), device=dev)
for step in range(STEPS):
    loss = F.mse_loss(model(past[step % 4]), future[step % 4])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    total += loss.detach()
print("done", float(total) / STEPS)
