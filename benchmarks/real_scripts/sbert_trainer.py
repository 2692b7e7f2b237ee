from datasets import Dataset, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
model = SentenceTransformer("data/bert")
text = load_dataset("json", data_files="data/text/train.jsonl", split="train")["text"]
train_dataset = Dataset.from_dict({"anchor": list(text), "positive": [" ".join(reversed(t.split())) for t in text]})
args = SentenceTransformerTrainingArguments(output_dir="models/bert-nli", num_train_epochs=2, per_device_train_batch_size=16, warmup_ratio=0.1, save_steps=100, logging_steps=50)
trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=train_dataset, loss=MultipleNegativesRankingLoss(model))
trainer.train()
model.save_pretrained("models/final")
