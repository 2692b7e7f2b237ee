"""In the style of nanoGPT: get_batch, micro-batches, clipping, fused settings of AdamW by group, a closing estimate."""

import torch
from by_hand import More, args, autocast, grad_scaler, log
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1337)
n = args.size
text = torch.randint(40 * n, (500 * n,))


def get_batch():
    starts = torch.randint(len(text) - 8 * n - 1, (4,)).tolist()
    parts = (torch.stack([text[i + first : i + first + 8 * n] for i in starts]) for first in (0, 1))
    return [part.to(args.device) for part in parts]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(40 * n, 16 * n), nn.Embedding(8 * n, 16 * n)
        self.more = More(16 * n)
        self.attn, self.ln, self.head = (
            nn.Linear(16 * n, 48 * n),
            nn.LayerNorm(16 * n),
            nn.Linear(16 * n, 40 * n, bias=False),
        )

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        parts = self.attn(self.ln(x)).split(16 * n, dim=2)
        q, k, v = (part.unflatten(2, (max(1, n // 4), -1)).transpose(1, 2) for part in parts)  # heads of width 64
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(self.ln(self.more(x)))
        return logits, F.cross_entropy(logits.view(-1, 40 * n), targets.view(-1))


model = GPT().to(args.device)
groups = [
    {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer, scaler = torch.optim.AdamW(groups, lr=1e-3 / n, betas=(0.9, 0.95)), grad_scaler()
x, y = get_batch()
for _ in range(args.steps):
    losses = []
    for _ in range(2):
        with autocast():
            _, loss = model(x, y)
            loss = loss / 2
        x, y = get_batch()
        scaler.scale(loss).backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    log(*losses)
