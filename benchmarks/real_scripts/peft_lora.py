from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments)
tokenizer = AutoTokenizer.from_pretrained("data/llama-bf16")
dataset = load_dataset("json", data_files="data/text/train.jsonl", split="train")
dataset = dataset.map(lambda b: tokenizer(b["text"], truncation=True), batched=True, remove_columns=["text"])
model = AutoModelForCausalLM.from_pretrained("data/llama-bf16", dtype="bfloat16")
model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
model.print_trainable_parameters()
args = TrainingArguments(output_dir="output", learning_rate=1e-3, per_device_train_batch_size=8, num_train_epochs=1, save_strategy="epoch")
trainer = Trainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer,
                  data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False))
trainer.train()
model.save_pretrained("output-lora")
