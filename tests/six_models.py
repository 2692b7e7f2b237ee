"""Six models that nobody here wrote, each small for a CPU and full-sized for a GPU, as a user's file has them."""

import torch
from torch import Tensor, nn


def images(side: int, batch_size: int) -> tuple[Tensor, Tensor]:
    return torch.rand(batch_size, 3, side, side), torch.randint(10, (batch_size,))


def timm_convnext(full: bool = False) -> object:
    import timm

    if full:
        return timm.create_model("convnext_tiny"), lambda size: images(224, size), nn.CrossEntropyLoss()
    model = timm.create_model("convnext_atto", num_classes=10, depths=(1, 1, 1, 1), dims=(8, 16, 16, 16))
    return model, lambda size: images(32, size), nn.CrossEntropyLoss()


def timm_vit(full: bool = False) -> object:
    import timm

    if full:
        return timm.create_model("vit_base_patch16_224"), lambda size: images(224, size), nn.CrossEntropyLoss()
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=10, img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2
    )
    return model, lambda size: images(32, size), nn.CrossEntropyLoss()


def torchvision_segmentation(full: bool = False) -> object:
    """Its output is a dict, and it has an auxiliary head."""
    from torchvision.models import segmentation

    side = 224 if full else 32
    make = segmentation.deeplabv3_resnet50 if full else segmentation.lraspp_mobilenet_v3_large
    options = {"aux_loss": True} if full else {}
    model = make(weights=None, weights_backbone=None, num_classes=10, **options)

    def batch(batch_size: int) -> dict[str, Tensor]:
        masks = torch.randint(10, (batch_size, side, side))
        return {"images": torch.rand(batch_size, 3, side, side), "masks": masks}

    def training_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(batch["images"])
        losses = [nn.functional.cross_entropy(output, batch["masks"]) for output in outputs.values()]
        return losses[0] + 0.5 * sum(losses[1:])

    return {"model": model, "batch": batch, "training_step": training_step, "unit": "images"}


def transformers_bert(full: bool = False) -> object:
    """Its loss is its own, and its batch a dict of integers."""
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig() if full else BertConfig(vocab_size=100, max_position_embeddings=32, **small)
    length = 128 if full else 8

    def batch(batch_size: int) -> dict[str, Tensor]:
        tokens = torch.randint(config.vocab_size, (batch_size, length))
        mask = torch.ones_like(tokens)
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(2, (batch_size,))}

    return {"model": BertForSequenceClassification(config), "batch": batch, "clip_grad_norm": 1.0}


def transformers_gpt2(full: bool = False) -> object:
    """Its batches are of different lengths, and its weights tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    config = GPT2Config() if full else GPT2Config(**small, bos_token_id=0, eos_token_id=0)
    longest = 512 if full else 16

    def batch(batch_size: int) -> dict[str, Tensor]:
        length = int(torch.randint(longest // 2, longest + 1, ()))
        tokens = torch.randint(config.vocab_size, (batch_size, length))
        return {"input_ids": tokens, "labels": tokens}

    return {"model": GPT2LMHeadModel(config), "batch": batch, "accumulate": 2, "batch_size": 8}


def lightning_module(full: bool = False) -> object:
    """Its training step logs, and its scheduler goes by steps; what castwise needs is all in it."""
    import lightning
    from torchvision.models import resnet50

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            small = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
            self.net = resnet50() if full else small
            self.head = nn.Linear(1000 if full else 4 * 6 * 6, 10)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            inputs, targets = batch
            loss = nn.functional.cross_entropy(self.head(self.net(inputs)), targets)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> object:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
            steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Classifier(), images(224 if full else 8, 16)


def timm_convnext_full() -> object:
    return timm_convnext(full=True)


def timm_vit_full() -> object:
    return timm_vit(full=True)


def torchvision_segmentation_full() -> object:
    return torchvision_segmentation(full=True)


def transformers_bert_full() -> object:
    return transformers_bert(full=True)


def transformers_gpt2_full() -> object:
    return transformers_gpt2(full=True)


def lightning_module_full() -> object:
    return lightning_module(full=True)


SMALL = (
    timm_convnext,
    timm_vit,
    torchvision_segmentation,
    transformers_bert,
    transformers_gpt2,
    lightning_module,
)
FULL = (
    timm_convnext_full,
    timm_vit_full,
    torchvision_segmentation_full,
    transformers_bert_full,
    transformers_gpt2_full,
    lightning_module_full,
)
