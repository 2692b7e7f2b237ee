"""The script of one loop: model, synthetic data, precision, techniques and a timer, in plain PyTorch.

What is more than a few lines (masters, loss scaling on the device, a step's graph, the models) is castwise's own code
word for word; the rest is written as one would by hand. Nothing in it imports castwise.
"""

from pathlib import Path

from castwise.errors import UsageError
from castwise.registry.precisions import Precision, find_precision
from castwise.registry.techniques import join, step_config_of
from castwise.registry.workloads import Workload, find_workload
from castwise.render.emit.imports import imports_of
from castwise.render.emit.model_changes import channels_of, model_lines
from castwise.render.emit.source import definitions
from castwise.render.emit.training import check_training, images_of, run_of, schedule_of
from castwise.render.emit.user_model import (
    batches_of_own,
    check_own,
    definitions_of_own,
    model_of_own,
    optimizer_of_own,
    step_of_own,
    train_of_own,
)
from castwise.render.emit.workloads import OF_TUPLES, compute_loss_of, data_of, model_of
from castwise.spec.loss_scale import DYNAMIC_SCALES, is_dynamic
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.spec.user_model import UserModel, locate

_UPDATE = ["_SMALL", "_FUNCTIONS", "States", "CompiledUpdate", "_norms", "_update", "_step", "_lists"]
_GRAPH = ["_WARM_UP_STEPS", "_MORE_WARM_UP_STEPS", "_MOST_SHAPES", "CudaCaptures", "_Captured", "_by_part", "StepGraph"]

# Optimizers of torch that can count their steps on the device, of those that workloads use.
_CAPTURABLE = ("Adadelta", "Adam", "AdamW")

_TIMER = """\
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
        recipe: The training run, where whole epochs are timed.
        file: The script.

    Raises:
        UsageError: None can.
    """
    row = find_workload(workload)
    if row.family == "own":
        check_own(locate(workload), file)
    else:
        model_of(row)
    if recipe is not None:
        check_training(data_set, recipe)
    elif data_set != SYNTHETIC:
        raise UsageError("A script of steps draws random data; --emit goes with the data set synthetic alone.")


def script_of(spec: TrialSpec, measured: str = "") -> str:
    """Return the script of a loop on one device: of steps on random data, or of a training run on resident data.

    Args:
        spec: The loop.
        measured: What was measured of it, in a line.

    Raises:
        UsageError: There is no plain script for the workload, its data or its spread.
    """
    row, precision = find_workload(spec.workload), find_precision(spec.precision)
    if spec.world_size > 1 or (spec.kind == "steady" and spec.data_set != SYNTHETIC):
        raise UsageError("A script can be emitted of steps on synthetic data and one device; this loop is another.")
    recipe = spec.recipe
    parts = (
        _of_workload(spec, row, precision)
        if spec.user_model is None
        else _of_own(spec, spec.user_model, row, precision)
    )
    body = "\n\n\n".join(filter(None, parts))
    loop = f"{row.name}, {spec.precision}, {join(spec.techniques) if spec.techniques else 'plain loop'}"
    lines = [f'"""{loop}: batch {spec.batch_size}.', "", *([measured, ""] if measured else [])]
    if spec.user_model is not None:
        lines.append("Model, batches, loss and optimizer are those of your own function, which this file calls.")
    elif recipe is None:
        lines.append("The data is random; put your own loader in the place of `batches`.")
    lines += ['"""', ""]
    return "\n".join([*lines, *imports_of(body), "", body, ""])


def _of_workload(spec: TrialSpec, row: Workload, precision: Precision) -> list[str]:
    recipe = spec.recipe
    return [
        _settings(spec, row),
        _numeric_lines(spec, precision),
        model_of(row),
        compute_loss_of(row),
        _scaling_definitions(spec),
        _master_definitions(spec, precision),
        _update_definitions(spec),
        _graph_definitions(spec),
        model_lines(spec, precision),
        _optimizer_lines(spec, row, precision),
        *(_on_random_data(spec, row, precision) if recipe is None else _training(spec, row, precision, recipe)),
    ]


