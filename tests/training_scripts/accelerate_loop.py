"""A loop with Accelerate: it wraps model, optimizer, loader and scheduler; it has no fp16 on a CPU."""

import torch
from accelerate import Accelerator
from by_hand import SAMPLES, More, args, log
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(11)
    n = args.size
    accelerator = Accelerator(
        cpu=args.device == "cpu",
        mixed_precision="no" if args.amp == "none" else args.amp,
        gradient_accumulation_steps=2,
    )
    model = nn.Sequential(nn.Linear(8, 32 * n), nn.GELU(), More(32 * n), nn.Linear(32 * n, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 / n)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    count = args.steps * 6 * SAMPLES
    data = TensorDataset(torch.randn(count, 8), torch.randint(4, (count,)))
    loader = DataLoader(data, batch_size=3 * SAMPLES, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        log(loss)


if __name__ == "__main__":
    main()
