# precision: as-written
# ranks: 4 (torchrun --nproc-per-node 4 small_buckets.py)
# expected: communication
# because: 512 gradients of 1 MiB are ready at once, and go in 512 all-reduces that each cost their start
# after: planted; pytorch/pytorch#118421 asks for larger buckets
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
tiny, cuda = os.environ.get("TINY") == "1", torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, last = int(os.environ["LOCAL_RANK"]), dist.get_rank() == dist.get_world_size() - 1
dev = torch.device("cuda", rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(dev)
torch.set_float32_matmul_precision("high")
B, D, PIECES, steps = (4, 32, 4, 3) if tiny else (2048, 1024, 512, 300)

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.pieces = nn.ParameterList(torch.randn(256, D, device=dev) / D for _ in range(PIECES))

    def forward(self, x):
        return F.linear(x, torch.cat(list(self.pieces)))

model = DDP(Head(), device_ids=[rank] if cuda else None, bucket_cap_mb=1)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
x, y = torch.randn(B, D, device=dev), torch.randint(0, 256 * PIECES, (B,), device=dev)
for step in range(steps):
    with torch.autocast(dev.type, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
