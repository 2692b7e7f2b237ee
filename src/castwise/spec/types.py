"""Names from closed lists, which specs, the registry and records share."""

from typing import Literal

TrialKind = Literal["steady", "training"]
Parallelism = Literal["none", "ddp", "dp"]
Numerics = Literal["bits", "rounding", "draws", "shape"]  # what a technique changes at the most
Unit = Literal["images", "tokens", "samples"]
Family = Literal["mlp", "mnist_cnn", "wide_resnet", "dpn", "torchvision", "timm", "rnn_lm", "fastai_resnet", "own"]

SYNTHETIC = "synthetic"  # the data set of random samples
