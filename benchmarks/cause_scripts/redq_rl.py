# precision: as-written
# expected: launches
# because: ten small critics in a Python loop, four updates and soft target loops make thousands of kernels of a few microseconds each, so the GPU waits for the host.
# after: Motphys/UniLab#662
import copy
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, OBS, ACT, HID, CRITICS, UTD, STEPS = (8, 8, 2, 16, 2, 2, 3) if TINY else (256, 64, 16, 256, 10, 4, 500)

def mlp(i, o):
    return nn.Sequential(nn.Linear(i, HID), nn.ReLU(), nn.Linear(HID, HID), nn.ReLU(), nn.Linear(HID, o))

actor = mlp(OBS, 2 * ACT).to(dev)
critics = nn.ModuleList(mlp(OBS + ACT, 1) for _ in range(CRITICS)).to(dev)
targets = copy.deepcopy(critics).requires_grad_(False)
opt_q = torch.optim.Adam(critics.parameters(), lr=3e-4)
opt_pi = torch.optim.Adam(actor.parameters(), lr=3e-4)
SIZE = 1000 if TINY else 100_000                    # the replay buffer lives on the GPU
obs, nxt = torch.randn(SIZE, OBS, device=dev), torch.randn(SIZE, OBS, device=dev)
act, rew = torch.rand(SIZE, ACT, device=dev) * 2 - 1, torch.randn(SIZE, 1, device=dev)

def policy(o):
    mean, log_std = actor(o).chunk(2, -1)
    a = torch.tanh(mean + torch.randn_like(mean) * log_std.clamp(-5, 2).exp())
    return a, -log_std.sum(-1, keepdim=True)

for step in range(STEPS):
    for _ in range(UTD):
        idx = torch.randint(0, SIZE, (B,), device=dev)
        with torch.no_grad():
            a2, logp = policy(nxt[idx])
            x2 = torch.cat([nxt[idx], a2], -1)
            y = rew[idx] + 0.99 * (torch.stack([t(x2) for t in targets]).amin(0) - 0.1 * logp)
        x = torch.cat([obs[idx], act[idx]], -1)
        q_loss = sum(F.mse_loss(c(x), y) for c in critics)
        opt_q.zero_grad(); q_loss.backward(); opt_q.step()
        with torch.no_grad():
            for p, t in zip(critics.parameters(), targets.parameters()):
                t.mul_(0.995).add_(p, alpha=0.005)
    a, logp = policy(obs[idx])
    pi_loss = (0.1 * logp - torch.stack([c(torch.cat([obs[idx], a], -1)) for c in critics]).mean(0)).mean()
    opt_pi.zero_grad(); pi_loss.backward(); opt_pi.step()
