"""What `castwise init FILE` writes: a model of the user's own to start from, which runs as it is."""

from pathlib import Path

from castwise.errors import UsageError, file_exists, printable
from castwise.spec.user_model import DEFAULT_FUNCTION

STARTER = '''\
"""My own model, for castwise: `castwise run {file}` measures it in every precision this machine has.

castwise calls build() in a process of its own for every precision, moves model and batches to the GPU, and does the
rest of the training step itself: autocast or casts, loss scaling, clipping, the optimizer. So nothing here mentions
precision, devices or loops.
"""

import torch
from torch import nn


class Net(nn.Module):
    """Replace this by your model, or import yours: the folder of this file is on the path."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten()
        )
        self.classifier = nn.Linear(16 * 8 * 8, 10)

    def forward(self, images):
        return self.classifier(self.features(images))


def batch(batch_size):
    """Return one batch of this many samples; random ones time like real ones, zeros do not.

    The last part of a tuple is the target, the others are the model's arguments. A dict is the model's arguments by
    name. One example batch does instead of a function: castwise repeats or cuts it to the batch size.
    """
    return torch.rand(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))


def {function}():
    """Return the model and what is not castwise's own choice; only "model" and "batch" are needed."""
    model = Net()
    return {{
        "model": model,
        "batch": batch,
        # Of the model's output and the target. Default: the output's own `loss`.
        "loss": nn.CrossEntropyLoss(),
        # Default: AdamW.
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        # Samples per optimizer step, unless --batch-size says otherwise.
        "batch_size": 16,
        # "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000),
        # "accumulate": 4,  # this many batches of batch_size / 4 for one optimizer step
        # "clip_grad_norm": 1.0,  # after the loss scale is taken out of the gradients
        "unit": "images",  # what throughput counts: images, tokens or samples
        # "units_per_sample": 512,  # tokens in a sample, for example
        # In the place of "loss", if you would rather call the model yourself:
        # "training_step": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        # For `castwise accuracy`: a data loader, and a function of the model that returns its score.
        # "training_set": loader,
        # "validate": lambda model: accuracy_of(model),
        # "higher_is_better": True,  # False for a loss
    }}
'''


def write_starter(path: Path) -> None:
    """Write the starter; a file that is there already stays as it is.

    Raises:
        UsageError: The file exists, is not named like Python, or cannot be written.
    """
    if path.suffix != ".py":
        raise UsageError(f"'{path}' is no name of a Python file. Write for example {path.stem or 'my_bench'}.py.")
    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(STARTER.format(file=printable(path.name), function=DEFAULT_FUNCTION))
                file.flush()
            except OSError:  # a full disk
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise file_exists(path) from None
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written: {error.strerror or error}.") from None
