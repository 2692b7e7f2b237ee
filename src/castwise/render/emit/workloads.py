"""Model, loss and data of a workload, as a script defines them."""

from castwise.errors import UsageError
from castwise.registry.workloads import Workload
from castwise.render.emit.source import definitions, plain_definitions

_ZOO = "worker/models/torchvision_timm.py"

# The module of a family whose models castwise defines, and how one is made of the row's options.
_OWN = {
    "mlp": ("worker/models/mlp.py", "_build_model({width})"),
    "mnist_cnn": ("worker/models/mnist_cnn.py", "MnistCnn()"),
    "wide_resnet": ("worker/models/wide_resnet.py", "WideResNet({depth}, {widen}, {dropout})"),
    "dpn": ("worker/models/dpn.py", "DualPathNetwork()"),
    "rnn_lm": ("worker/models/rnn_lm.py", "LanguageModel({kind!r}, {width}, {dropout})"),
}
_CLASSES = {"mnist_cnn": 10, "wide_resnet": 10, "dpn": 10}

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

# castwise's own reach into data classes and mappings too; what the models of scripts take and return is tuples.
OF_TUPLES = '''\
Batch = tuple[Tensor, ...]
TreeSignature = tuple[tuple[torch.Size, torch.dtype], ...]


def tree_tensors(batch: Batch) -> Batch:
    """Return the tensors of a batch."""
    return batch


def tree_map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return a batch with every tensor replaced."""
    return tuple(map(function, batch))


def tree_signature(batch: Batch) -> TreeSignature:
    """Return the shapes and dtypes of a batch's tensors."""
    return tuple((part.shape, part.dtype) for part in batch)'''


def model_of(row: Workload) -> str:
    """Return the lines that make `model`, and what its data must look like.

    Raises:
        UsageError: The workload is of a family that no script can be written of.
    """
    options = dict(row.options)
    if row.family in _OWN:
        module, made = _OWN[row.family]
        values = {"width": row.input_shape[0] if row.input_shape else 0} | options
        lines = [f"model = {made.format(**values)}"]
        if row.family == "rnn_lm":
            lines.append("UNITS_PER_SAMPLE = _NUM_STEPS")
        else:
            lines.append(f"UNITS_PER_SAMPLE, INPUT_SHAPE = 1, {row.input_shape!r}")
        if row.family in _CLASSES:
            lines.append(f"NUM_CLASSES = {_CLASSES[row.family]}")
        return "\n\n\n".join([plain_definitions(module), "\n".join(lines)])
    name = str(options.get("model", ""))
    if row.family == "torchvision":
        return _torchvision(row, name.lower())
    if row.family == "timm":
        return "\n".join(
            [
                f"NUM_CLASSES = timm.models.get_pretrained_cfg({name!r}).num_classes or 1000",
                f"model = timm.create_model({name!r}, pretrained=False, num_classes=NUM_CLASSES)",
                'UNITS_PER_SAMPLE, INPUT_SHAPE = 1, timm.data.resolve_model_data_config(model)["input_size"]',
            ]
        )
    raise UsageError(f"No script can be emitted of {row.name}: its model starts from weights that a script has not.")


def _torchvision(row: Workload, name: str) -> str:
    tables = ["_ONE_OUTPUT", "_MODEL_ARGUMENTS", "_SOURCE_NORM", "_ROW_ARGUMENTS"]
    text = definitions(_ZOO, tables)
    special = f'"{name}"' in text and (row.name == name or name in ("inception_v3", "googlenet"))
    given = f", **_MODEL_ARGUMENTS.get({name!r}, {{}}), **_ROW_ARGUMENTS.get({row.name!r}, {{}})" if special else ""
    side = 299 if name == "inception_v3" else 224
    shape = row.input_shape if ":" not in row.name else (3, side, side)
    made = f"model = models.get_model({name!r}, weights=None{given})"
    lines = f"{made}\nUNITS_PER_SAMPLE, INPUT_SHAPE, NUM_CLASSES = 1, {shape!r}, 1000"
    return f"{text}\n\n\n{lines}" if special else lines


def compute_loss_of(row: Workload) -> str:
    """Return the lines that define `compute_loss(model, batch)`."""
    if row.family == "mlp":
        return _SQUARED_ERROR
    if row.family != "rnn_lm":
        return _CROSS_ENTROPY
    parts = [
        "Batch = tuple[Tensor, ...]\nBatchScore = tuple[Tensor, Tensor | None, int]",
        definitions("worker/models/rnn_lm.py", ["CarriedLoss", "_detach"]),
        "carried = CarriedLoss()\ncompute_loss = carried.compute_loss",
    ]
    return "\n\n\n".join(parts)


def data_of(row: Workload) -> str:
    """Return the lines that define `make_batches`, which draws what castwise's steps are timed on."""
    if row.family == "mlp":
        return _VECTORS.format(width=row.input_shape[0])
    if row.family == "rnn_lm":
        return definitions("worker/models/rnn_lm.py", ["_make_batches"]).replace("_make_batches", "make_batches")
    if row.family in _CLASSES:
        return _IMAGES.format(draw="torch.randn(size, generator=generator, device=device)")
    return _IMAGES.format(draw="torch.rand(size, generator=generator, device=device) * 2 - 1")