def _of_own(spec: TrialSpec, own: UserModel, row: Workload, precision: Precision) -> list[str]:
    masters, updates = precision.master_weights, _compiles_update(spec)
    kernels = _optimizer_kernels(spec)
    wanted = {} if kernels is None else {name: name == kernels for name in ("fused", "foreach")}
    if scales_on_device(spec) and spec.device_type == "cuda":
        wanted["capturable"] = True
    at_once = launches_of(spec)
    on_device = at_once == 1 or (updates and not at_once)
    train = train_of_own(autocast=precision.autocast_dtype, masters=masters, update=updates)
    step = step_of_own(_launch(spec, "None"), rates_on_device=on_device)
    if at_once > 1:  # which goes with no scheduler
        step = [_launch_line(spec, "None")]
    return [
        _settings(spec, row),
        _scaling_definitions(spec),
        _master_definitions(spec, precision),
        definitions_of_own(rates_on_device=on_device),
        model_of_own(own),
        _numeric_lines(spec, precision),  # behind the user's code, which may have set it otherwise
        _update_definitions(spec),
        _graph_definitions(spec),
        model_lines(spec, precision),
        "\n".join([*optimizer_of_own(wanted, masters=masters), *_scaling_lines(spec, "contract.clip_grad_norm")]),
        "\n".join([*_compile_lines(spec), *train, *step]),
        batches_of_own(row.resident_batches, channels_last="channels-last" in spec.techniques),
        _timer(spec),
    ]


def _on_random_data(spec: TrialSpec, row: Workload, precision: Precision) -> list[str]:
    return [_step_lines(spec, row, precision), data_of(row), _batch_lines(spec, row), _timer(spec)]


def _training(spec: TrialSpec, row: Workload, precision: Precision, recipe: Recipe) -> list[str]:
    reading = step_config_of(spec.techniques).reads_loss
    dtype = precision.autocast_dtype
    return [
        images_of(spec, recipe),
        _prepared_lines(spec),
        schedule_of(recipe, rates_on_device=launches_of(spec) > 0 or _compiles_update(spec)),
        _step_lines(spec, row, precision),
        run_of(
            recipe,
            reads_loss=recipe.read_loss_every_step and reading,
            autocast="nullcontext()" if dtype is None else f"torch.autocast(DEVICE.type, dtype=torch.{dtype})",
            at_once=launches_of(spec),
        ),
    ]


def _prepared_lines(spec: TrialSpec) -> str:
    lines = ["def prepared(batch):", "    images, labels = batch"]
    channels = channels_of(spec)
    if channels is not None:
        lines.append(f"    images = nn.functional.pad(images, (0, 0, 0, 0, 0, {channels} - images.shape[1]))")
    if "channels-last" in spec.techniques:
        lines.append("    images = images.contiguous(memory_format=torch.channels_last)")
    return "\n".join([*lines, "    return images, labels"])


def _settings(spec: TrialSpec, row: Workload) -> str:
    lines = [f"DEVICE = torch.device({spec.device!r})"]
    lines.append(
        f"BATCH_SIZE, UNIT = {spec.batch_size}, {row.unit!r}"
        if spec.user_model is None
        else f"BATCH_SIZE = {spec.batch_size}"
    )
    lines.append(f"SEED = {spec.seed}")
    if spec.device_type == "cuda":
        lines.append("torch.cuda.set_device(DEVICE)  # kernels of Triton run on the current one")
    return "\n".join([*lines, "torch.manual_seed(SEED)"])


def _numeric_lines(spec: TrialSpec, precision: Precision) -> str:
    older = "high" if precision.float32_matmul == "tf32" else "highest"
    lines = [
        f"# What float32 products are computed in: {precision.float32_matmul}.",
        f"torch.set_float32_matmul_precision({older!r})  # first: it writes others; torch 2.11's max-autotune asks it",
    ]
    for path in ("", "cuda.matmul.", "cudnn.conv.", "cudnn.rnn."):
        lines.append(f"torch.backends.{path}fp32_precision = {precision.float32_matmul!r}")
    searches = "cudnn-search" in spec.techniques or (spec.recipe is not None and spec.recipe.cudnn_benchmark)
    if spec.user_model is None or searches:  # the user's own setting is kept
        lines.append(f"torch.backends.cudnn.benchmark = {searches}")
    return "\n".join(lines)


