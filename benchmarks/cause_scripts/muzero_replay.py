# precision: as-written
# expected: host-work or input
# because: each step draws 512 games one by one with numpy.random.choice and sums their bootstrapped returns in Python while the GPU waits
# after: werner-duvaud/muzero-general#117
import os, numpy as np, torch, torch.nn as nn, torch.nn.functional as F
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
GAMES, LEN, B, W, TD, STEPS = (20, 30, 8, 64, 5, 3) if TINY else (2000, 120, 512, 256, 30, 400)
UNROLL = 5

class ReplayBuffer:
    def __init__(self):
        rng = np.random.default_rng(0)
        self.rewards = rng.normal(size=(GAMES, LEN + TD + UNROLL + 1)).tolist()
        self.values = rng.normal(size=(GAMES, LEN + TD + UNROLL + 1)).tolist()
        self.priority = rng.random(GAMES)
    def target(self, g, i):
        value = self.values[g][i + TD] * 0.997 ** TD
        for k, r in enumerate(self.rewards[g][i:i + TD]):
            value += r * 0.997 ** k
        return value
    def get_batch(self):
        games, places, targets = [], [], []
        for _ in range(B):
            g = np.random.choice(GAMES, p=self.priority / self.priority.sum())
            i = int(np.random.randint(LEN))
            games.append(int(g))
            places.append(i)
            targets.append([self.target(g, i + u) for u in range(UNROLL)])
        return np.array(games), np.array(places), np.array(targets, dtype=np.float32)

frames = torch.randint(0, 2, (GAMES, LEN, 64, 8, 8), dtype=torch.uint8, device=dev)
net = nn.Sequential(nn.Conv2d(64, W, 3, padding=1), *[m for _ in range(8) for m in (nn.Conv2d(W, W, 3, padding=1), nn.ReLU())],
                    nn.Flatten(), nn.Linear(64 * W, UNROLL)).to(dev, memory_format=torch.channels_last)
opt = torch.optim.Adam(net.parameters(), 1e-4, fused=dev == "cuda")
buffer = ReplayBuffer()
for step in range(STEPS):
    games, places, targets = buffer.get_batch()
    g, i, t = (torch.from_numpy(a).to(dev, non_blocking=True) for a in (games, places, targets))
    with torch.autocast(dev, torch.bfloat16):
        value = net(frames[g, i].to(torch.bfloat16).contiguous(memory_format=torch.channels_last))
    loss = F.mse_loss(value.float(), t)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print("done", float(loss))
