# precision: as-written
# ranks: 4 (torchrun --nproc-per-node 4 dense_embedding.py)
# expected: communication
# because: a batch reads 65,536 of 32 million rows, but ranks all-reduce the dense gradient of 4 GB, which nothing hides
# after: planted
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
tiny, cuda = os.environ.get("TINY") == "1", torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, last = int(os.environ["LOCAL_RANK"]), dist.get_rank() == dist.get_world_size() - 1
dev = torch.device("cuda", rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(dev)
torch.set_float32_matmul_precision("high")
B, ROWS, D, steps = (4, 64, 8, 3) if tiny else (65536, 32_000_000, 32, 300)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, D)  # sparse=False
        self.tower = nn.Sequential(nn.Linear(D, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))

    def forward(self, ids):
        return self.tower(self.table(ids))

with torch.device(dev):
    net = Net()
model = DDP(net, device_ids=[rank] if cuda else None, gradient_as_bucket_view=True)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
ids, y = torch.randint(0, ROWS, (B,), device=dev), torch.randint(0, 2, (B,), device=dev)
for step in range(steps):
    with torch.autocast(dev.type, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(ids), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
