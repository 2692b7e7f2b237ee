"""Model, loss and data of castwise's own workloads, as a script defines them."""

from castwise.errors import UsageError
from castwise.registry.workloads import Workload
from castwise.render.emit.builder import ScriptBuilder
from castwise.render.emit.source import copy_definitions

_MODELS = "castwise.worker.models"
_ZOO = f"{_MODELS}.torchvision_timm"

# By family: the definition that makes a model of castwise's own, and how it is called with the row's options.
_OWN_MODELS = {
    "mlp": ("mlp:_build_model", "({width})"),
    "mnist_cnn": ("mnist_cnn:MnistCnn", "()"),
    "wide_resnet": ("wide_resnet:WideResNet", "({depth}, {widen}, {dropout})"),
    "dpn": ("dpn:DualPathNetwork", "()"),
    "rnn_lm": ("rnn_lm:LanguageModel", "({kind!r}, {width}, {dropout})"),
}
_NUM_CLASSES = {"mnist_cnn": 10, "wide_resnet": 10, "dpn": 10}

_CROSS_ENTROPY = """\
def compute_loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)"""

_SQUARED_ERROR = """\
def compute_loss(model, batch):
    samples, targets = batch
    return nn.functional.mse_loss(model(samples).float(), targets)"""

_IMAGES = """\
def make_batches(count, batch_size, device, generator):
    def make_batch():
        size = (batch_size, *INPUT_SHAPE)
        images = {draw}
        return images, torch.randint(NUM_CLASSES, (batch_size,), generator=generator, device=device)

    return [make_batch() for _ in range(count)]"""

_VECTORS = """\
def make_batches(count, batch_size, device, generator):
    def draw():
        return torch.randn(batch_size, {width}, generator=generator, device=device)

    return [(draw(), draw()) for _ in range(count)]"""


def check_workload(row: Workload) -> None:
    """Make sure that a script can make a workload's model.

    Raises:
        UsageError: It cannot.
    """
    if row.family not in (*_OWN_MODELS, "torchvision", "timm"):
        raise UsageError(
            f"No script can be emitted of {row.name}: its model starts from weights that a script does not have."
        )


def write_model(script: ScriptBuilder, row: Workload) -> None:
    """Write the lines that make `model`, and what its data must look like.

    Raises:
        UsageError: The workload is of a family that no script can be written of.
    """
    check_workload(row)
    options = dict(row.options)
    if row.family == "torchvision":
        _write_torchvision_model(script, row, str(options["model"]).lower())
    elif row.family == "timm":
        name = options["model"]
        script.add(
            "import timm",
            f"NUM_CLASSES = timm.models.get_pretrained_cfg({name!r}).num_classes or 1000",
            f"model = timm.create_model({name!r}, pretrained=False, num_classes=NUM_CLASSES)",
            'UNITS_PER_SAMPLE, INPUT_SHAPE = 1, timm.data.resolve_model_data_config(model)["input_size"]',
        )
    else:
        root, call = _OWN_MODELS[row.family]
        script.copy(f"{_MODELS}.{root}")
        values = {"width": row.input_shape[0] if row.input_shape else 0} | options
        script.add(f"model = {root.partition(':')[2]}{call.format(**values)}")
        if row.family == "rnn_lm":
            script.copy(f"{_MODELS}.rnn_lm:_NUM_STEPS")
            script.add("UNITS_PER_SAMPLE = _NUM_STEPS")
        else:
            script.add(f"UNITS_PER_SAMPLE, INPUT_SHAPE = 1, {row.input_shape!r}")
        if row.family in _NUM_CLASSES:
            script.add(f"NUM_CLASSES = {_NUM_CLASSES[row.family]}")
    script.end_section()


def _write_torchvision_model(script: ScriptBuilder, row: Workload, name: str) -> None:
    tables = (f"{_ZOO}:_MODEL_ARGUMENTS", f"{_ZOO}:_ROW_ARGUMENTS")
    has_arguments = f'"{name}"' in copy_definitions(tables)[1]
    if has_arguments and (row.name == name or name in ("inception_v3", "googlenet")):
        script.copy(*tables)
        arguments = f", **_MODEL_ARGUMENTS.get({name!r}, {{}}), **_ROW_ARGUMENTS.get({row.name!r}, {{}})"
    else:
        arguments = ""
    side = 299 if name == "inception_v3" else 224
    shape = row.input_shape if ":" not in row.name else (3, side, side)
    script.add(
        "from torchvision import models",
        f"model = models.get_model({name!r}, weights=None{arguments})",
        f"UNITS_PER_SAMPLE, INPUT_SHAPE, NUM_CLASSES = 1, {shape!r}, 1000",
    )


def write_loss(script: ScriptBuilder, row: Workload) -> None:
    """Write the lines that define `compute_loss(model, batch)`."""
    if row.family == "rnn_lm":
        script.copy(f"{_MODELS}.rnn_lm:CarriedLoss")
        script.add_section("carried = CarriedLoss()\ncompute_loss = carried.compute_loss")
    else:
        script.add_section("from torch import nn", _SQUARED_ERROR if row.family == "mlp" else _CROSS_ENTROPY)


def write_data(script: ScriptBuilder, row: Workload) -> None:
    """Write the lines that define `make_batches`, which draws what castwise's steps are timed on."""
    if row.family == "rnn_lm":
        script.copy(f"{_MODELS}.rnn_lm:_make_batches")
        script.add_section("make_batches = _make_batches")
    elif row.family == "mlp":
        script.add_section(_VECTORS.format(width=row.input_shape[0]))
    elif row.family in _NUM_CLASSES:
        script.add_section(_IMAGES.format(draw="torch.randn(size, generator=generator, device=device)"))
    else:
        script.add_section(_IMAGES.format(draw="torch.rand(size, generator=generator, device=device) * 2 - 1"))
