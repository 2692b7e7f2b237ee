# precision: as-written
# ranks: 2 (torchrun --nproc-per-node 2 good_ddp_speech.py)
# expected: none
# because: both ranks have the same 24576 frames a step in bf16, and the one all-reduce of 0.6 GB is hidden behind a backward of tens of milliseconds
# after: karpathy/nanochat#33 (synchronise once an update)
# flops: 3*12*(24*16*1536*1024**2 + 4*16*1536**2*1024) + 2*2*24576*512*1024 + 3*2*24576*1024*512
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
tiny = os.environ.get("TINY") == "1"
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = int(os.environ["LOCAL_RANK"])
dev = f"cuda:{rank}" if cuda else "cpu"
if cuda:
    torch.cuda.set_device(rank)
torch.set_float32_matmul_precision("high")
B, N, D, L, C, steps = (2, 64, 64, 2, 64, 2) if tiny else (16, 1536, 1024, 12, 512, 300)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).view(B, N, 3, D // 64, 64).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))
        return x + self.mlp(self.n2(x))

net = nn.Sequential(nn.Linear(512, D), *[Block() for _ in range(L)], nn.LayerNorm(D), nn.Linear(D, C)).to(dev)
model = DDP(net, device_ids=[rank] if cuda else None, gradient_as_bucket_view=True, static_graph=True)
opt = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=cuda)
frames = [torch.randn(B, N, 512, device=dev) for _ in range(4)]
units = torch.randint(0, C, (4, B, N), device=dev)
for step in range(steps):
    with torch.autocast("cuda" if cuda else "cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(frames[step % 4]).flatten(0, 1), units[step % 4].flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
dist.destroy_process_group()
