# precision: as-written
# expected: memory
# because: Mish written as x * tanh(softplus(x)) moves 88 bytes a value in eight element-wise kernels, more than the TF32 convolutions and batch norms cost.
# after: digantamisra98/Mish#18
# flops: 3*8*2*64*16384*64*576 + 2*2*64*16384*64*27 + 3*2*64*256*64*85
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, RES, C, DEPTH, OUT, STEPS = (2, 32, 16, 2, 85, 3) if TINY else (64, 128, 64, 8, 85, 300)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
torch.backends.cudnn.benchmark = True

class Mish(nn.Module):
    def forward(self, x):
        return x * torch.tanh(F.softplus(x))

class ConvBN(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv = nn.Conv2d(i, o, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(o)
        self.act = Mish()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))

model = nn.Sequential(
    ConvBN(3, C), *[ConvBN(C, C) for _ in range(DEPTH)], nn.MaxPool2d(8), nn.Conv2d(C, OUT, 1)
).to(dev, memory_format=torch.channels_last)
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=dev == "cuda")
images = [
    torch.randn(B, 3, RES, RES, device=dev).to(memory_format=torch.channels_last) for _ in range(4)
]
grids = [torch.rand(B, OUT, RES // 8, RES // 8, device=dev) for _ in range(4)]

for step in range(STEPS):
    pred = model(images[step % 4])
    loss = F.binary_cross_entropy_with_logits(pred, grids[step % 4])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 100 == 0:
        print(step, loss.item())
