"""The script of one loop in plain PyTorch: a loop to read from top to bottom, and what it calls, castwise's own source.

Precision, loss scaling, masters, update and graph are copied, so a script computes what was measured. If that makes the
script too long, the copies go into a second file.
"""

from pathlib import Path

from castwise.emit import training, workloads
from castwise.emit.builder import ScriptBuilder
from castwise.emit.own import OwnModel, check_user_model
from castwise.errors import UsageError
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import (
    ATTENTION_KERNELS,
    compiles,
    join,
    rows_of,
    searches_kernels,
    step_config_of,
)
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

_LOOP = """\
import argparse
import itertools
import time
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, default=48, help="steps of an epoch")
parser.add_argument("--save", metavar="FILE", help="where to save the trained weights")
arguments = parser.parse_args()

# Your data loader goes here: loader = map(to_device, DataLoader(...)), made anew in each epoch.
loader = itertools.cycle(batches)

for epoch in range(arguments.epochs):{first}
    started = time.perf_counter()
    for batch in itertools.islice(loader, arguments.steps):
{step}
{end}
    per_second = arguments.steps * {units} / (time.perf_counter() - started)
    print(f"epoch {{epoch + 1}}: loss {{loss.item():.9g}}, {{per_second:.6g}} {unit}/s")
    # Your validation goes here: model.eval(), with torch.no_grad(), then model.train().
if arguments.save:
    torch.save({saved}, arguments.save)"""


def check_script(workload: str, data_set: str, recipe: Recipe | None = None, file: Path | None = None) -> None:
    """Make sure, before anything is measured, that a script can be written of a workload's loops.

    Args:
        workload: Its name.
        data_set: Its data.
        recipe: The training run, if whole epochs are timed.
        file: Where the script is to be written.

    Raises:
        UsageError: None can.
    """
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"'{file}' cannot be written: there is no folder '{file.parent}'.")
    row = find_workload(workload)
    if row.family == "own":
        check_user_model(locate(workload), file)
    else:
        workloads.check_workload(row)
    if recipe is not None:
        training.check_training(data_set, recipe)
    elif data_set != SYNTHETIC:
        raise UsageError("A script of steps draws random data; --emit goes with the data set synthetic alone.")


