"""ResNets as fastai 1.0 fine-tunes them: a frozen body, of which only batch norm learns, and a new head.

Source: fastai/fastai at 0d37271f: fastai/vision/learner.py (`create_cnn`: freeze, train_bn; `create_head`;
`_resnet_split`), fastai/layers.py (AdaptiveConcatPool2d) and fastai/torch_core.py (`apply_init`, `cond_init`).
"""

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn

from castwise.registry.workloads import Workload
from castwise.trial.models.task import Task
from castwise.trial.models.torchvision_timm import image_task
from castwise.trial.pretrained import load_weights

_NUM_CLASSES = 100  # CIFAR-100's
_HEAD_WIDTH = 512
# `create_head` with ps=0.5: half of it in all but the last.
_DROPOUTS = (0.25, 0.5)
_SECOND_GROUP = ("layer3", "layer4")


class AdaptiveConcatPool2d(nn.Module):
    """The maxima of all channels, followed by their means."""

    def forward(self, features: Tensor) -> Tensor:
        """Return both, shape (batch, 2 * channels, 1, 1), of features, shape (batch, channels, height, width)."""
        maximum = nn.functional.adaptive_max_pool2d(features, 1)
        return torch.cat([maximum, nn.functional.adaptive_avg_pool2d(features, 1)], 1)


def make_model(name: str) -> nn.Sequential:
    """Return body and head of torchvision's ResNet of this name ("resnet18").

    The model takes images of shape (batch, 3, side, side) and returns logits of shape (batch, 100). Backward runs
    through the whole body, for its batch norm; no convolution's weight gets a gradient.
    """
    from torchvision import models

    resnet = models.get_model(name, weights=None)
    # The children keep their names, so that torchvision's files fit.
    body = nn.Sequential(OrderedDict(list(resnet.named_children())[:-2]))
    for module in body.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(isinstance(module, nn.BatchNorm2d))
    num_features = 2 * resnet.fc.in_features
    head = nn.Sequential(
        AdaptiveConcatPool2d(),
        nn.Flatten(),
        nn.BatchNorm1d(num_features),
        nn.Dropout(_DROPOUTS[0]),
        nn.Linear(num_features, _HEAD_WIDTH),
        nn.ReLU(inplace=True),
        nn.BatchNorm1d(_HEAD_WIDTH),
        nn.Dropout(_DROPOUTS[1]),
        nn.Linear(_HEAD_WIDTH, _NUM_CLASSES),
    )
    for module in head:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.zeros_(module.bias)
    return nn.Sequential(OrderedDict(body=body, head=head))


def group_of(name: str) -> int:
    """Return a parameter's layer group, by its name: 0 up to the second stage, 1 the third and fourth, 2 the head."""
    part, child, *_ = name.split(".")
    if part == "head":
        return 2
    return 1 if child in _SECOND_GROUP else 0


def build(row: Workload) -> Task:
    """Return the task on noise with the mean and deviation of normalised images."""
    model = make_model(str(dict(row.options)["model"]))
    task = image_task(model, row.input_shape, _NUM_CLASSES, draw=torch.randn)
    task.group_of = group_of
    task.load_weights = partial(load_weights, model.get_submodule("body"))
    return task
