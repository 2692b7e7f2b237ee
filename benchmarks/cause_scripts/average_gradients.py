# precision: as-written
# expected: gradient-sync or communication
# because: 2.9 GB of float32 gradients are all-reduced one parameter at a time after the whole backward instead of behind it, about 10 ms or more of a step of about 38 ms
# after: pytorch/examples#1146
# flops: 9199819948032 + 3*24*2*4*512**2*1536
#   = 3*(2*B*T*(24*12*1536^2 + 32768*1536) + 24*2*B*T^2*1536), B = 4, T = 512, causal attention counted half
import os                       # torchrun --nproc-per-node 2 average_gradients.py
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist

TINY, cuda = bool(os.environ.get("TINY")), torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
dev = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(dev)
B, T, D, DEPTH, V, STEPS = (2, 16, 64, 2, 64, 3) if TINY else (4, 512, 1536, 24, 32768, 300)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, -1, 64).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


torch.manual_seed(1234)
model = nn.Sequential(nn.Embedding(V, D), *[Block() for _ in range(DEPTH)], nn.LayerNorm(D), nn.Linear(D, V, bias=False)).to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
torch.manual_seed(dist.get_rank())
for step in range(STEPS):
    tok = torch.randint(V, (B, T + 1), device=dev)
    with torch.autocast(dev.type, torch.bfloat16):
        loss = F.cross_entropy(model(tok[:, :-1]).flatten(0, 1), tok[:, 1:].flatten())
    opt.zero_grad(); loss.backward()
    average_gradients(model)
    opt.step()
dist.destroy_process_group()
