"""Model, loss and data of castwise's own workloads, as a script defines them."""

from collections.abc import Sequence

from castwise.errors import UsageError
from castwise.registry.workloads import Workload
from castwise.render.emit.builder import ScriptBuilder

_MODELS = "castwise.worker.models"

LossOptions = Sequence[tuple[str, int | bool]]

# By family: the definition that is copied, the call with the row's options that makes the model, and its classes.
_COPIED = {
    "mnist_cnn": ("mnist_cnn:MnistCnn", "MnistCnn()", 10),
    "wide_resnet": ("wide_resnet:WideResNet", "WideResNet({depth}, {widen}, {dropout})", 10),
    "resnet9": ("resnet9:ResNet9", "ResNet9()", 10),
    "dpn": ("dpn:DualPathNetwork", "DualPathNetwork()", 10),
}
# What torchvision's builders are called with besides `weights`; of the second by the row's name. Source:
# castwise/worker/models/torchvision_timm.py.
_ONE_OUTPUT = ", aux_logits=False, init_weights=True"
_BUILDER_ARGUMENTS = {"inception_v3": _ONE_OUTPUT, "googlenet": _ONE_OUTPUT}
_SOURCE_NORM = ", norm_layer=partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01)"
_ROW_ARGUMENTS = {"efficientnet_b0": _SOURCE_NORM, "efficientnet_b4": _SOURCE_NORM}

_LANGUAGE_MODEL = """\
class LanguageModel(nn.Module):
    takes_infinite_logits = True

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout({dropout})
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.{kind}(WIDTH, WIDTH, num_layers=2, dropout={dropout})
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

{forward}"""

# The embedding has a statement of its own: in torch 2.11, what is computed within an RNN's call is not compiled.
_FORWARD = """\
    def forward(self, tokens, state):
        embedded = self.drop(self.encoder(tokens))
        output, state = self.rnn(embedded, state)
        return self.decoder(self.drop(output)), state"""

_CHUNKED_FORWARD = """\
    def forward(self, tokens, state, targets):
        embedded = self.drop(self.encoder(tokens))
        output, state = self.rnn(embedded, state)
        return {function}(self.drop(output), self.decoder, targets, {chunks}), state"""

_STATE = """\
# The recurrent state, which each batch takes over from the one before; set it to zeros where your text begins anew.
state = [torch.zeros(2, BATCH_SIZE, model.rnn.hidden_size, device=DEVICE{dtype}) for _ in range({count})]"""

_LANGUAGE_LOSS = """\
def compute_loss(model, batch, state):
    tokens, targets = batch  # of shape (LENGTH, BATCH_SIZE), and the next tokens, flattened
    logits, new = model(tokens, {state})
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)
    return loss, {new}"""

_TOKEN_LOSS = """\
def compute_loss(model, batch):
    tokens, targets = batch  # of shape (BATCH_SIZE, LENGTH)
    return {loss}"""

_CHUNKED_LOSS = """\
def compute_loss(model, batch, state):
    tokens, targets = batch  # of shape (LENGTH, BATCH_SIZE), and the next tokens, flattened
    loss, new = model(tokens, {state}, targets)
    return loss, {new}"""

_TOKENS = """\
stream = torch.randint(VOCABULARY, ({count} * LENGTH + 1, BATCH_SIZE), generator=generator, device=DEVICE)
starts = range(0, {count} * LENGTH, LENGTH)
batches = [(stream[i : i + LENGTH], stream[i + 1 : i + 1 + LENGTH].flatten()) for i in starts]"""

_IMAGES = """\
def draw_batch():
    images = {draw}
    return images, torch.randint({classes}, (BATCH_SIZE,), generator=generator, device=DEVICE)"""

_VECTORS = """\
def draw():
    return torch.randn(BATCH_SIZE, {width}, generator=generator, device=DEVICE)"""


def check_workload(row: Workload) -> None:
    """Make sure that a script can make a workload's model.

    Raises:
        UsageError: It cannot.
    """
    if row.family not in (*_COPIED, "mlp", "rnn_lm", "torchvision", "timm", "transformer"):
        raise UsageError(
            f"No script can be emitted of {row.name}: its model starts from weights that a script does not have."
        )


def write_model(script: ScriptBuilder, row: Workload, loss_options: LossOptions) -> None:
    """Write the lines that make `model`.

    Raises:
        UsageError: The workload is of a family that no script can be written of.
    """
    check_workload(row)
    options = dict(row.options)
    if row.family == "torchvision":
        name = str(options["model"]).lower()
        arguments = _BUILDER_ARGUMENTS.get(name, "") + _ROW_ARGUMENTS.get(row.name, "")
        lines = ["from functools import partial"] if "partial" in arguments else []
        script.add(
            "from torchvision import models", *lines, f'model = models.get_model("{name}", weights=None{arguments})'
        )
    elif row.family == "timm":
        name = str(options["model"])
        script.add(
            "import timm",
            f'NUM_CLASSES = timm.models.get_pretrained_cfg("{name}").num_classes or 1000',
            f'model = timm.create_model("{name}", pretrained=False, num_classes=NUM_CLASSES)',
            'INPUT_SHAPE = timm.data.resolve_model_data_config(model)["input_size"]',
        )
    elif row.family == "mlp":
        (width,) = row.input_shape
        layers = [f"nn.Linear({width}, {width})"] * 3
        script.add(f"model = nn.Sequential({', nn.ReLU(), '.join(layers)})")
    elif row.family == "rnn_lm":
        kind = {"RNN_TANH": "RNN"}.get(str(options["kind"]), options["kind"])
        forward = _FORWARD
        if loss_options:
            function = script.borrow(f"{_MODELS}.chunked_loss:chunked_loss")
            forward = _CHUNKED_FORWARD.format(function=function, chunks=dict(loss_options)["num_chunks"])
        script.add(f"VOCABULARY, WIDTH, LENGTH = 33_278, {options['width']}, 35")
        script.define(_LANGUAGE_MODEL.format(kind=kind, dropout=options["dropout"], forward=forward))
        script.add("model = LanguageModel()")
    elif row.family == "transformer":
        names = [script.borrow(f"{_MODELS}.transformer:{name}") for name in ("Architecture", "Transformer")]
        sizes = ", ".join(f"{name}={value!r}" for name, value in options.items())
        lines = [f"LENGTH = {options['length']}"] if row.unit == "tokens" else []
        model = "with DEVICE:  # a GPU draws the first weights faster"
        script.add(*lines, f"ARCHITECTURE = {names[0]}({sizes})", model, f"    model = {names[1]}(ARCHITECTURE)")
    else:
        root, call, _ = _COPIED[row.family]
        script.copy(f"{_MODELS}.{root}")
        script.add(f"model = {call.format(**options)}")


