# precision: as-written
# expected: synchronisation
# because: the loss builds its targets box by box and reads cell and class of each of 512 boxes from the GPU with int(), 1,536 waits a step
# after: Tencent/ObjectDetection-OneStageDet#77
import os, torch, torch.nn as nn, torch.nn.functional as F
TINY = os.environ.get("TINY") == "1"
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, BOXES, IMG, C, STEPS = (2, 3, 64, 16, 3) if TINY else (32, 16, 512, 64, 400)
torch.backends.cudnn.benchmark = True

def conv(i, o, s):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.1, inplace=True))

model = nn.Sequential(conv(8, C, 2), conv(C, 2 * C, 2), conv(2 * C, 4 * C, 2), conv(4 * C, 4 * C, 1),
                      conv(4 * C, 8 * C, 2), conv(8 * C, 8 * C, 1), conv(8 * C, 8 * C, 1),
                      conv(8 * C, 8 * C, 1), nn.Conv2d(8 * C, 88, 1)).to(dev, memory_format=torch.channels_last)
opt = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, fused=dev == "cuda")

def build_targets(boxes, grid):
    cells, classes = [], []
    for b in range(boxes.shape[0]):
        for t in range(boxes.shape[1]):
            box = boxes[b, t]
            gi = int(box[1] * grid)
            gj = int(box[2] * grid)
            cells.append((b * grid + gj) * grid + gi)
            classes.append(int(box[0]))
    return torch.tensor(cells, device=dev), torch.tensor(classes, device=dev)

def yolo_loss(out, boxes):
    grid = out.shape[-1]
    cells, classes = build_targets(boxes, grid)
    out = out.permute(0, 2, 3, 1).reshape(-1, 88).float()
    obj = torch.zeros(out.shape[0], device=dev)
    obj[cells] = 1
    hit = out[cells]
    return (F.binary_cross_entropy_with_logits(out[:, 0], obj) + F.cross_entropy(hit[:, 8:], classes)
            + F.mse_loss(hit[:, 1:5], boxes[..., 1:].reshape(-1, 4)))

images = torch.randn(B, 8, IMG, IMG, device=dev).to(memory_format=torch.channels_last)
for step in range(STEPS):
    boxes = torch.rand(B, BOXES, 5, device=dev)
    boxes[..., 0] *= 80
    with torch.autocast(dev, torch.bfloat16):
        out = model(images)
    loss = yolo_loss(out, boxes)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
print("done", float(loss))
