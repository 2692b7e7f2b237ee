# precision: as-written
# ranks: 4 (torchrun --nproc-per-node 4 accumulates.py)
# expected: gradient-sync
# because: each of eight passes of an update all-reduces 1.6 GB of gradients, where one under no_sync() would do
# after: planted; pytorch/pytorch#43201
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
tiny, cuda = os.environ.get("TINY") == "1", torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, last = int(os.environ["LOCAL_RANK"]), dist.get_rank() == dist.get_world_size() - 1
dev = torch.device("cuda", rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(dev)
torch.set_float32_matmul_precision("high")
B, D, L, ACC, steps = (4, 32, 2, 2, 3) if tiny else (512, 4096, 24, 8, 300)

net = nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(L)], nn.Linear(D, 16)).to(dev)
model = DDP(net, device_ids=[rank] if cuda else None, gradient_as_bucket_view=True)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
x, y = torch.randn(ACC, B, D, device=dev), torch.randint(0, 16, (ACC, B), device=dev)
for step in range(steps):
    opt.zero_grad()
    for part in range(ACC):
        with torch.autocast(dev.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x[part]), y[part]) / ACC
        loss.backward()
    opt.step()
dist.destroy_process_group()