def _timer(spec: TrialSpec) -> str:
    at_once = max(1, launches_of(spec))
    flush = "step.flush()\n    " if at_once > 1 else ""
    return _TIMER.replace("{flush}", flush).replace("{at_once}", str(at_once))


def scales_on_device(spec: TrialSpec) -> bool:
    """Return whether a loop decides on the device whether loss scaling skips a step."""
    return step_config_of(spec.techniques).scales_on_device


def launches_of(spec: TrialSpec) -> int:
    """Return how many steps are one launch of a graph, 0 where none is."""
    return next((steps for name, steps in (("cuda-graph", 1), ("cuda-graph-8", 8)) if name in spec.techniques), 0)


def _scaling_definitions(spec: TrialSpec) -> str:
    names = ["NoScaling", "stepped_by", "clip"]
    if spec.loss_scale == "none":
        return definitions("worker/loss_scaling.py", names) if _scales_always(spec) else ""
    if not is_dynamic(spec.loss_scale):
        return definitions("worker/loss_scaling.py", [*names, "StaticScaling"])
    row = definitions("spec/loss_scale.py", ["DynamicScale"])
    if scales_on_device(spec):
        kinds = definitions("worker/device_loss_scaling.py", ["DeviceScaling", "_state_of", "_fill_momentum"])
        return "\n\n\n".join([row, definitions("worker/loss_scaling.py", names), kinds])
    return "\n\n\n".join([row, definitions("worker/loss_scaling.py", [*names, "DynamicScaling", "_HalfGradScaler"])])


def _scales_always(spec: TrialSpec) -> bool:
    """Return whether a loop goes by weights and a scaling even where they do nothing."""
    return _compiles_update(spec) or spec.user_model is not None


def _compiles_update(spec: TrialSpec) -> bool:
    return "compiled-update" in spec.techniques


def _optimizer_kernels(spec: TrialSpec) -> str | None:
    """Return the setting of an optimizer that its techniques switch on; None where they leave it."""
    if "fused-optimizer" in spec.techniques:
        return "fused"
    return "foreach" if _compiles_update(spec) or "foreach-optimizer" in spec.techniques else None


def _master_definitions(spec: TrialSpec, precision: Precision) -> str:
    if precision.master_weights:
        return definitions("worker/precision.py", ["Weights", "MasterWeights"])
    return definitions("worker/precision.py", ["Weights"]) if _scales_always(spec) else ""


def _update_definitions(spec: TrialSpec) -> str:
    if not _compiles_update(spec):
        return ""
    return definitions("worker/techniques/compiled_update.py", _UPDATE)


def _graph_definitions(spec: TrialSpec) -> str:
    if not launches_of(spec):
        return ""
    return "\n\n\n".join(
        [
            *([OF_TUPLES] if spec.user_model is None else []),
            definitions("worker/models/task.py", ["RecurrentState"]),
            definitions("worker/techniques/cuda_graph.py", _GRAPH),
        ]
    )


def _optimizer_lines(spec: TrialSpec, row: Workload, precision: Precision) -> str:
    asked = spec.recipe.optimizer if spec.recipe is not None else None
    name, given = (
        (row.optimizer.name, row.optimizer.arguments) if asked is None else (asked.name, asked.arguments.items())
    )
    arguments = [f"{argument}={value!r}" for argument, value in given]
    kernels = _optimizer_kernels(spec)
    if kernels is not None:
        arguments.append(f"{kernels}=True")
    if scales_on_device(spec) and spec.device_type == "cuda" and name in _CAPTURABLE:
        arguments.append("capturable=True")
    lines = ["weights = MasterWeights(model)"] if precision.master_weights else []
    if _compiles_update(spec) and not precision.master_weights:
        lines.append("weights = Weights(model)")
    stepped = "weights.stepped" if precision.master_weights else "[p for p in model.parameters() if p.requires_grad]"
    lines.append(f"optimizer = torch.optim.{name}({stepped}, {', '.join(arguments)})")
    lines += _scaling_lines(spec, repr(row.clip_grad_norm))
    return "\n".join(lines)


