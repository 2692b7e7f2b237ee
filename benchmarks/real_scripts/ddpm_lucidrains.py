from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet
if __name__ == "__main__":
    model = Unet(dim=8, dim_mults=(1, 2, 4), flash_attn=False)
    diffusion = GaussianDiffusion(model, image_size=32, timesteps=1000, sampling_timesteps=25)
    trainer = Trainer(diffusion, "data/img/train", train_batch_size=8, train_lr=8e-5, train_num_steps=400, gradient_accumulate_every=2,
                      ema_decay=0.995, save_and_sample_every=200, num_samples=4, amp=True, mixed_precision_type="bf16", calculate_fid=False)
    trainer.train()
