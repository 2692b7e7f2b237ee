import math, torch, gpytorch
train_x = torch.linspace(0, 1, 100); train_y = torch.sin(train_x * (2 * math.pi)) + torch.randn(train_x.size()) * math.sqrt(0.04)
class ExactGPModel(gpytorch.models.ExactGP):
    def __init__(self, train_x, train_y, likelihood):
        super().__init__(train_x, train_y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean(); self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    def forward(self, x): return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
likelihood = gpytorch.likelihoods.GaussianLikelihood(); model = ExactGPModel(train_x, train_y, likelihood)
model.train(); likelihood.train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1); mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
for i in range(400):
    optimizer.zero_grad(); loss = -mll(model(train_x), train_y); loss.backward()
    if i % 50 == 0: print(i, loss.item(), likelihood.noise.item())
    optimizer.step()
