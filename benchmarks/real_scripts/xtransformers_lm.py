import torch, tqdm
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper
model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=Decoder(dim=64, depth=2, heads=4, rotary_pos_emb=True)))
optim = torch.optim.Adam(model.parameters(), lr=1e-4)
def cycle(loader):
    while True: yield from loader
loader = cycle(torch.utils.data.DataLoader(torch.randint(0, 256, (2000, 65)), batch_size=4, shuffle=True))
for i in tqdm.tqdm(range(300), mininterval=10.0, desc="training"):
    model.train()
    for _ in range(4):  # GRADIENT_ACCUMULATE_EVERY
        loss = model(next(loader)); (loss / 4).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5); optim.step(); optim.zero_grad()
    if i % 100 == 0: print(f"training loss: {loss.item()}")
