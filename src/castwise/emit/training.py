"""The parts of a script that belong to a training run: data on the device, a schedule, epochs and what is printed."""

from castwise.emit.builder import ScriptBuilder
from castwise.errors import UsageError
from castwise.registry.datasets import IMAGE_FACTS, imitated_data_set
from castwise.registry.precisions import Precision
from castwise.registry.techniques import StepConfig
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec

_SCHEDULES = ("constant", "step", "triangular")

_ARGUMENTS = """\
import argparse
parser = argparse.ArgumentParser(){data}
parser.add_argument("--epochs", type=int, default={epochs})
parser.add_argument("--steps", type=int, {steps})
parser.add_argument("--save", metavar="FILE", help="where to save the trained weights")
arguments = parser.parse_args()"""

_DATA_ARGUMENT = """
parser.add_argument("--data", default="data", help="where {name} lies, or is downloaded to")"""

_READ = """\
import torchvision
def read(train):
    data_set = torchvision.datasets.{name}(arguments.data, train=train, download=True)
    return torch.as_tensor(data_set.data){channels_first}, torch.as_tensor(data_set.targets)"""

_DRAW = """\
def read(train):
    count = 2_000 if train else 400  # random images in the place of {name}'s
    images = torch.randint(0, 256, (count, *{shape}), dtype=torch.uint8)
    return images, torch.randint({classes}, (count,))"""

_DATA = """\
order = Epochs(BATCH_SIZE, {shuffle}, {drop_last}, {seed})
data = DeviceImages(read(True), "{name}", AUGMENTATIONS["{transform}"], order, DEVICE)
tested = DeviceImages(read(False), "{name}", Augmentation(), Epochs({tested_size}, shuffle=False), DEVICE)"""

_ACCURACY = """\
def accuracy():
    right = 0
    model.eval()
    with torch.no_grad(){autocast}:
        for parts in tested.start(0):
            images, labels = to_device(tested.make(parts))
            right += int((model(images).argmax(1) == labels).sum())
    model.train()
    return right / tested.num_samples"""


def check_training(data_set: str, recipe: Recipe) -> None:
    """Raise UsageError if no script can be written of a training run, even if its data lies on the device."""
    if _real_name(data_set) not in IMAGE_FACTS:
        known = ", ".join(IMAGE_FACTS)
        raise UsageError(f"A script trains on {known}; --emit does not go with the data set {data_set}.")
    if recipe.schedule.kind not in _SCHEDULES:
        raise UsageError(f"A script has no schedule '{recipe.schedule.kind}'; leave --emit out.")


def write_images(script: ScriptBuilder, spec: TrialSpec, recipe: Recipe, config: StepConfig) -> None:
    """Write the lines that bring a data set to the device: `data` for training, `tested` for validation."""
    check_training(spec.data_set, recipe)
    if not config.resident_data:
        raise UsageError("A script has its data on the device; this loop reads it through a loader.")
    name = _real_name(spec.data_set)
    facts = IMAGE_FACTS[name]
    read = _READ if imitated_data_set(spec.data_set) is None else _DRAW
    data = _DATA.format(
        shuffle=recipe.loader.shuffle,
        drop_last=recipe.loader.drop_last,
        name=name,
        transform=recipe.transform or name,
        tested_size=recipe.validation_batch_size,
        seed=spec.seed,
    )
    for part in ("DeviceImages", "Epochs", "Augmentation", "AUGMENTATIONS"):
        script.copy(f"castwise.trial.data.gpu_augmentation:{part}")
    steps = 'help="steps of an epoch; all of them without it"'
    write_arguments(script, epochs=recipe.num_epochs, steps=steps, data=_DATA_ARGUMENT.format(name=facts.torchvision))
    channels_first = "[:, None]" if facts.shape[0] == 1 else ".permute(0, 3, 1, 2)"
    blanks = {"name": facts.torchvision, "shape": facts.shape, "classes": facts.num_classes}
    script.define(read.format(**blanks, channels_first=channels_first))
    script.add(data)


def write_schedule(script: ScriptBuilder, recipe: Recipe, config: StepConfig) -> None:
    """Write the lines that make `scheduler`, if the rate is not constant."""
    schedule = recipe.schedule
    if schedule.kind == "constant":
        return
    lines = []
    if config.reads_rates_on_device:
        keep = script.copy("castwise.apply.techniques.optimizer_options:keep_rates_on_device")
        lines.append(f"{keep}(optimizer, DEVICE)")
    arguments = ", ".join(f"{name}={value!r}" for name, value in schedule.arguments.items())
    if schedule.kind == "step":
        lines.append(f"scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, {arguments})")
    else:
        triangular = script.copy("castwise.trial.lr_schedules:triangular")
        multiplier = f"{triangular}({recipe.epochs} * data.num_batches, {arguments})"
        lines.append(f"scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, {multiplier})")
    script.add(*lines)


def write_arguments(script: ScriptBuilder, *, epochs: int, steps: str, data: str = "") -> None:
    """Write the lines that read the script's options."""
    script.add(_ARGUMENTS.format(epochs=epochs, steps=steps, data=data))


def write_accuracy(script: ScriptBuilder, precision: Precision) -> None:
    """Write the lines that define `accuracy()`, of the model on the validation data."""
    dtype = precision.autocast_dtype
    autocast = "" if dtype is None else f", torch.autocast(DEVICE.type, dtype=torch.{dtype})"
    script.define(_ACCURACY.format(autocast=autocast))


def _real_name(data_set: str) -> str:
    return imitated_data_set(data_set) or data_set