def script_of(
    spec: TrialSpec, file: Path = Path("train.py"), measured: str = "", parts: UserParts | None = None
) -> dict[Path, str]:
    """Return the script of a loop on one device, and what else it needs, by the paths of the files.

    Args:
        spec: The loop: steps on random data, or a training run on resident data.
        file: Where the script will be.
        measured: What was measured of the loop, in a line.
        parts: How the user's function gives its parts, if the model is the user's.

    Raises:
        UsageError: There is no plain script for the workload, its data, its techniques or several devices.
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
        self.own = None if spec.user_model is None else OwnModel(spec.user_model, parts, self.script, file)
        self.clip = self.row.clip_grad_norm if self.own is None else self.own.parts.clip_grad_norm
        self.accumulate = 1 if self.own is None else self.own.parts.accumulate
        # Unless the loop does more, backward and step are the plain lines.
        self.has_weights = self.precision.master_weights or self.config.compiled_update
        self.has_scaling = spec.loss_scale != "none" or self.config.compiled_update

    def write(self, measured: str) -> dict[Path, str]:
        self.script.add(f"DEVICE, BATCH_SIZE = torch.device({_quoted(self.spec.device)}), {self.spec.batch_size}")
        if self.is_cuda and self.spec.device != "cuda:0":
            self.script.add("torch.cuda.set_device(DEVICE)", spacing="\n")
        self.script.add(f"torch.manual_seed({self.spec.seed})", spacing="\n")
        if self.own is not None:
            self.own.write_call()
        self.write_numeric_state()  # after the user's code, which may have set it otherwise
        if self.own is None:
            workloads.write_model(self.script, self.row)
        self.write_model_changes()
        self.write_optimizer()
        if self.own is None:
            workloads.write_loss(self.script, self.row, self.config.loss_options)
        else:
            self.own.write_loss(self.precision)
        if self.config.compile_mode is not None:
            self.write_compilation(self.config.compile_mode)
        self.write_to_device()
        saved = '{"model": model.state_dict(), "masters": weights.stepped}'
        saved = saved if self.precision.master_weights else "model.state_dict()"
        if self.spec.recipe is None:
            self.write_step()
            if self.own is not None:
                self.own.write_batches(self.spec, self.row.resident_batches)
            else:
                workloads.write_batches(self.script, self.row, self.spec.seed)
            self.write_loop(saved)
        else:
            training.write_images(self.script, self.spec, self.spec.recipe, self.config)
            training.write_schedule(self.script, self.spec.recipe, self.config)
            self.write_step()
            training.write_epochs(self.script, self.spec, self.spec.recipe, self.config, saved)
        return self.script.files(self.docstring(measured))

    def docstring(self, measured: str) -> str:
        techniques = join(self.spec.techniques) if self.spec.techniques else "plain loop"
        lines = [f"{self.row.name}, {self.spec.precision}, {techniques}: batch {self.spec.batch_size}.", ""]
        if measured:
            lines += [measured, ""]
        if self.own is not None:
            lines.append("Model, loss, optimizer and example batch are those of your own function.")
        elif self.spec.recipe is None:
            lines.append("The data is random; your own loader goes where the loop is.")
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
            convert = self.script.copy(f"{_APPLY}.float8:convert_linear_layers")
            lines.append(f"{convert}(model, {_quoted(precision.float8_recipe)})  # torchao's")
        if precision.param_dtype != "float32":
            cast, dtype = self.script.copy(f"{_PRECISION}:cast_weights"), precision.param_dtype
            lines.append(f"{cast}(model, {_quoted(dtype)}, {_quoted(precision.batch_norm_dtype)})")
            if self.own is None or self.own.parts.lightning is None:  # whose step gets the batch
                lines.append(f"{self.script.copy(f'{_PRECISION}:cast_calls')}(model, torch.{dtype})")
        if self.config.channels_last:
            lines.append("model.to(memory_format=torch.channels_last)")
        self.script.add(*lines, "model.train()", spacing="\n" if self.own is None else "\n\n")

    def write_optimizer(self) -> None:
        """Write the lines that make the optimizer over what is stepped, loss scaling and a compiled update."""
        if self.has_weights:
            kind = "MasterWeights" if self.precision.master_weights else "Weights"
            self.script.add(f"weights = {self.script.copy(f'{_PRECISION}:{kind}')}(model)")
        if self.own is not None:
            added = self.added_arguments(self.own.parts.optimizer_name)
            self.own.write_optimizer(added, has_masters=self.precision.master_weights)
        else:
            asked = self.spec.recipe.optimizer if self.spec.recipe is not None else None
            name = self.row.optimizer.name if asked is None else asked.name
            given = dict(self.row.optimizer.arguments) if asked is None else dict(asked.arguments)
            arguments = {**given, **self.added_arguments(name)}
            written = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
            stepped = "weights.stepped" if self.has_weights else "model.parameters()"
            self.script.add(f"optimizer = torch.optim.{name}({stepped}, {written})", spacing="\n")
        if self.has_scaling:
            self.script.add(f"scaling = {self.scaling()}", spacing="\n")
        if self.config.compiled_update:
            update = self.script.copy(f"{_TECHNIQUES}.compiled_update:CompiledUpdate")
            self.script.add(f"update = {update}(optimizer, weights, scaling, {self.clip})", spacing="\n")
        if self.own is not None:
            self.own.write_scheduler(self.config, self.spec.loss_scale)

    def added_arguments(self, optimizer: str) -> dict[str, bool]:
        """Return the arguments that techniques add to an optimizer of this class."""
        counts = self.config.scales_on_device and self.is_cuda and optimizer in _CAPTURABLE
        return {**dict(self.config.optimizer_arguments), **({"capturable": True} if counts else {})}

    def scaling(self) -> str:
        """Return the call that makes the loss scaling."""

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
        if self.own is not None:
            moved = f"{self.script.copy(f'{_APPLY}.pytree:tree_map_tensors')}(move, batch)"
        self.script.define("def move(part):", *(f"    {line}" for line in lines), "    return part")
        self.script.define("def to_device(batch):  # a batch of your loader", f"    return {moved}")

    def write_step(self) -> None:
        """Write `train_step(batch)`, which computes a step, and its graph."""
        has_masters = self.precision.master_weights
        body = ["batch = to_device(data.make(batch))"] if self.spec.recipe is not None else []
        body.append("weights.zero_grad()" if has_masters else "optimizer.zero_grad()")
        forward = ["loss = compute_loss(model, batch)"]
        if self.accumulate > 1:
            forward = [f"loss = compute_loss(model, part) / {self.accumulate}"]
        if self.precision.autocast_dtype is not None:
            context = f"with torch.autocast(DEVICE.type, dtype=torch.{self.precision.autocast_dtype}):"
            forward = [context, f"    {forward[0]}"]
        forward.append("scaling.backward(loss)" if self.has_scaling else "loss.backward()")
        if self.accumulate > 1:
            forward.append("total = total + loss.detach()")
            forward = ["total = 0.0", "for part in batch:", *(f"    {line}" for line in forward)]
        body += forward
        if self.config.compiled_update:
            body.append("update()")
        else:
            body += ["weights.collect_gradients()"] if has_masters else []
            if self.has_scaling:
                body.append(f"scaling.step(optimizer, {self.clip})")
            else:
                clip = self.script.copy(f"{_SCALING}:clip") if self.clip is not None else ""
                body += [*([f"{clip}(optimizer, {self.clip:g})"] if clip else []), "optimizer.step()"]
            body += ["weights.publish()"] if has_masters else []
        body.append("return total" if self.accumulate > 1 else "return loss")
        self.script.define("def train_step(batch):", *(f"    {line}" for line in body))
        if self.config.cuda_graph:
            graph = self.script.copy(f"{_TECHNIQUES}.cuda_graph:StepGraph")
            carried = "carried" if self.row.family == "rnn_lm" else None
            self.script.add(f"train_step = {graph}(train_step, DEVICE, {carried}, {self.config.steps_per_launch})")

    def write_loop(self, saved: str) -> None:
        step = ["loss = train_step(batch)"]
        end = ["train_step.flush()"] if self.config.steps_per_launch > 1 else []
        end += ["torch.cuda.synchronize()"] if self.is_cuda else []
        if self.own is None:
            unit, per_sample = str(self.row.unit), workloads.units_per_sample(self.row)
        else:
            unit, per_sample = self.own.parts.unit, self.own.parts.units_per_sample
            step += ["step_scheduler()"] if self.own.parts.scheduler != "none" else []
        slow = ["code is compiled"] if compiles(self.spec.techniques) else []
        slow += ["kernels are searched"] if searches_kernels(self.spec.techniques) else []
        text = _LOOP.format(
            first=f"  # in the first one, {' and '.join(slow)}" if slow else "",
            step="\n".join(f"        {line}" for line in step),
            end="\n".join(f"    {line}" for line in end),
            unit=unit,
            units="BATCH_SIZE" if per_sample == 1 else f"BATCH_SIZE * {per_sample}",
            saved=saved,
        )
        self.script.add(text.replace("\n\n    per_second", "\n    per_second"))


def _quoted(text: str) -> str:
    return f'"{text}"'
