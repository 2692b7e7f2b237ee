"""A script with AMP of its own: a decorator that a switch enables, and a loss that is kept out."""

import torch
from by_hand import DTYPES, More, args, grad_scaler, log
from torch import nn

torch.manual_seed(8)
n = args.size
is_on = args.amp != "none"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.more, self.fc = nn.Conv2d(3, 8 * n, 3), More(8 * n, 3), nn.Linear(8 * n, 4)

    @torch.autocast(args.device, dtype=DTYPES.get(args.amp, torch.bfloat16), enabled=is_on)
    def forward(self, x):
        return self.fc(self.more(self.conv(x).relu()).mean((2, 3)))


model = Net().to(args.device)
optimizer, scaler = torch.optim.NAdam(model.parameters(), lr=1e-2 / n), grad_scaler()
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
images, labels = torch.randn(6 * n, 3, 10, 10).to(args.device), torch.randint(4, (6 * n,)).to(args.device)
for _ in range(args.steps):
    output = model(images)
    with torch.autocast(args.device, enabled=False):
        loss = nn.functional.cross_entropy(output.float(), labels)
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale:  # the step was not skipped
        scheduler.step()
    optimizer.zero_grad()
    log(loss)
