# precision: as-written
# expected: float64
# because: the whole network (forward, two derivatives, backward) runs in double precision, set for "accuracy" by the default dtype
# after: lululxvi/deepxde#1650
import os, torch, torch.nn as nn
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_dtype(torch.float64)
N, W, DEPTH, STEPS = (64, 32, 2, 3) if TINY else (49152, 512, 6, 400)

layers = [nn.Linear(2, W), nn.Tanh()]
for _ in range(DEPTH):
    layers += [nn.Linear(W, W), nn.Tanh()]
net = nn.Sequential(*layers, nn.Linear(W, 1)).to(dev)
opt = torch.optim.Adam(net.parameters(), 1e-3, fused=dev == "cuda")
nu = 0.01 / 3.141592653589793

def grad(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]

xt = torch.rand(N, 2, device=dev) * 2 - 1
x0 = torch.rand(N // 8, 2, device=dev) * 2 - 1
x0[:, 1] = 0
u0 = -torch.sin(3.141592653589793 * x0[:, :1])
for step in range(STEPS):
    pts = xt.detach().requires_grad_()
    u = net(pts)
    du = grad(u, pts)
    ux, ut = du[:, :1], du[:, 1:]
    uxx = grad(ux, pts)[:, :1]
    residual = ut + u * ux - nu * uxx
    loss = residual.square().mean() + (net(x0) - u0).square().mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print("done", float(loss.detach()))
