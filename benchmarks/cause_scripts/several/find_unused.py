# precision: as-written
# ranks: 4 (torchrun --nproc-per-node 4 find_unused.py)
# expected: settings or launches
# because: find_unused_parameters=True walks a graph of 4,000 nodes after each forward pass, while the GPU waits for the host, which launches as many kernels, too
# after: planted; DistributedDataParallel warns of it
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
tiny, cuda = os.environ.get("TINY") == "1", torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, last = int(os.environ["LOCAL_RANK"]), dist.get_rank() == dist.get_world_size() - 1
dev = torch.device("cuda", rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(dev)
torch.set_float32_matmul_precision("high")
B, D, L, steps = (4, 16, 4, 3) if tiny else (256, 256, 1000, 300)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts, self.head = nn.ModuleList(nn.Linear(D, D) for _ in range(L)), nn.Linear(D, 16)

    def forward(self, x):
        for part in self.parts:
            x = x + part(x).tanh() / L
        return self.head(x)

model = DDP(Net().to(dev), device_ids=[rank] if cuda else None, find_unused_parameters=True)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
x, y = torch.randn(B, D, device=dev), torch.randint(0, 16, (B,), device=dev)
for step in range(steps):
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
