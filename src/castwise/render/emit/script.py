"""The script of one loop: model, data, precision, techniques and a timer, in plain PyTorch.

What is more than a few lines (masters, loss scaling on the device, a step's graph, the models) is castwise's own code
word for word; the rest is written as one would by hand. Nothing in it imports castwise.
"""

from pathlib import Path

from castwise.errors import UsageError
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import join, rows_of, step_config_of
from castwise.registry.workloads import find_workload
from castwise.render.emit import training, user_model, workloads
from castwise.render.emit.builder import ScriptBuilder
from castwise.spec.loss_scale import DYNAMIC_SCALES, is_dynamic
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.spec.user_model import locate

# The fields of `StepConfig` that this package writes into a script. A technique with another one is refused.
_WRITTEN_SETTINGS = {
    "resident_data",
    "channels_last",
    "cudnn_search",
    "optimizer_arguments",
    "scales_on_device",
    "reads_loss",
    "model_changes",
    "num_channels",
    "loss_chunks",
    "compile_mode",
    "compiled_update",
    "cuda_graph",
    "steps_per_launch",
}

# Optimizers of torch that can count their steps on the device, of those that workloads use.
_CAPTURABLE = ("Adadelta", "Adam", "AdamW")

_WORKER = "castwise.worker"

_TIMER = """\
import argparse
import statistics
import time
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, help="steps to time; without it about three seconds of them")
parser.add_argument("--warm-up", type=int, default=50, help="steps before them")
arguments = parser.parse_args()
AT_ONCE = {at_once}  # steps that are one launch
BLOCK_SECONDS, NUM_BLOCKS = 0.3, 10


def time_steps(first, count):
    started = time.perf_counter()
    for index in range(first, first + count):
        loss = step(batches[index % len(batches)])
    {flush}if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)
    return (time.perf_counter() - started) / count, loss


done = arguments.warm_up
if done:
    time_steps(0, done)  # libraries are loaded, algorithms searched, code compiled
if arguments.steps is None:
    num_steps = NUM_BLOCKS * BLOCK_SECONDS / time_steps(done, 2 * AT_ONCE)[0]
    done += 2 * AT_ONCE
else:
    num_steps = arguments.steps
per_block = max(1, round(num_steps / NUM_BLOCKS / AT_ONCE)) * AT_ONCE
seconds = []
while len(seconds) < NUM_BLOCKS and (arguments.steps is None or done < arguments.warm_up + arguments.steps):
    block, loss = time_steps(done, per_block)
    seconds.append(block)
    done += per_block
print(f"loss {loss.item():.9g}")
print(f"{BATCH_SIZE * UNITS_PER_SAMPLE / statistics.median(seconds):.6g} {UNIT}/s")"""


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
    row = find_workload(workload)
    if row.family == "own":
        user_model.check_user_model(locate(workload), file)
    else:
        workloads.check_workload(row)
    if recipe is not None:
        training.check_training(data_set, recipe)
    elif data_set != SYNTHETIC:
        raise UsageError("A script of steps draws random data; --emit goes with the data set synthetic alone.")


def script_of(spec: TrialSpec, measured: str = "") -> str:
    """Return the script of a loop on one device: of steps on random data, or of a training run on resident data.

    Args:
        spec: The loop.
        measured: What was measured of it, in a line.

    Raises:
        UsageError: There is no plain script for the workload, its data, its techniques or several devices.
    """
    if spec.world_size > 1 or (spec.kind == "steady" and spec.data_set != SYNTHETIC):
        raise UsageError("A script can be emitted of steps on synthetic data and one device; this loop is another.")
    for row in rows_of(spec.techniques):
        unknown = sorted(set(row.settings) - _WRITTEN_SETTINGS)
        if unknown:
            raise UsageError(
                f"No script can be emitted with {row.name}: the emitter has no lines for its setting '{unknown[0]}'. "
                "Leave the technique out, or leave --emit out."
            )
    return _Writer(spec).write(measured)


