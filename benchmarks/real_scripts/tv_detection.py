import random, torch, torchvision
from torchvision.models.detection import fcos_resnet50_fpn, FCOS; from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
class Boxes(torch.utils.data.Dataset):
    def __len__(self): return 800
    def __getitem__(self, i):
        n = random.randint(1, 6); xy = torch.rand(n, 2) * 30
        return torch.rand(3, 64, random.choice([64, 72])), {"boxes": torch.cat([xy, xy + 8 + torch.rand(n, 2) * 20], 1), "labels": torch.randint(1, 4, (n,))}
backbone = _resnet_fpn_extractor(torchvision.models.resnet18(weights=None), 5, returned_layers=[2, 3, 4], extra_blocks=torchvision.ops.feature_pyramid_network.LastLevelP6P7(256, 256))
model = FCOS(backbone, 4, min_size=64, max_size=96)
loader = torch.utils.data.DataLoader(Boxes(), batch_size=2, shuffle=True, collate_fn=lambda b: tuple(zip(*b)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9); model.train()
for step, (images, targets) in enumerate(loader):
    loss_dict = model(list(images), list(targets)); losses = sum(loss for loss in loss_dict.values())
    optimizer.zero_grad(); losses.backward(); optimizer.step()
    if step % 20 == 0: print(step, {k: round(v.item(), 3) for k, v in loss_dict.items()})
