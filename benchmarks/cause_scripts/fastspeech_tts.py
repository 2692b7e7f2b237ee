# precision: as-written
# expected: synchronisation
# because: the length regulator reads every phoneme's duration from the GPU by itself (32 x 96 reads a step, some 30 ms or more), while the GPU has about 10 ms of work
# after: xcmyz/FastSpeech#27 (slow training; the length regulator was the part to optimise)
import os, torch, torch.nn as nn, torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True
B, L, D, ENC, DEC, steps = (2, 8, 32, 1, 1, 2) if tiny else (32, 96, 256, 4, 6, 300)

class FFT(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.c1, self.c2 = nn.Conv1d(D, 4 * D, 9, padding=4), nn.Conv1d(4 * D, D, 1)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, D))
        return x + self.c2(F.relu(self.c1(self.n2(x).transpose(1, 2)))).transpose(1, 2)

def length_regulate(h, dur):
    out = []
    for b in range(h.size(0)):
        reps = [int(d) for d in dur[b]]
        frames = [j for j, r in enumerate(reps) for _ in range(r)]
        out.append(h[b].index_select(0, torch.tensor(frames, device=h.device)))
    return pad_sequence(out, batch_first=True)

emb, dur_head, mel_head = nn.Embedding(128, D), nn.Linear(D, 1), nn.Linear(D, 80)
enc, dec = nn.Sequential(*[FFT() for _ in range(ENC)]), nn.Sequential(*[FFT() for _ in range(DEC)])
model = nn.ModuleList([emb, enc, dur_head, dec, mel_head]).to(dev)
opt = torch.optim.Adam(model.parameters(), lr=1e-4, fused=dev == "cuda")
scaler = torch.amp.GradScaler(dev, enabled=dev == "cuda")
text = torch.randint(0, 128, (4, B, L), device=dev)
durs = torch.randint(3, 10, (4, B, L), device=dev)
mels = torch.randn(B, 10 * L, 80, device=dev)
for step in range(steps):
    with torch.autocast(dev, dtype=torch.float16 if dev == "cuda" else torch.bfloat16):
        h = enc(emb(text[step % 4]))
        loss = F.mse_loss(dur_head(h).squeeze(-1), durs[step % 4].log())
        mel = mel_head(dec(length_regulate(h, durs[step % 4])))
        loss = loss + F.l1_loss(mel, mels[:, :mel.size(1)])
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
