"""The script of one loop in plain PyTorch: a loop to read from top to bottom, and what it calls, castwise's own source.

Precision, loss scaling, masters, update and graph are copied, so a script computes what was measured. If that makes the
script too long, the copies go into a second file.
"""

from collections import defaultdict
from pathlib import Path

from castwise.emit import training
from castwise.emit.builder import ScriptBuilder
from castwise.emit.own import OwnModel, check_user_model
from castwise.emit.workloads import CastwiseModel, check_workload
from castwise.errors import UsageError
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import ATTENTION_KERNELS, compiles, join, rows_of, searches_kernels, step_config_of
from castwise.registry.workloads import find_workload
from castwise.spec.loss_scale import DYNAMIC_SCALES
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.spec.user_model import UserParts, locate

_APPLY = "castwise.apply"
_PRECISION, _SCALING, _TECHNIQUES = f"{_APPLY}.precision", f"{_APPLY}.loss_scaling", f"{_APPLY}.techniques"

# Optimizers of torch that can count their steps on the device.
_CAPTURABLE = ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")

_LOADER = """\
# Your data loader goes here: loader = map(to_device, DataLoader(...)), made anew in each epoch.
loader = itertools.cycle(batches)"""

_EPOCHS = """\
import itertools
import time
for epoch in range(arguments.epochs):{first}
    {before}
    started = time.perf_counter()
    for batch in itertools.islice({batches}, arguments.steps):
        loss = train_step(batch)
        {after_step}
    {flush}
    {synchronize}
    per_second = {units} / (time.perf_counter() - started)
    {after_epoch}
    print(f"epoch {{epoch + 1}}: loss {{loss.item():.9g}}, {{per_second:.6g}} {unit}/s{accuracy}")
    {validation}
if arguments.save:
    torch.save({saved}, arguments.save)"""


def check_script(workload: str, data_set: str, recipe: Recipe | None = None, file: Path | None = None) -> None:
    """Raise UsageError, before anything is measured, if no script can be written of a workload's loops to a file."""
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"'{file}' cannot be written: there is no folder '{file.parent}'.")
    row = find_workload(workload)
    if row.family == "own":
        check_user_model(locate(workload), file)
    else:
        check_workload(row)
    if recipe is not None:
        training.check_training(data_set, recipe)
    elif data_set != SYNTHETIC:
        raise UsageError("A script of steps draws random data; --emit goes with the data set synthetic alone.")


def script_of(
    spec: TrialSpec, file: Path = Path("train.py"), measured: str = "", parts: UserParts | None = None
) -> dict[Path, str]:
    """Return the script of a loop on one device, and what else it needs, by the paths of the files.

    The loop is of steps on random data, or a training run on resident data; UsageError is raised for any other.

    Args:
        spec: The loop.
        file: Where the script will be.
        measured: What was measured of the loop, in a line.
        parts: How the user's function gives its parts, if the model is the user's.
    """
    if spec.world_size > 1 or (spec.kind == "steady" and spec.data_set != SYNTHETIC):
        raise UsageError("A script can be emitted of steps on synthetic data and one device; this loop is another.")
    for row in rows_of(spec.techniques):
        unknown = row.unfit_settings("emit")
        if unknown:
            raise UsageError(
                f"No script can be emitted with {row.name}: the emitter has no lines for its setting '{unknown[0]}'. "
                "Leave the technique out, or leave --emit out."
            )
    return _Writer(spec, file, parts).write(measured)


