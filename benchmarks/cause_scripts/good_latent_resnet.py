# precision: as-written
# expected: none
# because: channels_last bf16 convolutions of 768 channels, cuDNN benchmark, fused AdamW and few element-wise passes; the convolutions take most of the step
# after: huggingface/diffusers#371
# flops: 3.369e13
#   = 3*16*2*64*1024*9*768**2 + (2 + 3)*2*64*1024*9*64*768
import os, torch, torch.nn as nn, torch.nn.functional as F
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, S, C, DEPTH, STEPS = (2, 8, 16, 1, 3) if TINY else (64, 32, 768, 8, 400)
torch.backends.cudnn.benchmark = True

class Res(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(C, C, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(C)
        self.b = nn.Conv2d(C, C, 3, padding=1, bias=False)
    def forward(self, x):
        return x + self.b(F.relu(self.norm(self.a(x)), inplace=True))

model = nn.Sequential(nn.Conv2d(64, C, 3, padding=1, bias=False), *[Res() for _ in range(DEPTH)],
                      nn.Conv2d(C, 64, 3, padding=1, bias=False)).to(dev, memory_format=torch.channels_last)
opt = torch.optim.AdamW(model.parameters(), 1e-4, fused=dev == "cuda")
latents = torch.randn(B, 64, S, S, device=dev).to(memory_format=torch.channels_last)
for step in range(STEPS):
    noise = torch.randn_like(latents)
    t = torch.rand(B, 1, 1, 1, device=dev)
    with torch.autocast(dev, torch.bfloat16):
        out = model((1 - t) * latents + t * noise)
    loss = F.mse_loss(out.float(), noise - latents)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print("done", float(loss))