def _scaling_lines(spec: TrialSpec, clip: str) -> list[str]:
    lines: list[str] = []
    if is_dynamic(spec.loss_scale):
        found = next(each for each in DYNAMIC_SCALES if each.name == spec.loss_scale)
        lines.append(f"scale = {found!r}")
        kind = "DeviceScaling(scale, DEVICE, optimizer)"
        lines.append(f"scaling = {kind if scales_on_device(spec) else 'DynamicScaling(scale, DEVICE.type, optimizer)'}")
    elif spec.loss_scale != "none":
        lines.append(f"scaling = StaticScaling({float(spec.loss_scale)!r})")
    elif _scales_always(spec):
        lines.append("scaling = NoScaling()")
    if _compiles_update(spec):
        lines.append(f"update = CompiledUpdate(optimizer, weights, scaling, {clip})")
    return lines


def _step_lines(spec: TrialSpec, row: Workload, precision: Precision) -> str:
    lines = _compile_lines(spec)
    zero = "weights.zero_grad()" if precision.master_weights else "optimizer.zero_grad()"
    lines += ["def train(batch):", *(["    batch = prepared(data.make(batch))"] if spec.recipe else []), f"    {zero}"]
    if precision.autocast_dtype is None:
        lines.append("    loss = compute_loss(model, batch)")
    else:
        lines.append(f"    with torch.autocast(DEVICE.type, dtype=torch.{precision.autocast_dtype}):")
        lines.append("        loss = compute_loss(model, batch)")
    scaled = spec.loss_scale != "none"
    lines.append("    scaling.backward(loss)" if scaled else "    loss.backward()")
    lines += ["    update()"] if _compiles_update(spec) else _update_lines(row, precision, scaled=scaled)
    lines += ["    return loss", "", ""]
    carried = "carried" if row.family == "rnn_lm" else "None"
    return "\n".join([*lines, _launch_line(spec, carried)])


def _compile_lines(spec: TrialSpec) -> list[str]:
    mode = {"compile": "default", "compile-max-autotune": "max-autotune-no-cudagraphs"}
    chosen = next((mode[name] for name in spec.techniques if name in mode), None)
    if chosen is None:
        return []
    if spec.user_model is not None:  # whose batches may be of different shapes
        names = ["Shapes", "CompiledLoss", "shapes_of"]
        text = definitions("worker/techniques/compile.py", names)
        return [text, "", "", f"compute_loss = CompiledLoss(compute_loss, {chosen!r})", "", ""]
    return [f"compute_loss = torch.compile(compute_loss, mode={chosen!r}, dynamic=False)", "", ""]


def _launch_line(spec: TrialSpec, carried: str) -> str:
    return f"step = {_launch(spec, carried)}"


def _launch(spec: TrialSpec, carried: str) -> str:
    """Return what takes a step, as an expression."""
    at_once = launches_of(spec)
    several = f", {at_once}" if at_once > 1 else ""
    return f"StepGraph(train, DEVICE, {carried}{several})" if at_once else "train"


def _update_lines(row: Workload, precision: Precision, *, scaled: bool) -> list[str]:
    lines = ["    weights.collect_gradients()"] if precision.master_weights else []
    clip = row.clip_grad_norm
    if scaled:
        lines.append(f"    scaling.step(optimizer, {clip!r})")
    else:
        if clip is not None:
            stepped = "[p for group in optimizer.param_groups for p in group['params']]"
            lines.append(f"    torch.nn.utils.clip_grad_norm_({stepped}, {clip!r})")
        lines.append("    optimizer.step()")
    if precision.master_weights:
        lines.append("    weights.publish()")
    return lines


def _batch_lines(spec: TrialSpec, row: Workload) -> str:
    lines = [
        f"batches = make_batches({row.resident_batches}, BATCH_SIZE, DEVICE, torch.Generator(DEVICE).manual_seed(SEED))"
    ]
    channels = channels_of(spec)
    if channels is not None:
        lines.append(
            f"batches = [(nn.functional.pad(x, (0, 0, 0, 0, 0, {channels} - x.shape[1])), y) for x, y in batches]"
        )
    if "channels-last" in spec.techniques:
        lines.append("batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in batches]")
    return "\n".join(lines)
