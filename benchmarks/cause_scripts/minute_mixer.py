# precision: as-written
# expected: alignment
# because: all large products are over the 1,439 differences of a day of minutes and a hidden size of 2,877, both odd, so float16 rows are only 2-byte aligned and cuBLAS takes kernels several times slower than for 1,440 and 2,880
# after: allenai/allennlp#4868
# flops: 3269410947072
#   = 4 blocks * 3 * 2 * 2*M*1439*2877 + 6*M*1439*96, M = 32*512 rows
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, SENSORS, STEPS = (2, 4, 3) if TINY else (32, 512, 400)
MINUTES = 1440          # one day, first differences taken below
HORIZON = 96


class TimeMix(nn.Module):
    def __init__(self, length):
        super().__init__()
        hidden = 2 * length - 1
        self.norm = nn.LayerNorm(length)
        self.fc1, self.fc2 = nn.Linear(length, hidden), nn.Linear(hidden, length)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


length = MINUTES - 1
net = nn.Sequential(*[TimeMix(length) for _ in range(4)], nn.Linear(length, HORIZON)).to(dev)
opt = torch.optim.Adam(net.parameters(), lr=1e-4, fused=dev == "cuda")
scaler = torch.amp.GradScaler(dev, enabled=dev == "cuda")
amp = torch.float16 if dev == "cuda" else torch.bfloat16
for step in range(STEPS):
    series = torch.randn(BATCH, SENSORS, MINUTES, device=dev)
    target = torch.randn(BATCH, SENSORS, HORIZON, device=dev)
    with torch.autocast(dev, amp):
        loss = F.mse_loss(net(series.diff(dim=-1)), target)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
