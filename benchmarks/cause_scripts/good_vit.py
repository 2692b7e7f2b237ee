# precision: as-written
# expected: none
# because: ViT-L at 256 tokens, batch 64, bf16 autocast, flash attention, fused AdamW, images as pinned uint8 copied ahead without blocking
# after: facebookresearch/xformers#626 (questions on speeding up a ViT that is already in mixed precision)
# flops: 3*(24*(24*64*256*1024**2 + 4*64*256**2*1024)) + 2*2*64*256*768*1024 + 3*2*64*1024*1024
import os, torch, torch.nn.functional as F, timm
tiny = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
B, S, steps = (2, 64, 2) if tiny else (64, 256, 400)
name = "vit_tiny_patch16_224" if tiny else "vit_large_patch16_224"
model = timm.create_model(name, img_size=S, num_classes=1024, class_token=False, global_pool="avg").to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=dev == "cuda")
cuda = dev == "cuda"
pool = [(torch.randint(0, 256, (B, 3, S, S), dtype=torch.uint8), torch.randint(0, 1024, (B,))) for _ in range(8)]
if cuda:
    pool = [(x.pin_memory(), y.pin_memory()) for x, y in pool]
    side = torch.cuda.Stream()

def fetch(i):
    x, y = pool[i % 8]
    if not cuda:
        return x, y
    with torch.cuda.stream(side):
        return x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)

nxt = fetch(0)
for step in range(steps):
    if cuda:
        torch.cuda.current_stream().wait_stream(side)
    x, y = nxt
    if cuda:
        x.record_stream(torch.cuda.current_stream())
        y.record_stream(torch.cuda.current_stream())
    nxt = fetch(step + 1)
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x.to(torch.bfloat16).div_(127.5).sub_(1)), y)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 100 == 99:
        print(step, loss.item())
