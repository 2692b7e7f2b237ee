"""Image classifiers of torchvision and timm; batches, loss and validation of every image classifier."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from castwise.apply.pytree import Batch
from castwise.errors import UsageError, unknown_name
from castwise.registry.workloads import Workload
from castwise.trial.models.task import BatchScore, Task

_NUM_CLASSES = 1000

# Builders whose models would also return auxiliary logits.
# Source: jorism1993/nvidia_amd_gpu_comparison main.py at 573a94ff (inception_v3, aux_logits=False).
_ONE_OUTPUT: dict[str, Any] = {"aux_logits": False, "init_weights": True}
_MODEL_ARGUMENTS: dict[str, dict[str, Any]] = {"inception_v3": _ONE_OUTPUT, "googlenet": _ONE_OUTPUT}

# Batch norm as in the source's EfficientNets. torchvision's b7 has it already and takes no other; its b0 and
# b4 have torch's defaults. By the row's name: `torchvision:efficientnet_b0` stays torchvision's own.
# Source: lukemelas/EfficientNet-PyTorch efficientnet_pytorch/utils.py (epsilon 1e-3; momentum 0.99 in
# TensorFlow's sense, 0.01 in torch's).
_SOURCE_NORM: dict[str, Any] = {"norm_layer": partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01)}
_ROW_ARGUMENTS: dict[str, dict[str, Any]] = {"efficientnet_b0": _SOURCE_NORM, "efficientnet_b4": _SOURCE_NORM}


class Draw(Protocol):
    """Draws random pixels, as `torch.randn` does."""

    def __call__(self, size: tuple[int, ...], *, generator: torch.Generator, device: torch.device) -> Tensor:
        """Return float32 pixels of this shape."""


def image_task(model: nn.Module, input_shape: tuple[int, ...], num_classes: int, *, draw: Draw) -> Task:
    """Return the task of classifying random images, of `input_shape` each, channels first, under cross entropy."""
    return Task(model, RandomImages(draw, input_shape, num_classes), _cross_entropy, _evaluate_labels, num_classes)


@dataclass(frozen=True)
class RandomImages:
    """Random images of a shape, channels first, and the numbers of their classes."""

    draw: Draw
    shape: tuple[int, ...]
    num_classes: int

    def __call__(
        self, count: int, batch_size: int, device: torch.device, generator: torch.Generator
    ) -> Sequence[Batch]:
        """Return so many batches of a size."""

        def make_batch() -> Batch:
            images = self.draw((batch_size, *self.shape), generator=generator, device=device)
            return images, torch.randint(self.num_classes, (batch_size,), generator=generator, device=device)

        return [make_batch() for _ in range(count)]


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)


def _evaluate_labels(model: nn.Module, batch: Batch) -> BatchScore:
    images, labels = batch
    logits = model(images).float()
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return loss, (logits.argmax(1) == labels).sum(), labels.numel()


def draw_uniform(size: tuple[int, ...], *, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return pixels from -1 to 1."""
    # Source: jorism1993/nvidia_amd_gpu_comparison dataset.py at 573a94ff (torch.rand * 2 - 1).
    return torch.rand(size, generator=generator, device=device) * 2 - 1


def build_torchvision(row: Workload) -> Task:
    """Return the task of a torchvision image classifier with random weights; raise as `check_torchvision` does."""
    from torchvision import models

    check_torchvision(row)
    name = _model_name(row).lower()
    arguments = _MODEL_ARGUMENTS.get(name, {}) | _ROW_ARGUMENTS.get(row.name, {})
    model = models.get_model(name, weights=None, **arguments)
    return image_task(model, row.input_shape, _NUM_CLASSES, draw=draw_uniform)


def check_torchvision(row: Workload) -> None:
    """Raise UsageError unless torchvision has the row's model and it is an image classifier."""
    from torchvision import models

    name = _model_name(row).lower()
    classifiers = models.list_models(module=models)
    if name in classifiers:
        return
    if name in models.list_models():
        raise UsageError(
            f"torchvision's '{name}' is not a float image classifier, and castwise trains no others. "
            "torchvision:resnet50 would be one."
        )
    hint = "`python -c 'from torchvision import models; print(models.list_models(module=models))'` lists them."
    raise unknown_name("torchvision model", name, classifiers, hint)


def build_timm(row: Workload) -> Task:
    """Return the task of a timm model with random weights, at its own image size; raise as `check_timm` does."""
    timm = check_timm(row)
    name = _model_name(row)
    # A model published as a feature extractor has 0 classes; it is given a classifier.
    num_classes = timm.models.get_pretrained_cfg(name).num_classes or _NUM_CLASSES
    model = timm.create_model(name, pretrained=False, num_classes=num_classes)
    input_shape = timm.data.resolve_model_data_config(model)["input_size"]
    return image_task(model, input_shape, num_classes, draw=draw_uniform)


def check_timm(row: Workload) -> Any:
    """Return timm; raise UsageError if it is not installed or does not have the row's model."""
    try:
        import timm
    except ImportError as error:
        raise UsageError(
            f"'{row.name}' needs timm, which is not installed. Install it with: pip install 'castwise[timm]'"
        ) from error
    name = _model_name(row)
    # Only listed names: timm would look for others (`hf-hub:...`) on the network.
    known = [*timm.list_models(), *timm.list_models(include_tags=True)]
    if name not in known:
        hint = "`python -c 'import timm; print(timm.list_models())'` lists them."
        raise unknown_name("timm model", name, known, hint)
    return timm


def _model_name(row: Workload) -> str:
    return str(dict(row.options)["model"])
