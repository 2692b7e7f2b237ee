"""The script of a training run whose data lies on the device: what is read, how an epoch goes, what is printed."""

from castwise.errors import UsageError
from castwise.registry.datasets import imitated_data_set
from castwise.render.emit.source import definitions
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec

# torchvision's class of each data set, and one image's shape with the number of classes, for random stand-ins.
_SETS = {
    "mnist": ("MNIST", (1, 28, 28), 10),
    "cifar10": ("CIFAR10", (3, 32, 32), 10),
    "cifar100": ("CIFAR100", (3, 32, 32), 100),
}
_SCHEDULES = ("constant", "step", "triangular")

_READ = """\
def read(train):
    data_set = torchvision.datasets.{name}(arguments.data, train=train, download=True)
    images = torch.as_tensor(data_set.data)
    images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
    return images, torch.as_tensor(data_set.targets)"""

_DRAW = """\
def read(train):
    count = 2_000 if train else 400  # random images in the place of {name}'s
    images = torch.randint(0, 256, (count, *{shape}), dtype=torch.uint8)
    return images, torch.randint({classes}, (count,))"""

_ARGUMENTS = """\
parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data", help="where {name} lies, or is downloaded to")
parser.add_argument("--epochs", type=int, default={epochs})
parser.add_argument("--steps", type=int, default=None, help="steps of an epoch; all of them without it")
arguments = parser.parse_args()"""

# What `DeviceImages` asks of ranks, where there is one.
_PEERS = """\
class Peers:
    rank, world_size = 0, 1"""

_RUN = """\
def synchronize():
    {flush}if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def accuracy():
    right = 0
    model.eval()
    with torch.no_grad(), {autocast}:
        for parts in tested.start(0):
            images, labels = prepared(tested.make(parts))
            right += int((model(images).argmax(1) == labels).sum())
    model.train()
    return right / tested.num_samples


rates = []
for epoch in range(arguments.epochs):
    synchronize()
    started, count = time.perf_counter(), 0
    for index, parts in enumerate(data.start(epoch)):
        if index == arguments.steps:
            break
        loss = step(parts)
        {read}count += len(parts[0])
        {after_step}
    synchronize()
    rates.append(count / (time.perf_counter() - started))
    {after_epoch}
    print(f"epoch {{epoch + 1}} loss {{loss.item():.9g}} {{rates[-1]:.6g}} {{UNIT}}/s")
print(f"accuracy {{accuracy():.4f}}")
print(f"{{statistics.median(rates[1:] or rates):.6g}} {{UNIT}}/s")"""


def check_training(data_set: str, recipe: Recipe) -> None:
    """Make sure that a script can be written of a training run, should its data come to lie on the device.

    Raises:
        UsageError: None can.
    """
    if _name_of(data_set) not in _SETS:
        raise UsageError(f"A script trains on {', '.join(_SETS)}; --emit does not go with the data set {data_set}.")
    if recipe.schedule.kind not in _SCHEDULES:
        raise UsageError(f"A script has no schedule '{recipe.schedule.kind}'; leave --emit out.")


def images_of(spec: TrialSpec, recipe: Recipe) -> str:
    """Return the lines that bring a data set to the device: `data` for training, `tested` for validation.

    Raises:
        UsageError: The loop reads its data through a loader, which a script has not.
    """
    check_training(spec.data_set, recipe)
    if "resident-data" not in spec.techniques:
        raise UsageError("A script has its data on the device; this loop reads it through a loader.")
    name = _name_of(spec.data_set)
    title, shape, classes = _SETS[name]
    read = _READ if imitated_data_set(spec.data_set) is None else _DRAW
    transform = recipe.transform or name
    names = ["Images", "_ALONE", "Augmentation", "_NONE", "_CIFAR", "AUGMENTATIONS", "Epochs"]
    made = f"DeviceImages(read(True), {transform!r}, AUGMENTATIONS[{transform!r}], order, DEVICE)"
    order = f"Epochs(BATCH_SIZE, {recipe.loader.shuffle}, {recipe.loader.drop_last}, SEED)"
    return "\n\n\n".join(
        [
            _ARGUMENTS.format(name=title, epochs=recipe.num_epochs),
            "Batch = tuple[Tensor, ...]\nChannels = tuple[float, ...]",
            _PEERS,
            definitions("worker/data/transforms.py", ["STATISTICS"]),
            definitions("worker/data/seeding.py", ["_RUNS", "_RANKS", "_SEEDS", "seed_of"]),
            definitions("worker/data/gpu_augmentation.py", [*names, "DeviceImages"]),
            read.format(name=title, shape=shape, classes=classes),
            f"order = {order}\ndata = {made}\n"
            f"tested = DeviceImages(read(False), {transform!r}, Augmentation(), "
            f"Epochs({recipe.validation_batch_size}, shuffle=False), DEVICE)",
        ]
    )


def schedule_of(recipe: Recipe, *, rates_on_device: bool) -> str:
    """Return the lines that make `scheduler`, empty where the rate is constant.

    Args:
        recipe: The run.
        rates_on_device: Whether the rate has to be a tensor.
    """
    schedule = recipe.schedule
    if schedule.kind == "constant":
        return ""
    lines: list[str] = []
    if rates_on_device:
        lines += [definitions("worker/techniques/optimizer_options.py", ["keep_rates_on_device"]), "", ""]
        lines.append("keep_rates_on_device(optimizer, DEVICE)")
    arguments = ", ".join(f"{name}={value!r}" for name, value in schedule.arguments.items())
    if schedule.kind == "step":
        lines.append(f"scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, {arguments})")
    else:
        lines += ["", "", definitions("worker/lr_schedules.py", ["triangular"]), "", ""]
        total = f"{recipe.epochs} * data.num_batches"
        lines.append(f"scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, triangular({total}, {arguments}))")
    return "\n".join(lines).strip("\n")


def run_of(recipe: Recipe, *, reads_loss: bool, autocast: str, at_once: int) -> str:
    """Return the lines that train, epoch by epoch, and print losses, accuracy and speed.

    Args:
        recipe: The run.
        reads_loss: Whether the loss is read after every step.
        autocast: What the model runs under.
        at_once: Steps that are one launch.
    """
    kind = recipe.schedule.kind
    text = _RUN.format(
        flush="step.flush()\n    " if at_once > 1 else "",
        read="loss.item()  # as the source does\n        " if reads_loss else "",
        after_step="scheduler.step()" if kind == "triangular" else "",
        after_epoch="scheduler.step()" if kind == "step" else "",
        autocast=autocast,
    )
    return "\n".join(line for line in text.split("\n") if line.strip() or not line)


def _name_of(data_set: str) -> str:
    return imitated_data_set(data_set) or data_set
