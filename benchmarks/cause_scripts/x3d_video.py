# precision: bf16-mixed
# expected: grouped-convolutions or missing-kernel
# because: the 3x3x3 depthwise convolutions on the widened channels run on slow direct kernels, forward and worse backward, and take most of the step
# after: pytorch/pytorch#37406 (also #110885, #34089)
import os, torch, torch.nn as nn, torch.nn.functional as F
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True
B, T, S, steps = (1, 4, 32, 2) if tiny else (8, 16, 112, 300)
blocks = [1, 1, 1] if tiny else [3, 5, 8]

class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        mid = cout * 2
        self.a = nn.Conv3d(cin, mid, 1, bias=False)
        self.b = nn.Conv3d(mid, mid, 3, stride=(1, stride, stride), padding=1, groups=mid, bias=False)
        self.c = nn.Conv3d(mid, cout, 1, bias=False)
        self.na, self.nb, self.nc = nn.BatchNorm3d(mid), nn.BatchNorm3d(mid), nn.BatchNorm3d(cout)
        self.same = stride == 1 and cin == cout

    def forward(self, x):
        y = F.relu(self.na(self.a(x)), inplace=True)
        y = F.silu(self.nb(self.b(y)))
        y = self.nc(self.c(y))
        return x + y if self.same else y

layers, cin = [nn.Conv3d(3, 32, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1), bias=False), nn.BatchNorm3d(32), nn.ReLU()], 32
for i, (c, n) in enumerate(zip((32, 64, 128), blocks)):
    for j in range(n):
        layers.append(Block(cin, c, 2 if i and j == 0 else 1))
        cin = c
model = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 400)).to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=dev == "cuda")
clips = [torch.randn(B, 3, T, S, S, device=dev) for _ in range(4)]
labels = torch.randint(0, 400, (4, B), device=dev)
for step in range(steps):
    loss = F.cross_entropy(model(clips[step % 4]), labels[step % 4])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print(loss.item())
