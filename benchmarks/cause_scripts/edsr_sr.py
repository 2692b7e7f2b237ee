# precision: fp16-mixed
# expected: layout
# because: 64-channel convolutions in NCHW half precision are wrapped in NCHW/NHWC conversions (six tensors a convolution, about as long as the products), since model and input are not channels_last
# after: ultralytics/ultralytics#13179 (transposes weigh most with small filters); the model asked about in Lornatang/ESRGAN-PyTorch#33
# flops: 3 * 2 * 64 * 96*96 * 9 * (64*64*33 + 64*256 + 4*64*3 + 3*64) - 2*64*9216*9*192
import os, torch, torch.nn as nn, torch.nn.functional as F
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, P, NB, steps = (2, 16, 2, 2) if tiny else (64, 96, 16, 400)

def conv(i, o):
    return nn.Conv2d(i, o, 3, padding=1, bias=False)

class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(conv(c, c), nn.ReLU(inplace=True), conv(c, c))

    def forward(self, x):
        return x + self.body(x)

class EDSR(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.head = conv(3, c)
        self.body = nn.Sequential(*[ResBlock(c) for _ in range(NB)], conv(c, c))
        self.tail = nn.Sequential(conv(c, 4 * c), nn.PixelShuffle(2), conv(c, 3))

    def forward(self, x):
        x = self.head(x)
        return self.tail(x + self.body(x))

model = EDSR().to(dev)
opt = torch.optim.Adam(model.parameters(), lr=1e-4, fused=dev == "cuda")
hr = [torch.rand(B, 3, 2 * P, 2 * P, device=dev) for _ in range(4)]
lr = [F.avg_pool2d(h, 2) for h in hr]
for step in range(steps):
    sr = model(lr[step % 4])
    loss = F.l1_loss(sr, hr[step % 4])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print(loss.item())
