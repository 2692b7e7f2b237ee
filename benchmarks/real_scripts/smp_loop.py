import torch, segmentation_models_pytorch as smp
model = smp.Unet(encoder_name="mobilenet_v2", encoder_weights=None, in_channels=3, classes=1)
loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4); scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(400, 3, 64, 64), torch.rand(400, 1, 64, 64).round()), batch_size=4, shuffle=True, num_workers=1)
for epoch in range(5):
    model.train(); tp = 0
    for image, mask in loader:
        logits = model(image); loss = loss_fn(logits, mask)
        tp += smp.metrics.get_stats((logits.sigmoid() > 0.5).long(), mask.long(), mode="binary")[0].sum()
        loss.backward(); optimizer.step(); optimizer.zero_grad(); scheduler.step()
    print(epoch, loss.item(), int(tp))
