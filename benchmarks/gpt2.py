"""GPT-2 of 124 million parameters as a user's own model: `castwise run benchmarks/gpt2.py`. It needs transformers."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

BATCH_SIZE, LENGTH = 16, 1024


def build() -> dict[str, object]:
    """Return the model with random weights, a batch of random tokens, and AdamW."""
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    tokens = torch.randint(config.vocab_size, (BATCH_SIZE, LENGTH + 1))
    return {
        "model": GPT2LMHeadModel(config),
        "batch": {"input_ids": tokens[:, :-1], "target": tokens[:, 1:]},
        "training_step": training_step,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1),
        "unit": "tokens",
        "units_per_sample": LENGTH,
    }


def training_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy of the next token."""
    logits = model(input_ids=batch["input_ids"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["target"].flatten())
