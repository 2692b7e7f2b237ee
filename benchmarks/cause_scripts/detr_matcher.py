# precision: as-written
# expected: host-work
# because: Hungarian matching with SciPy, one image after another for each of six decoder layers (192 problems a step), keeps the GPU waiting longer than its own work takes
# after: facebookresearch/detr#562 (also ybarancan/STSU#11)
import os, torch, torch.nn as nn, torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, IMG, D, Q, NT, L, K, steps = (2, 64, 64, 20, 5, 2, 16, 2) if tiny else (32, 384, 256, 256, 32, 6, 128, 300)

class DETR(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.q = nn.Conv2d(3, D, 16, stride=16), nn.Parameter(torch.randn(Q, D))
        self.pos = nn.Parameter(torch.randn((IMG // 16) ** 2, D) * 0.02)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 4 * D, 0.0, batch_first=True), L)
        self.dec = nn.ModuleList([nn.TransformerDecoderLayer(D, 4, 4 * D, 0.0, batch_first=True) for _ in range(L)])
        self.cls, self.box = nn.Linear(D, K), nn.Linear(D, 4)

    def forward(self, x):
        mem = self.enc(self.patch(x).flatten(2).transpose(1, 2) + self.pos)
        h, out = self.q.expand(x.size(0), -1, -1), []
        for d in self.dec:
            h = d(h, mem)
            out.append((self.cls(h), self.box(h).sigmoid()))
        return out

@torch.no_grad()
def match(logits, boxes, labels, tgt):
    prob = logits.float().softmax(-1)
    cost = -prob.gather(2, labels[:, None].expand(-1, Q, -1)) + 5 * torch.cdist(boxes.float(), tgt, p=1)
    pairs = [linear_sum_assignment(c) for c in cost.cpu().numpy()]
    return tuple(torch.stack([torch.as_tensor(p[i]) for p in pairs]).to(dev) for i in (0, 1))

model = DETR().to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=dev == "cuda")
imgs = [torch.randn(B, 3, IMG, IMG, device=dev) for _ in range(4)]
labels, tgts = torch.randint(1, K, (4, B, NT), device=dev), torch.rand(4, B, NT, 4, device=dev)
row = torch.arange(B, device=dev)[:, None]
for step in range(steps):
    lab, tgt, loss = labels[step % 4], tgts[step % 4], 0.0
    with torch.autocast(dev, dtype=torch.bfloat16):
        for logits, boxes in model(imgs[step % 4]):
            qi, ti = match(logits, boxes, lab, tgt)
            want = torch.zeros(B, Q, dtype=torch.long, device=dev).index_put_((row, qi), lab.gather(1, ti))
            loss = loss + F.cross_entropy(logits.flatten(0, 1), want.flatten())
            loss = loss + 5 * F.l1_loss(boxes[row, qi].float(), tgt[row, ti])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
