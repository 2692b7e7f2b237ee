"""In the style of PyTorch's word language model: no loader, a hidden state that is carried on, clipping; no main()."""

import torch
from by_hand import args, autocast, grad_scaler, log
from torch import nn

torch.manual_seed(1111)
tokens = torch.randint(50, (args.steps * 5 + 1, 4))


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(50, 12), nn.GRU(12, 12), nn.Linear(12, 50)

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.encoder(words), hidden)
        return torch.log_softmax(self.decoder(output).view(-1, 50), dim=1), hidden


model, criterion = RNNModel(), nn.NLLLoss()
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), grad_scaler()
model.train()
hidden = torch.zeros(1, 4, 12)
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
