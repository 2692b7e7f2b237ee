# precision: as-written
# expected: none
# because: two wide towers in TF32 (asked for), batch 8,192, all sizes multiples of 64, in-batch softmax, fused Adam: the products take by far the most
# after: tensorflow/tensorflow#49145
# flops: 5909874999296
#   = 2 towers * (3*2*B*4096^2*3 + 2*2*B*512*4096 + 3*2*B*4096*1024) + 3*2*B*B*1024, B = 8192
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True
B, FEATURES, D, OUT, STEPS = (64, 64, 64, 64, 3) if TINY else (8192, 512, 4096, 1024, 400)


def tower():
    layers = [nn.Linear(FEATURES, D), nn.ReLU(inplace=True)]
    for _ in range(3):
        layers += [nn.Linear(D, D), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(D, OUT))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = tower(), tower()

    def forward(self, u, i):
        u = F.normalize(self.user(u), dim=-1)
        i = F.normalize(self.item(i), dim=-1)
        return u @ i.T * 20.0


net = TwoTower().to(dev)
opt = torch.optim.Adam(net.parameters(), lr=1e-4, fused=dev == "cuda")
target = torch.arange(B, device=dev)
for step in range(STEPS):
    users, items = torch.randn(B, FEATURES, device=dev), torch.randn(B, FEATURES, device=dev)
    loss = F.cross_entropy(net(users, items), target)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 100 == 0:
        print(step, loss.item())