class _Writer:
    """Writes the script of one loop, section by section, from top to bottom."""

    def __init__(self, spec: TrialSpec, file: Path, parts: UserParts | None) -> None:
        self.spec, self.config = spec, step_config_of(spec.techniques)
        self.row, self.precision = find_workload(spec.workload), find_precision(spec.precision)
        self.is_cuda = spec.device_type == "cuda"
        callers = {"chunked_loss": "chunked-loss", "gather_targets": "sparse-prediction"}
        uncalled = {name for name, technique in callers.items() if technique not in spec.techniques}
        self.script = ScriptBuilder(file, frozenset(uncalled | (set() if self.is_cuda else {"cross_entropy_"})))
        own = spec.user_model
        self.model: OwnModel | CastwiseModel = (
            CastwiseModel(spec, self.script) if own is None else OwnModel(spec, own, parts, self.script, file)
        )
        # Unless the loop does more, backward and step are the plain lines.
        self.has_weights = self.precision.steps_copies or self.config.compiled_update
        self.has_scaling = spec.loss_scale != "none" or self.config.compiled_update

    def write(self, measured: str) -> dict[Path, str]:
        self.script.add(f"DEVICE, BATCH_SIZE = torch.device({_quoted(self.spec.device)}), {self.spec.batch_size}")
        if self.is_cuda and self.spec.device != "cuda:0":
            self.script.add("torch.cuda.set_device(DEVICE)", spacing="\n")
        self.script.add(f"torch.manual_seed({self.spec.seed})", spacing="\n")
        self.model.write_model()
        self.write_numeric_state()  # after the user's code, which may have set it otherwise
        self.write_model_changes()
        self.write_optimizer()
        self.model.write_loss()
        if self.config.compile_mode is not None:
            self.write_compilation(self.config.compile_mode)
        self.write_to_device()
        if self.spec.recipe is None:
            self.write_step()
            self.model.write_batches()
            training.write_arguments(self.script, epochs=5, steps='default=48, help="steps of an epoch"')
            self.script.add(_LOADER)
        else:
            training.write_images(self.script, self.spec, self.spec.recipe, self.config)
            training.write_schedule(self.script, self.spec.recipe, self.config)
            self.write_step()
            training.write_accuracy(self.script, self.precision)
        self.write_epochs()
        return self.script.files(self.docstring(measured))

    def docstring(self, measured: str) -> str:
        techniques = join(self.spec.techniques) if self.spec.techniques else "plain loop"
        lines = [f"{self.row.name}, {self.spec.precision}, {techniques}: batch {self.spec.batch_size}.", ""]
        lines += [measured, ""] if measured else []
        lines += [self.model.about] if self.model.about else []
        return "\n".join([*lines, ""])

    def write_numeric_state(self) -> None:
        products, lines = self.precision.float32_matmul, []
        if products is not None:  # PyTorch's defaults need no line
            older = "high" if products == "tf32" else "highest"
            lines += [
                f'torch.set_float32_matmul_precision("{older}")',
                f"torch.backends.cudnn.allow_tf32 = {products == 'tf32'}  # float32 convolutions and RNNs",
            ]
        recipe = self.spec.recipe
        if self.config.cudnn_search or (recipe is not None and recipe.cudnn_benchmark):
            lines.append("torch.backends.cudnn.benchmark = True")
        if self.config.fp16_accumulation:
            lines.append("torch.backends.cuda.matmul.allow_fp16_accumulation = True")
        for name in ATTENTION_KERNELS if self.config.attention else ():
            if name != self.config.attention:
                lines.append(f"torch.backends.cuda.enable_{name}_sdp(False)")
        self.script.add(*lines)

    def write_model_changes(self) -> None:
        """Write what is done to the model: by techniques, on its way to the device, and by the precision."""
        lines, precision = [], self.precision
        for change in self.config.model_changes:
            arguments = "".join(f", {argument!r}" for argument in change.arguments)
            lines.append(f"{self.script.copy(change.function)}(model{arguments})")
        lines.append("model.to(DEVICE)")
        if precision.float8_recipe:  # pip install 'torchao>=0.18,<0.19'
            is_mx = precision.float8_recipe == "mxfp8"
            convert = self.script.copy(f"{_APPLY}.float8:convert_{'to_mxfp8' if is_mx else 'linear_layers'}")
            arguments = "" if is_mx else f", {_quoted(precision.float8_recipe)}"
            lines.append(f"{convert}(model{arguments})  # torchao's")
        if precision.param_dtype != "float32":
            cast, dtype = self.script.copy(f"{_PRECISION}:cast_weights"), precision.param_dtype
            lines.append(f"{cast}(model, {_quoted(dtype)}, {_quoted(precision.batch_norm_dtype)})")
            if self.model.casts_calls:
                lines.append(f"{self.script.copy(f'{_PRECISION}:cast_calls')}(model, torch.{dtype})")
        if self.config.channels_last:
            lines.append("model.to(memory_format=torch.channels_last)")
        self.script.add(*lines, "model.train()")

    def write_optimizer(self) -> None:
        """Write the lines that make the optimizer over what is stepped, loss scaling and a compiled update."""
        weights_class = ""
        if self.has_weights:
            copies = "RoundedWeights" if self.precision.stochastic_rounding else "MasterWeights"
            weights_class = copies if self.precision.steps_copies else "Weights"
            self.script.add(f"weights = {self.script.copy(f'{_PRECISION}:{weights_class}')}(model)")
        added = dict(self.config.optimizer_arguments)
        if self.config.scales_on_device and self.is_cuda and self.model.optimizer_name in _CAPTURABLE:
            added["capturable"] = True
        self.model.write_optimizer(added, weights_class)
        if self.config.optimizer_state:
            keep = self.script.copy(f"{_TECHNIQUES}.optimizer_state:keep_state_in")
            self.script.add(f"{keep}(optimizer, {_quoted(self.config.optimizer_state)})")
        if self.has_scaling:
            self.script.add(f"scaling = {self.scaling()}", spacing="\n")
        if self.config.compiled_update:
            update = self.script.copy(f"{_TECHNIQUES}.compiled_update:CompiledUpdate")
            self.script.add(f"update = {update}(optimizer, weights, scaling, {self.model.clip})", spacing="\n")
        self.model.write_scheduler()

    def scaling(self) -> str:
        def copy(name: str) -> str:
            return self.script.copy(f"{_SCALING}:{name}")

        name = self.spec.loss_scale
        if name == "none":
            return f"{copy('NoScaling')}()"
        row = next((row for row in DYNAMIC_SCALES if row.name == name), None)
        if row is None:
            return f"{copy('StaticScaling')}({float(name)!r})"
        self.script.copy("castwise.spec.loss_scale:DynamicScale")
        made = repr(row).replace("'", '"')
        if self.config.scales_on_device:
            return f"{copy('DeviceScaling')}({made}, DEVICE, optimizer)"
        return f"{copy('DynamicScaling')}({made}, DEVICE.type, optimizer)"

    def write_compilation(self, mode: str) -> None:
        if self.precision.autocast_dtype is not None:
            self.script.add(
                "# Else torch 2.11 and 2.12 may run what was compiled under autocast to another dtype.",
                f"torch.compiler.config.cache_key_tag = {_quoted(self.precision.autocast_dtype)}",
            )
        if self.config.compile_blocks:
            compile_blocks = self.script.copy(f"{_TECHNIQUES}.compile:compile_blocks")
            self.script.add(f"{compile_blocks}(model, {_quoted(mode)})")
        else:
            named = "" if mode == "default" else f", mode={_quoted(mode)}"
            self.script.add(f"compute_loss = torch.compile(compute_loss, dynamic=False{named})")

    def write_to_device(self) -> None:
        """Write `to_device(batch)`, which brings images into the layout of the loop, too."""
        lines = ["part = part.to(DEVICE, torch.float32 if part.is_floating_point() else None, non_blocking=True)"]
        if self.config.num_channels is not None:
            padding = f"(0, 0, 0, 0, 0, {self.config.num_channels} - part.shape[1])"
            lines.append(f"part = nn.functional.pad(part, {padding}) if part.dim() == 4 else part")
        if self.config.channels_last:
            lines.append("part = part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part")
        moved = "tuple(move(part) for part in batch)"
        if self.spec.user_model is not None:
            moved = f"{self.script.copy(f'{_APPLY}.pytree:tree_map_tensors')}(move, batch)"
        self.script.define("def move(part):", *(f"    {line}" for line in lines), "    return part")
        self.script.define("def to_device(batch):  # a batch of your loader", f"    return {moved}")

    def write_step(self) -> None:
        """Write `train_step(batch)`, which computes a step, and its graph."""
        has_masters = self.precision.steps_copies
        body = ["batch = to_device(data.make(batch))"] if self.spec.recipe is not None else []
        body.append("weights.zero_grad()" if has_masters else "optimizer.zero_grad()")
        forward = ["loss = compute_loss(model, batch)"]
        if self.model.accumulate > 1:
            forward = [f"loss = compute_loss(model, part) / {self.model.accumulate}"]
        if self.precision.autocast_dtype is not None:
            context = f"with torch.autocast(DEVICE.type, dtype=torch.{self.precision.autocast_dtype}):"
            forward = [context, f"    {forward[0]}"]
        forward.append("scaling.backward(loss)" if self.has_scaling else "loss.backward()")
        if self.model.accumulate > 1:
            forward.append("total = total + loss.detach()")
            forward = ["total = 0.0", "for part in batch:", *(f"    {line}" for line in forward)]
        body += forward
        if self.config.compiled_update:
            body.append("update()")
        elif self.precision.stochastic_rounding:  # it clips in float32, and no such precision has a loss scale
            body += [f"for _ in weights.updates({self.model.clip}):", "    optimizer.step()"]
        else:
            body += ["weights.collect_gradients()"] if has_masters else []
            if self.has_scaling:
                body.append(f"scaling.step(optimizer, {self.model.clip})")
            else:
                clip = self.script.copy(f"{_SCALING}:clip") if self.model.clip is not None else ""
                body += [*([f"{clip}(optimizer, {self.model.clip:g})"] if clip else []), "optimizer.step()"]
            body += ["weights.publish()"] if has_masters else []
        body.append("return total" if self.model.accumulate > 1 else "return loss")
        self.script.define("def train_step(batch):", *(f"    {line}" for line in body))
        if self.config.cuda_graph:
            graph = self.script.copy(f"{_TECHNIQUES}.cuda_graph:StepGraph")
            carried = "carried" if self.row.family == "rnn_lm" else None
            self.script.add(f"train_step = {graph}(train_step, DEVICE, {carried}, {self.config.steps_per_launch})")

    def write_epochs(self) -> None:
        """Write the loop over epochs, which prints losses and speed, and of a training run the accuracy."""
        recipe, model = self.spec.recipe, self.model
        slow = ["code is compiled"] if compiles(self.spec.techniques) else []
        slow += ["kernels are searched"] if searches_kernels(self.spec.techniques) else []
        saved = '{"model": model.state_dict(), "masters": weights.stepped}'
        blanks = {
            "first": f"  # in the first one, {' and '.join(slow)}" if slow and recipe is None else "",
            "flush": "train_step.flush()" if self.config.steps_per_launch > 1 else "",
            "synchronize": "torch.cuda.synchronize()" if self.is_cuda else "",
            "unit": model.unit,
            "saved": saved if self.precision.master_weights else "model.state_dict()",
        }
        if recipe is None:
            units = "BATCH_SIZE" if model.units_per_sample == 1 else f"BATCH_SIZE * {model.units_per_sample}"
            blanks |= {
                "batches": "loader",
                "after_step": "step_scheduler()" if model.steps_scheduler else "",
                "units": f"arguments.steps * {units}",
                "validation": "# Your validation goes here: model.eval(), with torch.no_grad(), then model.train().",
            }
        else:
            kind, reads_loss = recipe.schedule.kind, recipe.read_loss_every_step and self.config.reads_loss
            after_step = ["loss.item()  # as the source does"] if reads_loss else []
            after_step += ["count += len(batch[0])"]
            after_step += ["scheduler.step()"] if kind == "triangular" else []
            blanks |= {
                "before": "count = 0",
                "batches": "data.start(epoch)",
                "after_step": "\n        ".join(after_step),
                "units": "count",
                "after_epoch": "scheduler.step()" if kind == "step" else "",
                "accuracy": ", accuracy {accuracy():.4f}",
            }
        text = _EPOCHS.format_map(defaultdict(str, blanks))
        self.script.add("\n".join(line for line in text.split("\n") if line.strip()))


def _quoted(text: str) -> str:
    return f'"{text}"'
