# precision: as-written
# expected: none
# because: timm's ViT-L/16 compiled, bf16 autocast, flash attention, 196 tokens without a class token (18,816 rows), fused AdamW: the step is mostly large aligned products
# after: mlfoundations/open_clip#610
# flops: 35240860975104
#   = 3*(2*B*T*24*12*1024^2 + 24*4*B*T^2*1024) + 4*B*T*768*1024 + 6*B*1024*1024, B = 96, T = 196
import os
import timm
import torch
import torch.nn.functional as F

TINY = bool(os.environ.get("TINY"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
torch.backends.cudnn.benchmark = True
BATCH, STEPS = (2, 3) if TINY else (96, 300)
CLASSES = 64 if TINY else 1024

name = "vit_tiny_patch16_224" if TINY else "vit_large_patch16_224"
net = timm.create_model(name, num_classes=CLASSES, class_token=False, global_pool="avg").to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05, fused=dev == "cuda")
step_net = torch.compile(net) if dev == "cuda" else net

images = torch.randn(BATCH, 3, 224, 224, device=dev)
for step in range(STEPS):
    flip = images.flip(-1) if step % 2 else images
    labels = torch.randint(CLASSES, (BATCH,), device=dev)
    with torch.autocast(dev, torch.bfloat16):
        loss = F.cross_entropy(step_net(flip), labels, label_smoothing=0.1)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 100 == 0:
        print(step, loss.item())