class _Writer:
    """Writes the script of one loop, section by section, from top to bottom."""

    def __init__(self, spec: TrialSpec) -> None:
        self.spec, self.config = spec, step_config_of(spec.techniques)
        self.row, self.precision = find_workload(spec.workload), find_precision(spec.precision)
        self.user_model = spec.user_model
        self.script = ScriptBuilder()
        # Weights and a scaling that do nothing are left out if nothing needs them.
        self.has_weights = self.precision.master_weights or self.config.compiled_update or self.user_model is not None
        self.has_scaling = spec.loss_scale != "none" or self.config.compiled_update or self.user_model is not None

    def write(self, measured: str) -> str:
        self.write_settings()
        if self.user_model is not None:
            user_model.write_call(self.script, self.user_model)
        self.write_numeric_state()  # after the user's code, which may have set it otherwise
        if self.user_model is None:
            workloads.write_model(self.script, self.row)
            workloads.write_loss(self.script, self.row)
        self.write_model_changes()
        self.write_optimizer()
        if self.spec.recipe is None:
            self.write_step()
            self.write_batches()
            self.write_timer()
        else:
            training.write_images(self.script, self.spec, self.spec.recipe, self.config)
            self.write_preparation()
            training.write_schedule(self.script, self.spec.recipe, self.config)
            self.write_step()
            training.write_epochs(self.script, self.spec.recipe, self.config, self.precision.autocast_dtype)
        return self.script.text(self.docstring(measured))

    def docstring(self, measured: str) -> str:
        techniques = join(self.spec.techniques) if self.spec.techniques else "plain loop"
        lines = [f"{self.row.name}, {self.spec.precision}, {techniques}: batch {self.spec.batch_size}.", ""]
        if measured:
            lines += [measured, ""]
        if self.user_model is not None:
            lines.append("Model, batches, loss and optimizer are those of your own function, which this file calls.")
        elif self.spec.recipe is None:
            lines.append("The data is random; put your own loader in the place of `batches`.")
        return "\n".join([*lines, ""])

    def write_settings(self) -> None:
        self.script.add(f"DEVICE = torch.device({self.spec.device!r})", f"BATCH_SIZE = {self.spec.batch_size}")
        if self.user_model is None:
            self.script.add(f"UNIT = {self.row.unit!r}")
        self.script.add(f"SEED = {self.spec.seed}")
        if self.spec.device_type == "cuda":
            self.script.add("torch.cuda.set_device(DEVICE)  # kernels of Triton run on the current one")
        self.script.add("torch.manual_seed(SEED)")
        self.script.end_section()

    def write_numeric_state(self) -> None:
        products = self.precision.float32_matmul
        if products is not None:  # PyTorch's defaults need no line
            older = "high" if products == "tf32" else "highest"
            self.script.add(
                f"# What float32 products are computed in: {products}.",
                f"torch.set_float32_matmul_precision({older!r})"
                "  # first: it writes others; torch 2.11's max-autotune asks it",
            )
            for path in ("", "cuda.matmul.", "cudnn.conv.", "cudnn.rnn."):
                self.script.add(f"torch.backends.{path}fp32_precision = {products!r}")
        recipe = self.spec.recipe
        searches = self.config.cudnn_search or (recipe is not None and recipe.cudnn_benchmark)
        if self.user_model is None or searches:  # the user's own setting is kept
            self.script.add(f"torch.backends.cudnn.benchmark = {searches}")
        self.script.end_section()

    def write_model_changes(self) -> None:
        """Write what is done to the model: by techniques, on its way to the device, and by the precision."""
        for change in self.config.model_changes:
            self.script.copy(change.function)
            arguments = "".join(f", {argument!r}" for argument in change.arguments)
            self.script.add(f"{change.function.partition(':')[2]}(model{arguments})")
        if self.config.loss_chunks > 1:
            self.script.add(f"carried.chunk({self.config.loss_chunks})")
        self.script.add("model.to(DEVICE)")
        if self.precision.param_dtype != "float32":
            self.script.copy(f"{_WORKER}.precision:cast_weights")
            dtypes = f"torch.{self.precision.param_dtype}, torch.{self.precision.batch_norm_dtype}"
            self.script.add(f"cast_weights(model, {dtypes})")
        if self.config.channels_last:
            self.script.add("model.to(memory_format=torch.channels_last)")
        self.script.add("model.train()")
        self.script.end_section()

    def write_optimizer(self) -> None:
        counts_on_device = self.config.scales_on_device and self.spec.device_type == "cuda"
        if self.has_weights:
            kind = "MasterWeights" if self.precision.master_weights else "Weights"
            self.script.copy(f"{_WORKER}.precision:{kind}")
            self.script.add(f"weights = {kind}(model)")
        if self.user_model is not None:
            user_model.write_optimizer(self.script, self.config, capturable=counts_on_device)
        else:
            asked = self.spec.recipe.optimizer if self.spec.recipe is not None else None
            name = self.row.optimizer.name if asked is None else asked.name
            given = self.row.optimizer.arguments if asked is None else asked.arguments.items()
            arguments: dict[str, object] = {**dict(given), **dict(self.config.optimizer_arguments)}
            if counts_on_device and name in _CAPTURABLE:
                arguments["capturable"] = True
            stepped = "weights.stepped" if self.has_weights else "[p for p in model.parameters() if p.requires_grad]"
            written = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
            self.script.add(f"optimizer = torch.optim.{name}({stepped}, {written})")
        self.write_scaling()
        if self.config.compiled_update:
            self.script.copy(f"{_WORKER}.techniques.compiled_update:CompiledUpdate")
            self.script.add(f"update = CompiledUpdate(optimizer, weights, scaling, {self.clip})")
        self.script.end_section()

    def write_scaling(self) -> None:
        name = self.spec.loss_scale
        if not self.has_scaling:
            return
        if name == "none":
            kind, arguments = "NoScaling", ""
        elif not is_dynamic(name):
            kind, arguments = "StaticScaling", repr(float(name))
        else:
            row = next(row for row in DYNAMIC_SCALES if row.name == name)
            self.script.copy("castwise.spec.loss_scale:DynamicScale")
            on_device = self.config.scales_on_device
            kind = "DeviceScaling" if on_device else "DynamicScaling"
            arguments = f"{row!r}, {'DEVICE' if on_device else 'DEVICE.type'}, optimizer"
        self.script.copy(f"{_WORKER}.loss_scaling:{kind}")
        self.script.add(f"scaling = {kind}({arguments})")

    @property
    def clip(self) -> str:
        return repr(self.row.clip_grad_norm) if self.user_model is None else "contract.clip_grad_norm"

    def write_step(self) -> None:
        """Write `train(batch)`, which computes a step, and `step(batch)`, which launches it."""
        self.write_compilation()
        body = ["batch = prepared(data.make(batch))"] if self.spec.recipe is not None else []
        body.append("weights.zero_grad()" if self.precision.master_weights else "optimizer.zero_grad()")
        body += self.forward_and_backward()
        if self.config.compiled_update:
            body.append("update()")
        else:
            body += self.plain_update()
        body.append("return loss" if self.user_model is None else "return total")
        self.script.add_section("def train(batch):", *(f"    {line}" for line in body))
        launch = "train"
        if self.config.cuda_graph:
            self.script.copy(f"{_WORKER}.techniques.cuda_graph:StepGraph")
            carried = "carried" if self.row.family == "rnn_lm" else "None"
            launch = f"StepGraph(train, DEVICE, {carried}, {self.config.steps_per_launch})"
        if self.user_model is not None:
            user_model.write_step(self.script, launch, self.config)
        else:
            self.script.add_section(f"step = {launch}")

    def write_compilation(self) -> None:
        mode = self.config.compile_mode
        if mode is None:
            return
        if self.user_model is None:
            self.script.add_section(f"compute_loss = torch.compile(compute_loss, mode={mode!r}, dynamic=False)")
        else:  # their batches may be of different shapes
            self.script.copy(f"{_WORKER}.techniques.compile:CompiledLoss")
            self.script.add_section(f"compute_loss = CompiledLoss(compute_loss, {mode!r})")

    def forward_and_backward(self) -> list[str]:
        part = "batch" if self.user_model is None else "part"
        forward = [f"loss = compute_loss(model, {part})"]
        if self.user_model is not None:
            forward += ["if contract.accumulate > 1:", "    loss = loss / contract.accumulate"]
        if self.precision.autocast_dtype is not None:
            context = f"with torch.autocast(DEVICE.type, dtype=torch.{self.precision.autocast_dtype}):"
            forward = [context, *(f"    {line}" for line in forward)]
        backward = "scaling.backward(loss)" if self.has_scaling else "loss.backward()"
        if self.user_model is None:
            return [*forward, backward]
        added = "total = loss.detach() if total is None else total + loss.detach()"
        return [
            "total = None",
            "for part in batch if contract.accumulate > 1 else (batch,):",
            *(f"    {line}" for line in (*forward, backward, added)),
        ]

    def plain_update(self) -> list[str]:
        if self.has_scaling:
            step = [f"scaling.step(optimizer, {self.clip})"]
        elif self.row.clip_grad_norm is None:
            step = ["optimizer.step()"]
        else:
            stepped = "[p for group in optimizer.param_groups for p in group['params']]"
            step = [f"torch.nn.utils.clip_grad_norm_({stepped}, {self.clip})", "optimizer.step()"]
        return ["weights.collect_gradients()", *step, "weights.publish()"] if self.has_weights else step

    def write_preparation(self) -> None:
        """Write `prepared(batch)`, which brings a batch of images into the layout of the loop."""
        lines = ["def prepared(batch):", "    images, labels = batch"]
        if self.config.num_channels is not None:
            missing = f"{self.config.num_channels} - images.shape[1]"
            lines.append(f"    images = torch.nn.functional.pad(images, (0, 0, 0, 0, 0, {missing}))")
        if self.config.channels_last:
            lines.append("    images = images.contiguous(memory_format=torch.channels_last)")
        self.script.add_section(*lines, "    return images, labels")

    def write_batches(self) -> None:
        """Write `batches`, which the timer goes through."""
        count = self.row.resident_batches
        if self.user_model is not None:
            user_model.write_batches(self.script, count, self.config)
            return
        workloads.write_data(self.script, self.row)
        is_prepared = self.config.num_channels is not None or self.config.channels_last
        if is_prepared:
            self.write_preparation()
        generator = "torch.Generator(DEVICE).manual_seed(SEED)"
        self.script.add(f"batches = make_batches({count}, BATCH_SIZE, DEVICE, {generator})")
        if is_prepared:
            self.script.add("batches = [prepared(batch) for batch in batches]")
        self.script.end_section()

    def write_timer(self) -> None:
        at_once = self.config.steps_per_launch
        flush = "step.flush()\n    " if at_once > 1 else ""
        self.script.add_section(_TIMER.replace("{flush}", flush).replace("{at_once}", str(at_once)))
