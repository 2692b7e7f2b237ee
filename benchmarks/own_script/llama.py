"""Fine-tune a Llama of 0.5 billion weights: `python llama.py full`, or lora, dora, qlora; without a kind it is made."""

import sys

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)


class Tokens(Dataset):
    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        tokens = torch.randint(32_000, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


kind = sys.argv[1] if len(sys.argv) > 1 else "make"
if kind == "make":
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("llama")
    sys.exit()
quantised = {}
if kind == "qlora":
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    quantised = {"quantization_config": four_bits, "device_map": {"": 0}}
model = AutoModelForCausalLM.from_pretrained("llama", **quantised)
if kind == "qlora":
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
if kind != "full":
    adapter = LoraConfig(r=16, target_modules="all-linear", use_dora=kind == "dora", task_type="CAUSAL_LM")
    model = get_peft_model(model, adapter)
arguments = TrainingArguments("out", per_device_train_batch_size=16, max_steps=500, learning_rate=2e-5, report_to=[])
Trainer(model, arguments, train_dataset=Tokens()).train()
