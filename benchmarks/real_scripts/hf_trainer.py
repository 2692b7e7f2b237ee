from datasets import load_dataset
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments)
tokenizer = AutoTokenizer.from_pretrained("data/llama")
dataset = load_dataset("json", data_files="data/text/train.jsonl", split="train")
dataset = dataset.map(lambda b: tokenizer(b["text"], truncation=True), batched=True, remove_columns=["text"]).train_test_split(0.1)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("data/llama"))
args = TrainingArguments(output_dir="my_awesome_clm-model", eval_strategy="epoch", learning_rate=2e-4, weight_decay=0.01, num_train_epochs=2)
trainer = Trainer(model=model, args=args, train_dataset=dataset["train"], eval_dataset=dataset["test"],
                  data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False))
trainer.train()
trainer.save_model()
