# precision: as-written
# ranks: 4 (torchrun --nproc-per-node 4 sleeping_rank.py)
# expected: rank-imbalance
# because: the last rank sleeps 40 ms in each step, as long as its kernels take, and the others wait in the all-reduce
# after: planted: a rank that writes its log, for example
import time
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
tiny, cuda = os.environ.get("TINY") == "1", torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, last = int(os.environ["LOCAL_RANK"]), dist.get_rank() == dist.get_world_size() - 1
dev = torch.device("cuda", rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(dev)
torch.set_float32_matmul_precision("high")
B, D, L, steps = (4, 32, 2, 3) if tiny else (16384, 4096, 6, 300)

net = nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(L)], nn.Linear(D, 16)).to(dev)
model = DDP(net, device_ids=[rank] if cuda else None, gradient_as_bucket_view=True)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
x, y = torch.randn(B, D, device=dev), torch.randint(0, 16, (B,), device=dev)
for step in range(steps):
    with torch.autocast(dev.type, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    if last:
        time.sleep(0.001 if tiny else 0.04)  # a rank that writes its log, for example
    opt.zero_grad()
    loss.backward()
    opt.step()
    if cuda:
        torch.cuda.synchronize()  # the host cannot run ahead of the sleep
dist.destroy_process_group()
