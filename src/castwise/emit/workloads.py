"""Model, loss and random batches of castwise's own workloads, copied as they are measured."""

from collections.abc import Mapping

from castwise.emit.builder import ScriptBuilder
from castwise.errors import UsageError
from castwise.registry.technique_conditions import optimizer_of
from castwise.registry.techniques import step_config_of
from castwise.registry.workloads import Workload, find_workload
from castwise.spec.trial import TrialSpec

_MODELS = "castwise.trial.models"
_IMAGES = f"{_MODELS}.torchvision_timm"

# By family: the class that is copied, whose keywords are the row's options.
_COPIED = {
    "mnist_cnn": "mnist_cnn:MnistCnn",
    "wide_resnet": "wide_resnet:WideResNet",
    "resnet9": "resnet9:ResNet9",
    "dpn": "dpn:DualPathNetwork",
}
# What torchvision's builders are called with besides `weights`; of the second by the row's name. Source:
# castwise/trial/models/torchvision_timm.py.
_ONE_OUTPUT = ", aux_logits=False, init_weights=True"
_BUILDER_ARGUMENTS = {"inception_v3": _ONE_OUTPUT, "googlenet": _ONE_OUTPUT}
_SOURCE_NORM = ", norm_layer=partial(nn.BatchNorm2d, eps=1e-3, momentum=0.01)"
_ROW_ARGUMENTS = {"efficientnet_b0": _SOURCE_NORM, "efficientnet_b4": _SOURCE_NORM}
_RECURRENT_LENGTH = 35  # tokens of a column


def check_workload(row: Workload) -> None:
    """Raise UsageError if a script cannot make a workload's model."""
    if row.family == "own":
        raise UsageError(f"No script can be emitted of a record of {row.name}: the record does not have your model.")
    if row.pretrained is not None:
        raise UsageError(
            f"No script can be emitted of {row.name}: its model starts from weights that a script does not have."
        )


class CastwiseModel:
    """A workload of castwise's in a script; `OwnModel` has the same methods."""

    accumulate = 1
    steps_scheduler = False  # of steps
    casts_calls = True

    def __init__(self, spec: TrialSpec, script: ScriptBuilder) -> None:
        self.spec, self.row, self._script = spec, find_workload(spec.workload), script
        check_workload(self.row)
        self.options = dict(self.row.options)
        self.clip, self.unit, self.units_per_sample = self.row.clip_grad_norm, str(self.row.unit), 1
        if self.row.unit == "tokens":
            self.units_per_sample = int(self.options.get("length", _RECURRENT_LENGTH))
        self.about = "The data is random; your own loader goes where the loop is." if spec.recipe is None else ""

    def write_model(self) -> None:
        """Write the lines that make `model`."""
        script, row, options = self._script, self.row, self.options
        if row.family == "torchvision":
            name = str(options["model"]).lower()
            arguments = _BUILDER_ARGUMENTS.get(name, "") + _ROW_ARGUMENTS.get(row.name, "")
            lines = ["from functools import partial"] if "partial" in arguments else []
            model = f'model = models.get_model("{name}", weights=None{arguments})'
            script.add("from torchvision import models", *lines, model)
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
            arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
            script.add(f"model = {script.copy(f'{_MODELS}.{_COPIED[row.family]}')}({arguments})")

    @property
    def optimizer_name(self) -> str:
        return optimizer_of(self.spec)

    def write_optimizer(self, added: Mapping[str, bool], weights_class: str) -> None:
        """Write the line that makes the optimizer over the weights of a class, with arguments that techniques add."""
        recipe = self.spec.recipe
        asked = None if recipe is None else recipe.optimizer
        given = dict(self.row.optimizer.arguments) if asked is None else dict(asked.arguments)
        written = ", ".join(f"{argument}={value!r}" for argument, value in {**given, **added}.items())
        stepped = "weights.stepped" if weights_class else "model.parameters()"
        self._script.add(f"optimizer = torch.optim.{self.optimizer_name}({stepped}, {written})", spacing="\n")

    def write_scheduler(self) -> None:
        """Write nothing: only training runs have a schedule, that of their recipe."""

    def write_loss(self) -> None:
        """Write the lines that define `compute_loss(model, batch)`."""
        script, row = self._script, self.row
        options = ", ".join(f"{name}={value!r}" for name, value in step_config_of(self.spec.techniques).loss_options)
        if row.family == "rnn_lm":  # the recurrent state goes on from batch to batch
            script.add(f"carried = {script.copy(f'{_MODELS}.rnn_lm:CarriedLoss')}()")
            compute = f"partial(carried.compute_loss, {options})" if options else "carried.compute_loss"
            imports = ["from functools import partial"] if options else []
            script.add(*imports, f"compute_loss = {compute}", spacing="\n")
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

    def write_batches(self) -> None:
        """Write the lines that draw `batches` as castwise draws its own."""
        script, row = self._script, self.row
        drawn = f"{row.resident_batches}, BATCH_SIZE, DEVICE, generator)"
        if row.family == "rnn_lm":
            made = f"{script.copy(f'{_MODELS}.rnn_lm:make_batches')}({drawn}"
        elif row.unit == "tokens":
            made = f"{script.copy(f'{_MODELS}.transformer:RandomTokens')}(ARCHITECTURE)({drawn}"
        elif row.family == "mlp":
            made = f"{script.copy(f'{_MODELS}.mlp:make_batches')}({row.input_shape[0]}, {drawn}"
        else:
            is_normal = row.family in (*_COPIED, "transformer")
            draw = "torch.randn" if is_normal else script.copy(f"{_IMAGES}:draw_uniform")
            shape, classes = str(row.input_shape), "1000"
            if row.family in _COPIED:
                classes = "10"
            elif row.family == "timm":
                shape, classes = "INPUT_SHAPE", "NUM_CLASSES"
            made = f"{script.copy(f'{_IMAGES}:RandomImages')}({draw}, {shape}, {classes})({drawn}"
        script.add(
            "# Random batches stand in for your data.",
            f"generator = torch.Generator(DEVICE).manual_seed({self.spec.seed})",
            f"batches = [to_device(batch) for batch in {made}]",
        )
