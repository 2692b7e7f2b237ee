# precision: as-written
# expected: rank-imbalance
# because: the samples are sorted by length and cut into contiguous halves, so rank 1 always trains on sequences about twice as long and rank 0 waits for it in the all-reduce
# after: lightseekorg/TorchSpec#13
# ranks: 2 (torchrun --nproc-per-node 2 ddp_sft_chunks.py)
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
TINY = os.environ.get("TINY") == "1"
cuda = torch.cuda.is_available()
dev = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(dev)
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
B, D, DEPTH, V, UNIT, STEPS = (2, 64, 1, 128, 4, 3) if TINY else (16, 1024, 12, 8192, 64, 400)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
    def forward(self, x):
        b, l, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, l, 3, d // 64, 64).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, l, d))
        return x + self.mlp(self.n2(x))

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(V, D), *[Block() for _ in range(DEPTH)], nn.LayerNorm(D), nn.Linear(D, V)).to(dev)
model = nn.parallel.DistributedDataParallel(model, device_ids=[dev.index] if cuda else None, gradient_as_bucket_view=True)
opt = torch.optim.AdamW(model.parameters(), 1e-4, fused=cuda)

lengths = sorted((torch.randint(4, 25, (4096,)) * UNIT).tolist())
share = len(lengths) // world
mine = lengths[rank * share:(rank + 1) * share]
order = torch.randperm(share // B)
for step in range(STEPS):
    start = int(order[step % len(order)]) * B
    length = max(mine[start:start + B])
    ids = torch.randint(0, V, (B, length), device=dev)
    with torch.autocast(dev.type, torch.bfloat16):
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print("done", float(loss))
dist.destroy_process_group()
