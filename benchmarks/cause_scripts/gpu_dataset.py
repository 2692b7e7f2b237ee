# the input pipeline in the main process (a DataLoader that takes samples one by one out of tensors already on the GPU: thousands of tiny operations and a stack per batch, the GPU idles); index the resident tensors with a whole batch of indices (x[perm[i:i+b]]) or give the data set __getitems__
# after: pytorch/pytorch#106704
# expected: input
# precision: as-written
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
big = torch.cuda.is_available()
dev = "cuda" if big else "cpu"
n, f, w, b = (262_144, 100, 1024, 1024) if big else (256, 10, 32, 16)
class Table(Dataset):
    def __init__(self):
        self.x, self.y = torch.randn(n, f, device=dev), torch.randint(10, (n,), device=dev)
        self.mean, self.std = self.x.mean(0), self.x.std(0)
    def __len__(self):
        return n
    def __getitem__(self, i):
        return (self.x[i] - self.mean) / self.std, self.y[i]
loader = DataLoader(Table(), batch_size=b, shuffle=True, drop_last=True)
net = nn.Sequential(nn.Linear(f, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 10)).to(dev)
opt = torch.optim.Adam(net.parameters(), lr=1e-3, fused=big)
for epoch in range(200):
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
