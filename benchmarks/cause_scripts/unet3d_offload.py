# precision: as-written
# expected: host-copies
# because: save_on_cpu sends every saved activation, 1 to 2 GB a step, to pinned host memory in the forward and back in the backward over PCIe without overlap, some 50 ms against 30 ms or less of kernels
# after: neuraloperator/neuraloperator#624
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cudnn.benchmark = True
B, SIDE, STEPS = (1, 16, 3) if TINY else (2, 80, 300)


class Double(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.Conv3d(i, o, 3, padding=1, bias=False), nn.InstanceNorm3d(o), nn.ReLU(inplace=True),
                         nn.Conv3d(o, o, 3, padding=1, bias=False), nn.InstanceNorm3d(o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, w=(32, 64, 128, 256)):
        super().__init__()
        self.down = nn.ModuleList(Double(i, o) for i, o in zip((8,) + w[:-1], w))
        self.up = nn.ModuleList(nn.ConvTranspose3d(i, o, 2, 2) for i, o in zip(w[:0:-1], w[-2::-1]))
        self.dec = nn.ModuleList(Double(2 * o, o) for o in w[-2::-1])
        self.head = nn.Conv3d(w[0], 8, 1)

    def forward(self, x):
        skips = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool3d(x, 2) if i else x)
            skips.append(x)
        skips.pop()
        for up, dec in zip(self.up, self.dec):
            x = dec(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


net = UNet().to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=dev == "cuda")
for step in range(STEPS):
    vol = torch.randn(B, 8, SIDE, SIDE, SIDE, device=dev)
    seg = torch.randint(8, (B, SIDE, SIDE, SIDE), device=dev)
    with torch.autograd.graph.save_on_cpu(pin_memory=dev == "cuda"), torch.autocast(dev, torch.bfloat16):
        loss = F.cross_entropy(net(vol), seg)
    opt.zero_grad()
    loss.backward()
    opt.step()
