# precision: as-written
# expected: none
# because: behaviour cloning with wide layers in TF32 by choice, batch 16384, fused Adam, a log line every 100 steps: long products and little else
# after: pytorch/FBGEMM#4767 (enable TF32 on H100; also deepmodeling/deepmd-kit#4499)
# flops: 3*2*16384*(3*4096**2 + 4096*64) + 2*2*16384*512*4096
import os, torch, torch.nn as nn, torch.nn.functional as F
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
B, OBS, W, ACT, steps = (32, 64, 64, 64, 2) if tiny else (16384, 512, 4096, 64, 600)
policy = nn.Sequential(nn.Linear(OBS, W), nn.ReLU(inplace=True), nn.Linear(W, W), nn.ReLU(inplace=True),
                       nn.Linear(W, W), nn.ReLU(inplace=True), nn.Linear(W, W), nn.ReLU(inplace=True),
                       nn.Linear(W, ACT)).to(dev)
opt = torch.optim.Adam(policy.parameters(), lr=3e-4, fused=dev == "cuda")
obs = torch.randn(8, B, OBS, device=dev)
act = torch.tanh(torch.randn(8, B, ACT, device=dev))
for step in range(steps):
    loss = F.mse_loss(torch.tanh(policy(obs[step % 8])), act[step % 8])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 100 == 99:
        print(step, loss.item())
