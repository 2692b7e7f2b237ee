# precision: as-written
# expected: none
# because: bf16 autocast, channels_last, batch 256, fused SGD, no reads and data on the GPU; convolutions and batch norms run as they should.
# after: pytorch/pytorch#82699
# flops: 3 * 256 * 2 * 4.09e9
import os
import torch
import torch.nn.functional as F
import torchvision

TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, RES, STEPS = (2, 64, 3) if TINY else (256, 224, 400)
torch.backends.cudnn.benchmark = True
torch.backends.cuda.matmul.allow_tf32 = True

model = torchvision.models.resnet50(weights=None).to(dev, memory_format=torch.channels_last)
opt = torch.optim.SGD(
    model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=dev == "cuda"
)
images = [
    torch.randn(B, 3, RES, RES, device=dev).to(memory_format=torch.channels_last) for _ in range(4)
]
labels = [torch.randint(0, 1000, (B,), device=dev) for _ in range(4)]
running = torch.zeros((), device=dev)

for step in range(STEPS):
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images[step % 4]), labels[step % 4], label_smoothing=0.1)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    running += loss.detach()
    if step % 100 == 99:
        print(step, running.item() / 100)
        running.zero_()
