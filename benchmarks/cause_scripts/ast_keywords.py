# precision: as-written
# expected: padding
# because: one-second commands (98 to 139 frames) are padded with zeros to the 1,024 frames of AudioSet, so at least 86 % of the tokens of every product and all of attention are padding
# after: YuanGongND/ast#87
# flops: 9290023698432
#   = 3*(2*B*T*12*12*768^2 + 12*4*B*T^2*768) + 4*B*T*256*768 + 6*B*768*64, B = 32, T = 512 patches
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, D, DEPTH, STEPS = (2, 64, 1, 3) if TINY else (32, 768, 12, 400)
FRAMES, MELS, CLASSES = 1024, 128, 64


class Commands(torch.utils.data.Dataset):
    def __len__(self):
        return BATCH * STEPS

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(98, 140, (1,), generator=g))
        fbank = 0.5 * torch.randn(n, MELS, generator=g)
        return F.pad(fbank, (0, 0, 0, FRAMES - n)), i % CLASSES


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o, self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Commands(), BATCH, num_workers=0 if TINY else 4, pin_memory=dev == "cuda")
    patch, blocks, head = nn.Conv2d(1, D, 16, 16).to(dev), nn.Sequential(*[Block() for _ in range(DEPTH)]).to(dev), nn.Linear(D, CLASSES).to(dev)
    opt = torch.optim.AdamW([*patch.parameters(), *blocks.parameters(), *head.parameters()], lr=1e-4, fused=dev == "cuda")
    for fbank, label in loader:
        fbank, label = fbank.to(dev, non_blocking=True), label.to(dev, non_blocking=True)
        with torch.autocast(dev, torch.bfloat16):
            x = blocks(patch(fbank.unsqueeze(1)).flatten(2).transpose(1, 2)).mean(1)
            loss = F.cross_entropy(head(x), label)
        opt.zero_grad(); loss.backward(); opt.step()
