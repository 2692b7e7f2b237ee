import torch
from datasets import load_dataset
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments)
tokenizer = AutoTokenizer.from_pretrained("data/llama-bf16")
dataset = load_dataset("json", data_files="data/text/train.jsonl", split="train")
dataset = dataset.map(lambda b: tokenizer(b["text"], truncation=True), batched=True, remove_columns=["text"])
model = AutoModelForCausalLM.from_pretrained("data/llama-bf16")  # transformers 5: dtype="auto"
print(next(model.parameters()).dtype)
args = TrainingArguments(output_dir="out", learning_rate=2e-4, num_train_epochs=1, save_strategy="steps", save_steps=100, save_total_limit=2, logging_steps=10)
trainer = Trainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer,
                  data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False))
trainer.train()
