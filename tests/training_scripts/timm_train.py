"""In the style of timm's train.py: its model, loss scaler, clipping, moving average and schedule by updates."""

import timm
import torch
from by_hand import SAMPLES, args, autocast, grad_scaler, log, moved
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV2, dispatch_clip_grad
from torch.utils.data import DataLoader, TensorDataset


class NativeScaler:  # that of older versions of timm is for GPUs alone
    def __init__(self):
        self._scaler = grad_scaler()

    def __call__(self, loss, optimizer, clip_grad, parameters):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        dispatch_clip_grad(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()


def train_one_epoch(model, loader, optimizer, scaler, ema, scheduler):
    loss_fn = LabelSmoothingCrossEntropy()
    model.train()
    losses = AverageMeter()
    for updates, (inputs, target) in enumerate(moved(loader), 1):
        with autocast():
            loss = loss_fn(model(inputs), target)
        losses.update(loss.item(), len(inputs))
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        ema.update(model)
        optimizer.zero_grad()
        scheduler.step_update(updates, metric=losses.avg)
        log(loss)


def main():
    torch.manual_seed(42)
    small, large = {"model_name": "test_vit", "img_size": 32}, {"model_name": "vit_base_patch16_224", "img_size": 64}
    large |= {"embed_dim": 16 * args.size, "depth": args.depth, "num_heads": args.size // 4}
    model = timm.create_model(num_classes=4, **(large if args.depth else small)).to(args.device)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9, weight_decay=1e-4)
    count, side = min(args.steps, 10) * 2 * SAMPLES, model.patch_embed.img_size[0]
    images = TensorDataset(torch.randn(count, 3, side, side), torch.randint(4, (count,)))
    scheduler = CosineLRScheduler(optimizer, t_initial=args.steps, t_in_epochs=False)
    loader = DataLoader(images, batch_size=2 * SAMPLES, shuffle=True)
    scaler, ema = NativeScaler(), ModelEmaV2(model)
    for _ in range(-(-args.steps // 10)):
        train_one_epoch(model, loader, optimizer, scaler, ema, scheduler)


if __name__ == "__main__":
    main()
