"""Model, loss and random batches of castwise's own workloads, copied as they are measured."""

from collections.abc import Sequence

from castwise.emit.builder import ScriptBuilder
from castwise.errors import UsageError
from castwise.registry.workloads import Workload

_MODELS = "castwise.trial.models"
_IMAGES = f"{_MODELS}.torchvision_timm"

# By family: the class that is copied, the call with the row's options that makes the model, and its classes.
_COPIED = {
    "mnist_cnn": ("mnist_cnn:MnistCnn", "()", 10),
    "wide_resnet": ("wide_resnet:WideResNet", "({depth}, {widen}, {dropout})", 10),
    "resnet9": ("resnet9:ResNet9", "()", 10),
    "dpn": ("dpn:DualPathNetwork", "()", 10),
}
# What torchvision's builders are called with besides `weights`; of the second by the row's name. Source:
# castwise/trial/models/torchvision_timm.py.
_ONE_OUTPUT = ", aux_logits=False, init_weights=True"
_BUILDER_ARGUMENTS = {"inception_v3": _ONE_OUTPUT, "googlenet": _ONE_OUTPUT}
_SOURCE_NORM = ", norm_layer=partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01)"
_ROW_ARGUMENTS = {"efficientnet_b0": _SOURCE_NORM, "efficientnet_b4": _SOURCE_NORM}
_RECURRENT_LENGTH = 35  # tokens of a column


def check_workload(row: Workload) -> None:
    """Make sure that a script can make a workload's model.

    Raises:
        UsageError: It cannot.
    """
    if row.family not in (*_COPIED, "mlp", "rnn_lm", "torchvision", "timm", "transformer"):
        raise UsageError(
            f"No script can be emitted of {row.name}: its model starts from weights that a script does not have."
        )


def write_model(script: ScriptBuilder, row: Workload) -> None:
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
        script.add(f"model = {script.copy(f'{_MODELS}.mlp:build_model')}({row.input_shape[0]})")
    elif row.family == "rnn_lm":
        made = script.copy(f"{_MODELS}.rnn_lm:LanguageModel")
        script.add(f'model = {made}("{options["kind"]}", {options["width"]}, {options["dropout"]})')
    elif row.family == "transformer":
        names = [script.copy(f"{_MODELS}.transformer:{name}") for name in ("Architecture", "Transformer")]
        sizes = ", ".join(f"{name}={value!r}" for name, value in options.items())
        model = "with DEVICE:  # a GPU draws the first weights faster"
        script.add(f"ARCHITECTURE = {names[0]}({sizes})", model, f"    model = {names[1]}(ARCHITECTURE)")
    else:
        root, arguments, _ = _COPIED[row.family]
        script.add(f"model = {script.copy(f'{_MODELS}.{root}')}{arguments.format(**options)}")


def units_per_sample(row: Workload) -> int:
    """Return how many units of throughput a sample has."""
    if row.unit != "tokens":
        return 1
    return _RECURRENT_LENGTH if row.family == "rnn_lm" else int(dict(row.options)["length"])


def write_loss(script: ScriptBuilder, row: Workload, loss_options: Sequence[tuple[str, int | bool]]) -> None:
    """Write the lines that define `compute_loss(model, batch)`; `loss_options` are those of a language model's loss."""
    options = ", ".join(f"{name}={value!r}" for name, value in loss_options)
    if row.family == "rnn_lm":  # the recurrent state goes on from batch to batch
        script.add(f"carried = {script.copy(f'{_MODELS}.rnn_lm:CarriedLoss')}()")
        compute = f"partial(carried.compute_loss, {options})" if options else "carried.compute_loss"
        script.add(*(["from functools import partial"] if options else []), f"compute_loss = {compute}", spacing="\n")
        return
    inputs, targets, function = "images", "labels", "cross_entropy"
    if row.family == "mlp":
        inputs, targets, function = "samples", "targets", "mse_loss"
    loss = f"nn.functional.{function}(model({inputs}).float(), {targets})"
    if row.unit == "tokens":
        inputs, targets = "tokens", "targets"
        loss = "nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())"
        if options:
            loss = f"model(tokens, targets, {options})  # decoder and loss, without keeping all logits"
    script.define("def compute_loss(model, batch):", f"    {inputs}, {targets} = batch", f"    return {loss}")


def write_batches(script: ScriptBuilder, row: Workload, seed: int) -> None:
    """Write the lines that draw `batches` as castwise draws its own."""
    count = row.resident_batches
    drawn = f"{count}, BATCH_SIZE, DEVICE, generator)"
    if row.family == "rnn_lm":
        made = f"{script.copy(f'{_MODELS}.rnn_lm:make_batches')}({drawn}"
    elif row.unit == "tokens":
        made = f"{script.copy(f'{_MODELS}.transformer:RandomTokens')}(ARCHITECTURE)({drawn}"
    elif row.family == "mlp":
        made = f"{script.copy(f'{_MODELS}.mlp:make_batches')}({row.input_shape[0]}, {drawn}"
    else:
        draw = "torch.randn" if row.family in (*_COPIED, "transformer") else script.copy(f"{_IMAGES}:draw_uniform")
        shape, classes = str(_shape(row)), str(_COPIED[row.family][2]) if row.family in _COPIED else "1000"
        if row.family == "timm":
            shape, classes = "INPUT_SHAPE", "NUM_CLASSES"
        made = f"{script.copy(f'{_IMAGES}:RandomImages')}({draw}, {shape}, {classes})({drawn}"
    script.add(
        "# Random batches stand in for your data.",
        f"generator = torch.Generator(DEVICE).manual_seed({seed})",
        f"batches = [to_device(batch) for batch in {made}]",
    )


def _shape(row: Workload) -> tuple[int, ...]:
    if row.family == "torchvision" and ":" in row.name:
        side = 299 if str(dict(row.options)["model"]).lower() == "inception_v3" else 224
        return (3, side, side)
    return row.input_shape
