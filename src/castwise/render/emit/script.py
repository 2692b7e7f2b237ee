"""The script of one loop in plain PyTorch, as one would write it by hand: a few lines for each precision and setting.

It is written from templates, by the settings of the step that techniques make (`StepConfig`). What would be more than
some lines (kernels, layers that replace others) is copied from castwise's source into a second file beside the script.
"""

from pathlib import Path

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
from castwise.render.emit import training, updates, user_model, workloads
from castwise.render.emit.builder import ScriptBuilder
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.spec.user_model import UserParts, locate

_CAST_WEIGHTS = """\
{cast}
for module in model.modules():
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.float()"""

_GRAPH = '''\
class GraphedStep:
    """A whole step as one CUDA graph; batches of another shape than the first run without it."""

    def __init__(self, step):
        self.step, self.shapes, self.num_steps = step, None, 0
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def __call__(self, batch):
        parts = tree_leaves(batch)
        shapes = [part.shape for part in parts]
        self.shapes = self.shapes or shapes
        if shapes != self.shapes or self.num_steps < 3:
            self.num_steps += shapes == self.shapes
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.step(batch)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.num_steps == 3:
            self.num_steps += 1
            self.batch, self.loss = tree_map(torch.clone, batch), torch.empty((), device=parts[0].device)
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.loss.copy_(self.step(self.batch).detach())
        torch._foreach_copy_(tree_leaves(self.batch), parts, non_blocking=True)
        self.graph.replay()
        return self.loss.clone()'''

_GRAPH_OF_STEPS = '''\
class GraphedSteps:
    """{count} whole steps as one CUDA graph: three steps beside it, a capture, then replays of {count} batches each.

    A loss is known when its batch was trained on: with the {count} that go together, or at `flush`. All batches are of
    one shape.
    """

    def __init__(self, step):
        self.step, self.num_steps, self.waiting, self.batches = step, 0, [], None
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def __call__(self, batch):
        if self.num_steps < 3:
            self.num_steps += 1
            return self.run_aside(batch)
        if not self.waiting:
            self.losses = torch.full(({count},), torch.nan, device=tree_leaves(batch)[0].device)
        self.waiting.append(batch)
        loss = self.losses[len(self.waiting) - 1]
        if len(self.waiting) == {count}:
            self.launch()
        return loss

    def run_aside(self, batch):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def launch(self):
        if self.batches is None:
            self.batches = tree_map(torch.clone, self.waiting)
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.captured = torch.stack([self.step(batch).detach().float() for batch in self.batches])
        torch._foreach_copy_(tree_leaves(self.batches), tree_leaves(self.waiting), non_blocking=True)
        self.graph.replay()
        self.losses.copy_(self.captured)
        self.waiting = []

    def flush(self):
        for index, batch in enumerate(self.waiting):
            self.losses[index] = self.run_aside(batch).detach()
        self.waiting = []'''

