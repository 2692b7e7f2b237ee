"""How models of whole runs validate: with the running statistics of training, and with those taken without dropout.

    castwise suite wrn-cifar10 --precision O1 --tuned --seeds 3 --keep-weights DIR --results FOLDER
    python benchmarks/dropout_statistics.py FOLDER DIR [--data DIR] [--out FILE]

Where dropout stands before a batch norm, the variances that it meets in training are larger than those in validation,
the more so the farther the images' means are from 0, and the next one meets smaller ones. How a model then validates
is in part a matter of chance. Statistics that are taken over training images without dropout are validation's own.

Source: Li et al., "Understanding the Disharmony between Dropout and Batch Normalization by Variance Shift", 2019.
"""

import argparse
import copy
import json
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from stored import load
from torch import nn

from castwise.orchestrator.machine import detect_machine
from castwise.records.schema import Trial
from castwise.records.store import name_of, stem_of
from castwise.registry.datasets import default_data_dir
from castwise.registry.workloads import find_workload
from castwise.spec.plan import TrialSpec
from castwise.worker.data.gpu_augmentation import Augmentation, DeviceImages, Epochs
from castwise.worker.data.preloaded import load_images
from castwise.worker.models import build_task
from castwise.worker.models.task import Batch

_NUM_BATCHES = 40
_BATCH_SIZE = 256


def measure(trial: Trial, weights: Path, data_dir: Path, device: str) -> dict[str, Any]:
    """Return how the model of a run validates, and what dropout does to its variances."""
    model = build_task(find_workload(trial.spec.workload)).model.to(device)  # without techniques
    model.load_state_dict(torch.load(weights, map_location=device, weights_only=True))
    training, tested = (images_of(trial.spec, data_dir, split, device) for split in ("train", "test"))
    anew, as_trained = (with_statistics_anew(model, training, dropout=dropout) for dropout in (False, True))
    last = trial.ranks[0].epochs[-1]
    return {
        "techniques": list(trial.spec.techniques),
        "seed": trial.spec.seed,
        "training_loss": statistics.fmean(float(loss) for _, loss in last.losses),
        "accuracy": last.accuracy,
        "accuracy_again": accuracy_of(model, tested),
        "accuracy_without_dropout": accuracy_of(anew, tested),
        "variance_ratios": variance_ratios(as_trained, anew),
    }


def images_of(spec: TrialSpec, data_dir: Path, split: str, device: str) -> list[Batch]:
    """Return all test images, or as many training images as statistics are taken of; none of them augmented."""
    name, order = spec.data_set, Epochs(_BATCH_SIZE, shuffle=split == "train")
    images = DeviceImages(load_images(name, data_dir, split), name, Augmentation(), order, torch.device(device))
    made = [images.make(drawn) for drawn in images.start(0)]
    return made[:_NUM_BATCHES] if split == "train" else made


@torch.no_grad()
def with_statistics_anew(model: nn.Module, batches: Iterable[Batch], *, dropout: bool) -> nn.Module:
    """Return a copy of a model whose running statistics are the mean of batches', with dropout or without."""
    model = copy.deepcopy(model).train()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.reset_running_stats()
            part.momentum = None
        if isinstance(part, nn.Dropout):
            part.train(dropout)
    for images, _ in batches:
        model(images)
    return model


def variance_ratios(trained: nn.Module, validated: nn.Module) -> dict[str, float]:
    """Return the running variances of one model over another's, by batch norm: the geometric mean of its channels'."""
    ones, others = (
        {name: part for name, part in each.named_modules() if isinstance(part, nn.BatchNorm2d)}
        for each in (trained, validated)
    )
    logs = {name: (norm.running_var / others[name].running_var).log().mean() for name, norm in ones.items()}
    return {name: math.exp(float(log)) for name, log in logs.items()}


@torch.no_grad()
def accuracy_of(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the share of images that a model classifies rightly, in float32."""
    model.eval()
    right = torch.cat([model(images).argmax(1) == labels for images, labels in batches])
    return float(right.double().mean())


def main() -> int:
    """Print a line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a results folder")
    parser.add_argument("weights", type=Path, help="what --keep-weights named")
    parser.add_argument("--data", type=Path, default=default_data_dir())
    parser.add_argument("--out", type=Path, help="benchmarks/records/dropout_statistics/DATE-NAME.json keeps a run")
    arguments = parser.parse_args()
    bench = detect_machine(None, arguments.data)
    runs = []
    newest = {(name_of(trial.environment), stem_of(trial.spec)): trial for trial in load(arguments.results)}
    for (machine, stem), trial in newest.items():
        weights = arguments.weights / machine / f"{stem}.pt"
        if trial.status == "ok" and weights.is_file():
            runs.append(measure(trial, weights, arguments.data, bench.device))
            print(json.dumps(runs[-1]), flush=True)
    if arguments.out:
        document = {"environment": bench.environment.model_dump(mode="json"), "runs": runs}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
