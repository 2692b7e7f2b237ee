from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
dataset = load_dataset("json", data_files="data/text/train.jsonl", split="train")
trainer = SFTTrainer(model="data/llama", train_dataset=dataset, args=SFTConfig(output_dir="sft", max_length=64, use_cpu=True))
trainer.train()
