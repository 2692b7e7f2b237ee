# precision: as-written
# expected: float32-units
# because: the 8192 x 8192 cross-correlation is multiplied in float32 outside autocast, 0.82 TFLOP forward and backward without Tensor Cores (about 16 ms), more than the bf16 convolutions, the projector or the batch norms take
# after: facebookresearch/vissl#230 (Barlow Twins loss under mixed precision; #229)
# FLOPs: 7.79e12 = 3*2*4096*(1.45e8 ResNet-18 at 64x64 + 512*8192 + 2*8192**2) + 3*2*2048*8192**2
import os, torch, torch.nn as nn
from torchvision.models import resnet18
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, S, P, steps = (4, 32, 64, 2) if tiny else (2048, 64, 8192, 300)

class Barlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = resnet18()
        self.net.fc = nn.Identity()
        self.proj = nn.Sequential(nn.Linear(512, P, bias=False), nn.BatchNorm1d(P), nn.ReLU(inplace=True),
                                  nn.Linear(P, P, bias=False), nn.BatchNorm1d(P), nn.ReLU(inplace=True),
                                  nn.Linear(P, P, bias=False))
        self.bn = nn.BatchNorm1d(P, affine=False)

    def forward(self, a, b):
        za, zb = self.proj(self.net(a)), self.proj(self.net(b))
        with torch.autocast(dev, enabled=False):
            c = self.bn(za.float()).T @ self.bn(zb.float()) / za.size(0)
            on = (torch.diagonal(c) - 1).square().sum()
            return on + 0.0051 * (c.square().sum() - torch.diagonal(c).square().sum())

model = Barlow().to(dev, memory_format=torch.channels_last)
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=dev == "cuda")
imgs = torch.randn(B, 3, S, S, device=dev).to(memory_format=torch.channels_last)
for step in range(steps):
    a, b = imgs + 0.1 * torch.randn_like(imgs), imgs.flip(3).contiguous(memory_format=torch.channels_last)
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = model(a, b)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print(loss.item())
