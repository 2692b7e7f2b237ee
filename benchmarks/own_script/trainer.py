"""Fine-tune a causal language model with transformers' Trainer: an ordinary script that knows no castwise.

python trainer.py [CHECKPOINT]    # a small GPT-2 that is saved in bfloat16 first, if it is not there
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

checkpoint = Path(sys.argv[1] if len(sys.argv) > 1 else "gpt2-bf16")


class Tokens(Dataset):
    """Random stretches of 512 tokens."""

    def __len__(self):
        return 20_000

    def __getitem__(self, i):
        tokens = torch.randint(50_000, (512,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


if not checkpoint.exists():
    dtype = torch.bfloat16 if checkpoint.name.endswith("bf16") else torch.float32
    GPT2LMHeadModel(GPT2Config(vocab_size=50_304)).to(dtype).save_pretrained(checkpoint)
model = AutoModelForCausalLM.from_pretrained(checkpoint)  # transformers 5 keeps the checkpoint's type
args = TrainingArguments("out", per_device_train_batch_size=16, max_steps=1000, learning_rate=1e-5, report_to=[])
Trainer(model, args, train_dataset=Tokens()).train()
