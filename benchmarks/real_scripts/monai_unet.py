import torch, numpy as np, monai
from monai.data import CacheDataset, DataLoader
from monai.transforms import Compose, EnsureChannelFirstd, RandCropByPosNegLabeld, RandRotate90d, ScaleIntensityd
vols = [{"img": i, "seg": (s > 0.5).astype("float32")} for i, s in (monai.data.create_test_image_3d(48, 48, 48, rad_max=10, num_seg_classes=1) for _ in range(16))]
tf = Compose([EnsureChannelFirstd(["img", "seg"], channel_dim="no_channel"), ScaleIntensityd("img"), RandCropByPosNegLabeld(["img", "seg"], "seg", (32, 32, 32), num_samples=2), RandRotate90d(["img", "seg"], prob=0.5, spatial_axes=[0, 2])])
loader = DataLoader(CacheDataset(vols, tf), batch_size=2, shuffle=True, num_workers=2, collate_fn=monai.data.list_data_collate)
model = monai.networks.nets.UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
loss_function = monai.losses.DiceLoss(sigmoid=True); optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(30):
    model.train()
    for batch in loader:
        optimizer.zero_grad(); loss = loss_function(model(batch["img"]), batch["seg"]); loss.backward(); optimizer.step()
    print(epoch, loss.item()); torch.save(model.state_dict(), "best_metric_model.pth")
