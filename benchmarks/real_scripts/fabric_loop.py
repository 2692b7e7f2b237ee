import torch, lightning as L
from torch import nn
fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed"); fabric.launch(); fabric.seed_everything(1)
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(32 * 13 * 13, 10))
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(3200, 1, 28, 28), torch.randint(10, (3200,))), batch_size=32, shuffle=True)
model, optimizer = fabric.setup(model, optimizer); loader = fabric.setup_dataloaders(loader)
for epoch in range(3):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        fabric.backward(loss); optimizer.step()
    fabric.print(epoch, loss.item()); fabric.save("mnist.ckpt", {"model": model, "optimizer": optimizer})
