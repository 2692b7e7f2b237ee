# no serious cause but memory-bound work (a U-Net in bf16 and channels_last with aligned channels: batch norm, ReLU, pooling and concatenation at high resolution beside Tensor Core convolutions)
# after: xuebinqin/U-2-Net#178
# expected: none
# precision: bf16-mixed
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
torch.backends.cudnn.benchmark = True
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
w, b, px = ([64, 128, 256, 512, 1024], 24, 256) if big else ([8, 16], 1, 16)
def double(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                         nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([double(i, o) for i, o in zip([8] + w, w)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(o, i, 2, 2) for i, o in zip(w, w[1:])])
        self.merge = nn.ModuleList([double(2 * i, i) for i in w[:-1]])
        self.head = nn.Conv2d(w[0], 8, 1)
    def forward(self, x):
        skips = []
        for k, block in enumerate(self.down):
            x = block(x if k == 0 else F.max_pool2d(x, 2)); skips.append(x)
        for k in reversed(range(len(w) - 1)):
            x = self.merge[k](torch.cat([skips[k], self.up[k](x)], 1))
        return self.head(x)
net = UNet().to(dev, memory_format=torch.channels_last)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=big)
x = torch.randn(b, 8, px, px, device=dev).to(memory_format=torch.channels_last)
y = torch.randint(8, (b, px, px), device=dev)
for step in range(4000):
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
