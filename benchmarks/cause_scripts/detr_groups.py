# precision: as-written
# expected: optimizer or launches
# because: each of the 332 parameters has its own group, so AdamW's multi-tensor update becomes some ten or more launches and a Python pass per tensor, tens of ms of host time while the GPU has 20 ms of other work or less
# after: roboflow/rf-detr#1409
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, D, ENC, DEC, SIZE, STEPS = (2, 64, 1, 1, 64, 3) if TINY else (8, 384, 18, 6, 512, 300)
QUERIES, CLASSES = 128, 96


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        kw = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.patch = nn.Conv2d(3, D, 16, 16)
        self.pos = nn.Parameter(torch.zeros(1, (SIZE // 16) ** 2, D))
        self.query = nn.Parameter(torch.randn(1, QUERIES, D))
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(D, D // 64, 4 * D, **kw) for _ in range(ENC))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(D, D // 64, 4 * D, **kw) for _ in range(DEC))
        self.cls, self.box = nn.Linear(D, CLASSES), nn.Linear(D, 4)

    def forward(self, img):
        x = self.patch(img).flatten(2).transpose(1, 2) + self.pos
        for layer in self.encoder:
            x = layer(x)
        q = self.query.expand(img.size(0), -1, -1)
        for layer in self.decoder:
            q = layer(q, x)
        return self.cls(q), self.box(q).sigmoid()


net = Detector().to(dev)
groups = []
for name, p in net.named_parameters():          # layer-wise decay of the learning rate
    depth = int(name.split(".")[1]) if name.startswith("encoder") else ENC
    groups.append({"params": [p], "lr": 1e-4 * 0.8 ** (ENC - depth), "weight_decay": 0.0 if p.ndim < 2 else 1e-4})
opt = torch.optim.AdamW(groups)
for step in range(STEPS):
    img = torch.randn(B, 3, SIZE, SIZE, device=dev)
    label, box = torch.randint(CLASSES, (B, QUERIES), device=dev), torch.rand(B, QUERIES, 4, device=dev)
    with torch.autocast(dev, torch.bfloat16):
        logits, pred = net(img)
        loss = F.cross_entropy(logits.flatten(0, 1), label.flatten()) + 5 * F.l1_loss(pred.float(), box)
    opt.zero_grad(); loss.backward(); opt.step()
