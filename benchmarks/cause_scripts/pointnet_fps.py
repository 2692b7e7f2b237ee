# precision: as-written
# expected: input
# because: farthest point sampling in numpy inside __getitem__ costs some 5 ms a cloud, so four workers need 80 ms for a batch that the GPU trains in about 5.
# after: yanx27/Pointnet_Pointnet2_pytorch#50
# flops: 3*2*65536*(3*64 + 64*128 + 128*1024 + 1024*1024 + 1024*512)
import os
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, RAW, SEEDS, PTS, STEPS, WORKERS = (4, 64, 8, 32, 3, 0) if TINY else (64, 2048, 96, 1024, 300, 4)
torch.backends.cuda.matmul.allow_tf32 = True


class Clouds(Dataset):
    def __len__(self):
        return B * STEPS

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        xyz = rng.standard_normal((RAW, 3), dtype=np.float32)
        dist, far, chosen = np.full(RAW, 1e10, np.float32), 0, []
        for _ in range(SEEDS):                      # farthest point sampling
            chosen.append(far)
            dist = np.minimum(dist, ((xyz - xyz[far]) ** 2).sum(-1))
            far = int(dist.argmax())
        rest = rng.permutation(RAW)[: PTS - SEEDS]
        xyz = xyz[np.concatenate([np.array(chosen), rest])]
        return torch.from_numpy(xyz), i % 40


model = nn.Sequential(
    nn.Linear(3, 64), nn.ReLU(True), nn.Linear(64, 128), nn.ReLU(True), nn.Linear(128, 1024), nn.ReLU(True),
    nn.Linear(1024, 1024), nn.ReLU(True), nn.Linear(1024, 512)).to(dev)
head = nn.Linear(512, 40).to(dev)
opt = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3, fused=dev == "cuda")
loader = DataLoader(Clouds(), batch_size=B, num_workers=WORKERS, pin_memory=dev == "cuda", drop_last=True)

for step, (xyz, y) in enumerate(loader):
    xyz, y = xyz.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
    loss = F.cross_entropy(head(model(xyz).amax(1)), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