def units_of(row: Workload) -> str:
    """Return the units of a batch as a script writes them."""
    return "BATCH_SIZE * LENGTH" if row.unit == "tokens" else "BATCH_SIZE"


def write_loss(script: ScriptBuilder, row: Workload, dtype: str, loss_options: LossOptions) -> None:
    """Write the lines that define `compute_loss(model, batch)`.

    Args:
        script: The script.
        row: The workload.
        dtype: Of 16-bit weights, which inputs are cast to, or of an RNN's state: "torch.float16"; empty if float32.
        loss_options: Of the step's settings, those of a language model's loss.
    """
    cast = f".to({dtype})" if dtype else ""
    if row.family == "rnn_lm":
        is_pair = dict(row.options)["kind"] == "LSTM"
        script.add(_STATE.format(count=2 if is_pair else 1, dtype=dtype and f", dtype={dtype}"))
        text = _CHUNKED_LOSS if loss_options else _LANGUAGE_LOSS
        new = "[part.detach() for part in new]" if is_pair else "[new.detach()]"
        script.define(text.format(state="tuple(state)" if is_pair else "state[0]", new=new))
        return
    if row.unit == "tokens":
        loss = "nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())"
        if loss_options:
            options = ", ".join(f"{name}={value!r}" for name, value in loss_options)
            loss = f"model(tokens, targets, {options})  # decoder and loss, without keeping all logits"
        script.define(_TOKEN_LOSS.format(loss=loss))
        return
    name, loss = ("samples, targets", "mse_loss") if row.family == "mlp" else ("images, labels", "cross_entropy")
    inputs, target = name.split(", ")
    script.define(
        "def compute_loss(model, batch):",
        f"    {name} = batch",
        f"    return nn.functional.{loss}(model({inputs}{cast}).float(), {target})",
    )


def write_to_device(script: ScriptBuilder, row: Workload, image_lines: Sequence[str]) -> None:
    """Write `to_device(batch)`, whose `image_lines` bring images into the layout of the loop."""
    names = {"samples": "samples, targets", "tokens": "tokens, targets"}.get(row.unit, "images, labels")
    inputs, target = names.split(", ")
    script.define(
        "def to_device(batch):  # a batch of your loader",
        f"    {names} = batch",
        f"    {inputs}, {target} = {inputs}.to(DEVICE, non_blocking=True), {target}.to(DEVICE, non_blocking=True)",
        *(f"    {line}" for line in image_lines),
        f"    return {names}",
    )


def write_batches(script: ScriptBuilder, row: Workload, seed: int) -> None:
    """Write the lines that draw `batches` as castwise draws its own."""
    count = row.resident_batches
    script.add("# Random batches stand in for your data.", f"generator = torch.Generator(DEVICE).manual_seed({seed})")
    if row.family == "rnn_lm":
        script.add(_TOKENS.format(count=count), spacing="\n")
    elif row.unit == "tokens":
        draw = script.borrow(f"{_MODELS}.transformer:RandomTokens")
        script.add(f"batches = {draw}(ARCHITECTURE)({count}, BATCH_SIZE, DEVICE, generator)")
    elif row.family == "mlp":
        script.define(_VECTORS.format(width=row.input_shape[0]))
        script.add(f"batches = [(draw(), draw()) for _ in range({count})]")
    else:
        size, classes = f"(BATCH_SIZE, {', '.join(map(str, _shape(row)))})", "1000"
        draw = f"torch.rand({size}, generator=generator, device=DEVICE) * 2 - 1"
        if row.family == "timm":
            draw = draw.replace(size, "(BATCH_SIZE, *INPUT_SHAPE)")
            classes = "NUM_CLASSES"
        elif row.family in (*_COPIED, "transformer"):
            draw = f"torch.randn({size}, generator=generator, device=DEVICE)"
        if row.family in _COPIED:
            classes = str(_COPIED[row.family][2])
        script.define(_IMAGES.format(draw=draw, classes=classes))
        script.add(f"batches = [to_device(draw_batch()) for _ in range({count})]")


def _shape(row: Workload) -> tuple[int, ...]:
    if row.family == "torchvision" and ":" in row.name:
        side = 299 if str(dict(row.options)["model"]).lower() == "inception_v3" else 224
        return (3, side, side)
    return row.input_shape
