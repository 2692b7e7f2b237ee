# precision: as-written
# ranks: 2 (torchrun --nproc-per-node 2 ddp_accumulate.py)
# expected: gradient-sync
# because: DDP all-reduces 2.7 GB of float32 gradients in each of eight micro-steps (about 8 ms, only partly hidden) where one without no_sync() left out would do, and a micro-step of 128 tokens has some 5 ms of work
# after: pytorch/pytorch#43201 (also ultralytics/yolov5#790)
# flops: 8 * (3*2*128*6*12*3072**2 + 3*4*2*64*64*3072*6) + 8*(3*2*2*3072*2)
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
tiny = os.environ.get("TINY") == "1"
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank = int(os.environ["LOCAL_RANK"])
dev = f"cuda:{rank}" if cuda else "cpu"
if cuda:
    torch.cuda.set_device(rank)
torch.backends.cuda.matmul.allow_tf32 = True
B, T, D, L, ACC, steps = (2, 8, 64, 2, 2, 2) if tiny else (2, 64, 3072, 6, 8, 300)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, D // 64, 64).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.n2(x))))

class Reward(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.body, self.head = nn.Embedding(4096, D), nn.Sequential(*[Block() for _ in range(L)]), nn.Linear(D, 2)

    def forward(self, t):
        return self.head(self.body(self.emb(t)).mean(1))

model = DDP(Reward().to(dev), device_ids=[rank] if cuda else None, gradient_as_bucket_view=True)
opt = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
text = torch.randint(0, 4096, (ACC, B, T), device=dev)
label = torch.randint(0, 2, (ACC, B), device=dev)
for step in range(steps):
    opt.zero_grad(set_to_none=False)
    for m in range(ACC):
        (F.cross_entropy(model(text[m]), label[m]) / ACC).backward()
    opt.step()
dist.destroy_process_group()
