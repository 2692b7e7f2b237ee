import torch, pyro, pyro.distributions as dist; from pyro.infer import SVI, Trace_ELBO; from pyro.infer.autoguide import AutoNormal; from pyro.nn import PyroModule, PyroSample; from torch import nn
class BayesianRegression(PyroModule):
    def __init__(self, i, o):
        super().__init__(); self.linear = PyroModule[nn.Linear](i, o)
        self.linear.weight = PyroSample(dist.Normal(0., 1.).expand([o, i]).to_event(2)); self.linear.bias = PyroSample(dist.Normal(0., 10.).expand([o]).to_event(1))
    def forward(self, x, y=None):
        sigma = pyro.sample("sigma", dist.Uniform(0., 10.)); mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", x.shape[0]): pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean
x = torch.randn(170, 3); y = x.sum(1) + 0.1 * torch.randn(170)
model = BayesianRegression(3, 1); guide = AutoNormal(model)
svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), loss=Trace_ELBO()); pyro.clear_param_store()
for j in range(1500):
    loss = svi.step(x, y)
    if j % 100 == 0: print("[iteration %04d] loss: %.4f" % (j + 1, loss / len(y)))
