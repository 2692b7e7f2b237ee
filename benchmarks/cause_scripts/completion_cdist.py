# precision: as-written
# expected: missing-kernel
# because: torch.cdist without the product form starts one 32-thread block for each of 67 million pairs of 3-D points, and its backward has 3 of 64 threads busy, which costs tens of ms where the encoder and decoder need a few
# after: pytorch/pytorch#15253
import os
import torch
import torch.nn as nn

TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
B, N, STEPS = (2, 32, 3) if TINY else (16, 2048, 300)


class Completion(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 256))
        self.globe = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1024))
        self.decode = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                                    nn.Linear(1024, 3 * N))

    def forward(self, pts):
        f = self.local(pts)
        f = torch.cat([f, f.amax(1, keepdim=True).expand_as(f)], -1)
        return self.decode(self.globe(f).amax(1)).view(-1, N, 3)


def chamfer(a, b):
    # the product form loses digits for points that nearly coincide
    d = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    return d.amin(2).mean() + d.amin(1).mean()


net = Completion().to(dev)
opt = torch.optim.Adam(net.parameters(), lr=1e-4, fused=dev == "cuda")
for step in range(STEPS):
    full = torch.rand(B, N, 3, device=dev) - 0.5
    partial = full[:, : N // 2] + 0.01 * torch.randn(B, N // 2, 3, device=dev)
    loss = chamfer(net(partial), full)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 100 == 99:
        print(step, loss.item())
