import torch, torch.nn.functional as F
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters())
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1600, 3, 32, 32), torch.randint(10, (1600,))), batch_size=16, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
model.train()
for epoch in range(4):
    for source, targets in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(source), targets)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(epoch, loss.item()); accelerator.save_state(f"ckpt/{epoch}")
