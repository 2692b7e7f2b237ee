import timm, torch
from timm.data import create_dataset, create_loader; from timm.loss import LabelSmoothingCrossEntropy; from timm.optim import create_optimizer_v2; from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler
model = timm.create_model("mobilenetv3_small_050", pretrained=False, num_classes=4)
loader = create_loader(create_dataset("", root="data/img", split="train"), input_size=(3, 64, 64), batch_size=8, is_training=True, device=torch.device("cpu"), use_prefetcher=False, num_workers=1)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05); scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=10)
loss_fn, ema = LabelSmoothingCrossEntropy(0.1), ModelEmaV3(model, decay=0.99); saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=".")
for epoch in range(epochs):
    model.train()
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16): loss = loss_fn(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step(); ema.update(model)
    scheduler.step(epoch + 1); print(epoch, loss.item()); saver.save_checkpoint(epoch, metric=loss.item())
