"""A LightningModule and its Trainer: its step takes a closure, and it has a precision of its own."""

import lightning.pytorch as pl
import torch
from by_hand import SAMPLES, More, args, log
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

n = args.size


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 16 * n), nn.ReLU(), More(16 * n), nn.Linear(16 * n, 3))
        self.val_loss = torch.zeros(())

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        log(loss, self.val_loss)
        return loss

    def validation_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)
        if not self.trainer.sanity_checking:
            self.val_loss = loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2 / n)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


pl.seed_everything(3)
data = TensorDataset(torch.randn(24 * SAMPLES, 9), torch.randint(3, (24 * SAMPLES,)))
# Lightning takes bf16 for fp16 on a CPU, unless a plug-in is given.
own = {"none": {}, "bf16": {"precision": "bf16-mixed"}, "fp16": {"plugins": MixedPrecision("16-mixed", args.device)}}
trainer = pl.Trainer(
    accelerator=args.device,
    max_steps=args.steps,
    gradient_clip_val=0.5,
    max_epochs=-1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=1,
    **own[args.amp],
)
trainer.fit(
    Classifier(),
    DataLoader(data, batch_size=4 * SAMPLES, shuffle=True),
    DataLoader(data, batch_size=8 * SAMPLES),
)
