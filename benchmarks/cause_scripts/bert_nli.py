# precision: as-written
# expected: padding
# because: every sentence pair is padded to 512 tokens while the mean is about 50, so nine tenths of all products are for padding.
# after: huggingface/transformers#4842
# flops: 3*12*(2*32768*12*768*768 + 4*64*512*512*768)
import os
import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, MAX_LEN, STEPS = (4, 64, 3) if TINY else (64, 512, 300)
MEDIAN = 8 if TINY else 44
small = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
config = BertConfig(num_labels=3, **(small if TINY else {}))

rng = np.random.default_rng(0)


def tokenise(n):
    """Sentence pairs as tokenizer(..., padding="max_length", max_length=512) gives them."""
    ids = torch.zeros(n, MAX_LEN, dtype=torch.long)
    mask = torch.zeros(n, MAX_LEN, dtype=torch.long)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN), 0.5, n), 4, MAX_LEN).astype(int)
    for i, length in enumerate(lengths):
        ids[i, :length] = torch.from_numpy(rng.integers(1000, config.vocab_size, length))
        mask[i, :length] = 1
    return ids, mask, torch.from_numpy(rng.integers(0, 3, n))


ids, mask, labels = tokenise(B * 16)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(ids, mask, labels), batch_size=B, shuffle=True,
    pin_memory=dev == "cuda", drop_last=True,
)
model = BertForSequenceClassification(config).to(dev).train()
opt = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=dev == "cuda")

step = 0
while step < STEPS:
    for batch in loader:
        x, m, y = (t.to(dev, non_blocking=True) for t in batch)
        with torch.autocast(dev, dtype=torch.bfloat16):
            loss = model(input_ids=x, attention_mask=m, labels=y).loss
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        step += 1