_TREES = "from torch.utils._pytree import tree_leaves, tree_map"

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
        user_model.check_user_model(locate(workload), file)
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
        self.own = None if spec.user_model is None else user_model.OwnModel(spec.user_model, parts, file)
        callers = {"chunked_loss": "chunked-loss", "gather_targets": "sparse-prediction"}
        uncalled = {name for name, technique in callers.items() if technique not in spec.techniques}
        self.script = ScriptBuilder(file, frozenset(uncalled | (set() if self.is_cuda else {"cross_entropy_"})))
        clip = self.row.clip_grad_norm if self.own is None else self.own.parts.clip_grad_norm
        self.update = updates.Update(spec, self.config, self.precision, clip, is_own=self.own is not None)
        self.state = "" if self.row.family != "rnn_lm" else "state"

    def write(self, measured: str) -> dict[Path, str]:
        self.script.add(f"DEVICE, BATCH_SIZE = torch.device({_quoted(self.spec.device)}), {self.spec.batch_size}")
        if self.is_cuda and self.spec.device != "cuda:0":
            self.script.add("torch.cuda.set_device(DEVICE)", spacing="\n")
        self.script.add(f"torch.manual_seed({self.spec.seed})", spacing="\n")
        if self.own is not None:
            self.own.write_call(self.script)
        self.write_numeric_state()  # after the user's code, which may have set it otherwise
        if self.own is None:
            workloads.write_model(self.script, self.row, self.config.loss_options)
        self.write_model_changes()
        self.write_optimizer()
        dtype = self.precision.param_dtype if self.precision.param_dtype != "float32" else ""
        if self.state and self.precision.autocast_dtype is not None and self.spec.device_type == "cuda":
            dtype = "float16"  # of cuDNN's RNNs under autocast, whatever its own is
        if self.own is None:
            workloads.write_loss(self.script, self.row, dtype and f"torch.{dtype}", self.config.loss_options)
        else:
            is_16_bit = bool(dtype or self.precision.autocast_dtype)
            self.own.write_loss(self.script, dtype and f"torch.{dtype}", is_16_bit=is_16_bit)
        if self.config.compile_mode is not None:
            if self.precision.autocast_dtype is not None:
                self.script.add(
                    "# Else torch 2.11 and 2.12 may run what was compiled under autocast to another dtype.",
                    f"torch.compiler.config.cache_key_tag = {_quoted(self.precision.autocast_dtype)}",
                )
            mode = "" if self.config.compile_mode == "default" else f", mode={_quoted(self.config.compile_mode)}"
            if self.config.compile_blocks:
                self.write_compiled_blocks()
            else:
                self.script.add(f"compute_loss = torch.compile(compute_loss, dynamic=False{mode})")
        if self.spec.recipe is None:
            self.write_step()
            self.write_batches()
            self.write_loop()
        else:
            workloads.write_to_device(self.script, self.row, self.image_lines())
            training.write_images(self.script, self.spec, self.spec.recipe, self.config)
            training.write_schedule(self.script, self.spec.recipe, self.config)
            self.write_step()
            training.write_epochs(self.script, self.spec, self.spec.recipe, self.config, self.update.saved)
        return self.script.files(self.docstring(measured))

    def write_compiled_blocks(self) -> None:
        if self.row.family == "transformer":
            lines = ["for block in model.blocks:", "    block.compile(dynamic=False)"]
        else:
            self.script.copy("castwise.apply.techniques.blocks:repeated_blocks")
            limit = "torch._dynamo.config.recompile_limit += 1  # a block may have a shape of its own"
            lines = ["for block in repeated_blocks(model):", "    block.compile(dynamic=False)", f"    {limit}"]
        self.script.add(*lines)

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
        lines = []
        for change in self.config.model_changes:
            arguments = "".join(f", {argument!r}" for argument in change.arguments)
            lines.append(f"{self.script.borrow(change.function)}(model{arguments})")
        lines.append("model.to(DEVICE)")
        if self.precision.float8_recipe:  # pip install 'torchao>=0.18,<0.19'
            convert = self.script.borrow("castwise.apply.float8:convert_linear_layers")
            lines.append(f"{convert}(model, {_quoted(self.precision.float8_recipe)})  # torchao's")
        if self.precision.param_dtype != "float32":
            dtype = f"torch.{self.precision.param_dtype}"
            cast = "model.half()" if self.precision.param_dtype == "float16" else "model.bfloat16()"
            keeps_norms = self.precision.batch_norm_dtype != self.precision.param_dtype
            if keeps_norms and self.row.unit != "tokens":
                lines += ["from torch import nn", _CAST_WEIGHTS.format(cast=cast)]
            else:
                lines.append(cast)
            if self.own is not None:
                lines += self.own.cast_lines(dtype)
        if self.config.channels_last:
            lines.append("model.to(memory_format=torch.channels_last)")
        self.script.add(*lines, "model.train()", spacing="\n" if self.own is None else "\n\n")

    def write_optimizer(self) -> None:
        self.update.write_weights(self.script)
        if self.own is not None:
            self.own.write_optimizer(self.script, self.update, self.config)
        else:
            asked = self.spec.recipe.optimizer if self.spec.recipe is not None else None
            name = self.row.optimizer.name if asked is None else asked.name
            given = dict(self.row.optimizer.arguments) if asked is None else dict(asked.arguments)
            arguments = {**given, **self.update.optimizer_arguments(name)}
            written = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
            self.script.add(f"optimizer = torch.optim.{name}({self.update.stepped}, {written})")
            self.update.write(self.script, name, bool(given.get("momentum")))

    def write_step(self) -> None:
        """Write `train_step(batch)`, which computes a step, and its graph."""
        made = ["batch = to_device(data.make(batch))"] if self.spec.recipe is not None else []
        loss = "loss, new = compute_loss(model, batch, state)" if self.state else "loss = compute_loss(model, batch)"
        accumulate = 1 if self.own is None else self.own.parts.accumulate
        backward = self.update.backward_line
        if accumulate > 1:
            loss = f"loss = compute_loss(model, part) / {accumulate}"
        forward = [loss]
        if self.precision.autocast_dtype is not None:
            context = f"with torch.autocast(DEVICE.type, dtype=torch.{self.precision.autocast_dtype}):"
            forward = [context, f"    {loss}"]
        if accumulate > 1:
            added = "total = total + loss.detach()"
            forward = ["total = 0.0", "for part in batch:", *(f"    {line}" for line in (*forward, backward, added))]
        else:
            forward.append(backward)
        # One by one, as in castwise's loop: in a CUDA graph these are memory copies, and a list would be a kernel.
        carried = ["for kept, value in zip(state, new):", "    kept.copy_(value)"] if self.state else []
        returned = "return total" if accumulate > 1 else "return loss"
        body = [*made, self.update.zero_grad_line, *forward, *self.update.lines, *carried, returned]
        self.script.define("def train_step(batch):", *(f"    {line}" for line in body))
        count = self.config.steps_per_launch
        if self.config.cuda_graph:
            name, graph = ("GraphedStep", _GRAPH) if count == 1 else ("GraphedSteps", _GRAPH_OF_STEPS)
            self.script.define(_TREES, graph.replace("{count}", str(count)), moved_name=name)
            self.script.add(f"train_step = {name}(train_step)")

    def image_lines(self) -> list[str]:
        """Return what brings `images` into the layout of the loop."""
        lines = []
        if self.config.num_channels is not None:
            lines.append(
                f"images = nn.functional.pad(images, (0, 0, 0, 0, 0, {self.config.num_channels} - images.shape[1]))"
            )
        if self.config.channels_last:
            lines.append("images = images.contiguous(memory_format=torch.channels_last)")
        return lines

    def write_batches(self) -> None:
        if self.own is not None:
            self.own.write_batches(self.script, self.spec, self.row.resident_batches, self.config.channels_last)
        else:
            workloads.write_to_device(self.script, self.row, self.image_lines())
            workloads.write_batches(self.script, self.row, self.spec.seed)

    def write_loop(self) -> None:
        step = ["loss = train_step(batch)"]
        if self.own is not None:
            step = self.own.step_lines(step, self.update, self.config)
        end = ["train_step.flush()"] if self.config.steps_per_launch > 1 else []
        end += ["torch.cuda.synchronize()"] if self.is_cuda else []
        unit: str = self.row.unit
        units = workloads.units_of(self.row)
        if self.own is not None:
            unit, per_sample = self.own.parts.unit, self.own.parts.units_per_sample
            units = "BATCH_SIZE" if per_sample == 1 else f"BATCH_SIZE * {per_sample}"
        slow = ["code is compiled"] if compiles(self.spec.techniques) else []
        slow += ["kernels are searched"] if searches_kernels(self.spec.techniques) else []
        text = _LOOP.format(
            first=f"  # in the first one, {' and '.join(slow)}" if slow else "",
            step="\n".join(f"        {line}" for line in step),
            end="\n".join(f"    {line}" for line in end),
            unit=unit,
            units=units,
            saved=self.update.saved,
        )
        self.script.add(text.replace("\n\n    per_second", "\n    per_second"))


def _quoted(text: str) -> str:
    return f'"{text}"'
