"""In the style of PyTorch's word language model: no loader, a hidden state that is carried on, clipping; no main()."""

import torch
from by_hand import args, autocast, grad_scaler, log
from torch import nn

torch.manual_seed(1111)
n = args.size
tokens = torch.randint(50 * n, (args.steps * 5 + 1, 4 * n)).to(args.device)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = (
            nn.Embedding(50 * n, 12 * n),
            nn.GRU(12 * n, 12 * n),
            nn.Linear(12 * n, 50 * n),
        )

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.encoder(words), hidden)
        return torch.log_softmax(self.decoder(output).view(-1, 50 * n), dim=1), hidden


model, criterion = RNNModel().to(args.device), nn.NLLLoss()
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), grad_scaler()
model.train()
hidden = torch.zeros(1, 4 * n, 12 * n).to(args.device)
for i in range(0, args.steps * 5, 5):
    data, targets = tokens[i : i + 5], tokens[i + 1 : i + 6].view(-1)
    model.zero_grad()
    hidden = hidden.detach().float()
    with autocast():
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    scaler.step(optimizer)
    scaler.update()
    log(loss)
