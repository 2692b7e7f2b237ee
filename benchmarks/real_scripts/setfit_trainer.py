from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments
from datasets import load_dataset
text = list(load_dataset("json", data_files="data/text/train.jsonl", split="train")["text"])[:64]
train_dataset = Dataset.from_dict({"text": text, "label": [int("cat" in t.split()) for t in text]})
model = SetFitModel.from_pretrained("data/bert")
trainer = Trainer(model=model, args=TrainingArguments(batch_size=16, num_epochs=2), train_dataset=train_dataset)
trainer.train()
print(model.predict(text[:4]))
