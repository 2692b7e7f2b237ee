"""Train a small GPT on the bytes of a text: an ordinary script, in PyTorch's default precision, that knows no castwise.

python train.py --width 768 --layers 12
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--text", help="a file to train on; random bytes without one")
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--context", type=int, default=512)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=3e-4)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()


class Bytes(Dataset):
    """Stretches of a text, each with the byte that follows every one of its own."""

    def __init__(self):
        text = Path(args.text).read_bytes() if args.text else bytes(torch.randint(256, (2**20,)).tolist())
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self):
        return len(self.bytes) - args.context

    def __getitem__(self, start):
        stretch = self.bytes[start : start + args.context + 1].long()
        return stretch[:-1], stretch[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv, self.out = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.mlp = nn.Sequential(
            nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
        )

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).unflatten(2, (3, args.width // 64, 64))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, args.width), nn.Embedding(args.context, args.width)
        self.blocks = nn.Sequential(*(Block() for _ in range(args.layers)))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, 256)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def main():
    model = GPT().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(Bytes(), batch_size=args.batch_size, shuffle=True, num_workers=2, drop_last=True)
    for epoch in range(args.epochs):
        for step, (tokens, targets) in enumerate(loader):
            logits = model(tokens.to(args.device))
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.to(args.device).flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 100 == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.3f}")
        torch.save(model.state_dict(), "gpt.pt")


if __name__ == "__main__":
    main()
