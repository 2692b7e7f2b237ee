import torch, torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel; from diffusers.optimization import get_scheduler; from diffusers.training_utils import EMAModel
accelerator = Accelerator(gradient_accumulation_steps=1)
model = UNet2DModel(sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
ema, noise_scheduler = EMAModel(model.parameters(), decay=0.999, model_cls=UNet2DModel, model_config=model.config), DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4); lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=50, num_training_steps=300)
model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(torch.randn(1000, 3, 16, 16), batch_size=8, shuffle=True), lr_scheduler)
for epoch in range(3):
    for clean in loader:
        noise, t = torch.randn_like(clean), torch.randint(0, 1000, (len(clean),))
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(noise_scheduler.add_noise(clean, noise, t), t).sample, noise); accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); lr_scheduler.step(); optimizer.zero_grad(); ema.step(model.parameters())
    print(epoch, loss.item()); DDPMPipeline(unet=accelerator.unwrap_model(model), scheduler=noise_scheduler).save_pretrained("ddpm")
