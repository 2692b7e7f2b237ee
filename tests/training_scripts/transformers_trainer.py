"""A Trainer of transformers: accumulation, clipping and precision are its arguments; it has no fp16 on a CPU."""

import tempfile

import torch
from by_hand import SAMPLES, args, log
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class LoggingTrainer(Trainer):
    def compute_loss(self, *inputs, **kwargs):
        loss = super().compute_loss(*inputs, **kwargs)
        log(loss)
        return loss


n = args.size
generator = torch.Generator().manual_seed(5)
sentences = torch.randint(60, (args.steps * 4 * SAMPLES, 7), generator=generator)
sizes = {"vocab_size": 60, "hidden_size": 16 * n, "intermediate_size": 32 * n, "max_position_embeddings": 8}
config = BertConfig(num_hidden_layers=1 + args.depth, num_attention_heads=2, **sizes)
with tempfile.TemporaryDirectory() as folder:
    training = TrainingArguments(
        folder,
        use_cpu=args.device == "cpu",
        bf16=args.amp == "bf16",
        fp16=args.amp == "fp16",
        max_steps=args.steps,
        per_device_train_batch_size=2 * SAMPLES,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": each, "labels": each[0] % 2} for each in sentences]
    torch.manual_seed(training.seed)
    LoggingTrainer(BertForSequenceClassification(config), training, train_dataset=data).train()
