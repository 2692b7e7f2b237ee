"""The script of one loop: model, synthetic data, precision, techniques and a timer, in plain PyTorch.

What is more than a few lines (masters, loss scaling on the device, a step's graph, the models) is castwise's own code
word for word; the rest is written as one would by hand. Nothing in it imports castwise.
"""

from castwise.errors import UsageError
from castwise.loss_scales import DYNAMIC_SCALES
from castwise.plan import SYNTHETIC, TrialSpec
from castwise.precisions import Precision, find_precision
from castwise.recipe import Recipe
from castwise.report.script.changes import channels_of, model_lines
from castwise.report.script.models import compute_loss_of, data_of, model_of
from castwise.report.script.sources import definitions
from castwise.report.script.training import check_training, images_of, run_of, schedule_of
from castwise.techniques import GRAPHS, join
from castwise.workloads import Workload, find_workload

_IMPORTS = {
    "import argparse": "argparse.",
    "import copy": "copy.copy",
    "import functools": "functools.",
    "import inspect": "inspect.",
    "import math": "math.",
    "import statistics": "statistics.",
    "import operator": "operator.",
    "import random": "random.getstate",
    "import sys": "sys.modules",
    "import time": "time.",
    "from collections.abc import Callable": "Callable",
    "from collections.abc import Iterable": "Iterable",
    "from collections.abc import Iterator": "Iterator",
    "from collections.abc import Sequence": "Sequence",
    "from contextlib import contextmanager": "@contextmanager",
    "from contextlib import nullcontext": "nullcontext",
    "from dataclasses import dataclass": "@dataclass",
    "from functools import cache": "@cache",
    "from functools import partial": "partial(",
    "from importlib.util import find_spec": "find_spec(",
    "from types import MethodType": "MethodType(",
    "from typing import Any": "Any",
    "from typing import ClassVar": "ClassVar[",
    "from typing import NamedTuple": "NamedTuple",
    "from typing import cast": "cast(",
    "from typing import Protocol": "Protocol",
    "import torch": "torch",
    "from torch import Tensor, nn": "nn.",
    "from torch import fx": "fx.",
    "import triton": "@triton.jit",
    "import triton.language as tl": "tl.",
    "from torch.library import triton_op, wrap_triton": "@triton_op",
    "from torch.nn import functional": "functional.",
    "from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer": "Optimizer",
    "from torch.optim.adadelta import adadelta": "(\n        adadelta,",
    "from torch.optim.adam import adam": "(\n        adam,",
    "from torch.optim.adamw import adamw": "(\n        adamw,",
    "from torch.optim.sgd import sgd": "(sgd,",
    "from torch.utils import _pytree as pytree": "pytree.",
    "from torch.utils.checkpoint import checkpoint": "checkpoint(",
    "from torchvision import models": "models.get_model",
    "import torchvision": "torchvision.datasets",
    "import timm": "timm.create_model",
}

_DECIDING_ON_DEVICE = frozenset({"fused-optimizer", "no-step-sync", "compiled-update", *GRAPHS})
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


def check_script(workload: str, data_set: str, recipe: Recipe | None = None) -> None:
    """Make sure, before anything is measured, that a script can be written of a workload's loops.

    Args:
        workload: Its name.
        data_set: Its data.
        recipe: The training run, where whole epochs are timed.

    Raises:
        UsageError: None can.
    """
    model_of(find_workload(workload))
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
    body = "\n\n\n".join(
        filter(
            None,
            [
                _settings(spec, row, precision),
                model_of(row),
                compute_loss_of(row),
                _scaling_definitions(spec),
                _master_definitions(spec, precision),
                _update_definitions(spec),
                _graph_definitions(spec),
                model_lines(spec, precision),
                _optimizer_lines(spec, row, precision),
                *(_on_random_data(spec, row, precision) if recipe is None else _training(spec, row, precision, recipe)),
            ],
        )
    )
    loop = f"{row.name}, {spec.precision}, {join(spec.techniques) if spec.techniques else 'plain loop'}"
    lines = [f'"""{loop}: batch {spec.batch_size}.', "", *([measured, ""] if measured else [])]
    if recipe is None:
        lines.append("The data is random; put your own loader in the place of `batches`.")
    lines += ['"""', ""]
    imports = [line for line, sign in _IMPORTS.items() if sign in body or line == "import torch"]
    if "Optimizer" not in body and "SGD" in body and "isinstance(optimizer, SGD)" in body:
        imports.append("from torch.optim import SGD")
    if "TechniqueError" in body:  # by which techniques refuse models that they do not fit
        imports += ["", "TechniqueError = RuntimeError"]
    return "\n".join([*lines, *imports, "", body, ""])


def _on_random_data(spec: TrialSpec, row: Workload, precision: Precision) -> list[str]:
    return [_step_lines(spec, row, precision), data_of(row), _batch_lines(spec, row), _timer(spec)]


def _training(spec: TrialSpec, row: Workload, precision: Precision, recipe: Recipe) -> list[str]:
    reading = {"no-step-sync", *GRAPHS}.isdisjoint(spec.techniques)
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


def _settings(spec: TrialSpec, row: Workload, precision: Precision) -> str:
    lines = [
        f"DEVICE = torch.device({spec.device!r})",
        f"BATCH_SIZE, UNIT = {spec.batch_size}, {row.unit!r}",
        f"SEED = {spec.seed}",
        "",
        f"# What float32 products are computed in: {precision.float32_matmul}.",
    ]
    for path in ("", "cuda.matmul.", "cudnn.conv.", "cudnn.rnn."):
        lines.append(f"torch.backends.{path}fp32_precision = {precision.float32_matmul!r}")
    searches = "cudnn-search" in spec.techniques or (spec.recipe is not None and spec.recipe.cudnn_benchmark)
    lines.append(f"torch.backends.cudnn.benchmark = {searches}")
    if spec.device_type == "cuda":
        lines.append("torch.cuda.set_device(DEVICE)  # kernels of Triton run on the current one")
    lines.append("torch.manual_seed(SEED)")
    return "\n".join(lines)


def _timer(spec: TrialSpec) -> str:
    at_once = max(1, launches_of(spec))
    flush = "step.flush()\n    " if at_once > 1 else ""
    return _TIMER.replace("{flush}", flush).replace("{at_once}", str(at_once))


def scales_on_device(spec: TrialSpec) -> bool:
    """Return whether a loop decides on the device whether loss scaling skips a step."""
    return not _DECIDING_ON_DEVICE.isdisjoint(spec.techniques)


def launches_of(spec: TrialSpec) -> int:
    """Return how many steps are one launch of a graph, 0 where none is."""
    return next((steps for name, steps in (("cuda-graph", 1), ("cuda-graph-8", 8)) if name in spec.techniques), 0)


def _dynamic(spec: TrialSpec) -> bool:
    return spec.loss_scale.startswith("dynamic")


def _scaling_definitions(spec: TrialSpec) -> str:
    names = ["NoScaling", "stepped_by", "clip"]
    if spec.loss_scale == "none":
        return definitions("measure/loss_scaling.py", names) if _compiles_update(spec) else ""
    if not _dynamic(spec):
        return definitions("measure/loss_scaling.py", [*names, "StaticScaling"])
    row = definitions("loss_scales.py", ["DynamicScale"])
    if scales_on_device(spec):
        kinds = definitions("measure/device_scaling.py", ["DeviceScaling", "_state_of", "_fill_momentum"])
        return "\n\n\n".join([row, definitions("measure/loss_scaling.py", names), kinds])
    return "\n\n\n".join([row, definitions("measure/loss_scaling.py", [*names, "DynamicScaling", "_HalfGradScaler"])])


def _compiles_update(spec: TrialSpec) -> bool:
    return "compiled-update" in spec.techniques


def _master_definitions(spec: TrialSpec, precision: Precision) -> str:
    if precision.master_weights:
        return definitions("measure/precision.py", ["Weights", "MasterWeights"])
    return definitions("measure/precision.py", ["Weights"]) if _compiles_update(spec) else ""


def _update_definitions(spec: TrialSpec) -> str:
    if not _compiles_update(spec):
        return ""
    return definitions("measure/techniques/update.py", _UPDATE)


def _graph_definitions(spec: TrialSpec) -> str:
    if not launches_of(spec):
        return ""
    head = "Batch = tuple[Tensor, ...]\nForm = tuple[tuple[torch.Size, torch.dtype], ...]"
    return "\n\n\n".join(
        [
            head,
            _OF_TUPLES,
            definitions("measure/workloads/task.py", ["Carried"]),
            definitions("measure/techniques/graph.py", _GRAPH),
        ]
    )


# castwise's own reach into data classes and mappings too; what the models of scripts take and return is tuples.
_OF_TUPLES = '''def tensors_of(batch: Batch) -> Batch:
    """Return the tensors of a batch."""
    return batch


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return a batch with every tensor replaced."""
    return tuple(map(function, batch))


def form_of(batch: Batch) -> Form:
    """Return the shapes and dtypes of a batch's tensors."""
    return tuple((part.shape, part.dtype) for part in batch)'''


def _optimizer_lines(spec: TrialSpec, row: Workload, precision: Precision) -> str:
    asked = spec.recipe.optimizer if spec.recipe is not None else None
    name, given = (
        (row.optimizer.name, row.optimizer.arguments) if asked is None else (asked.name, asked.arguments.items())
    )
    arguments = [f"{argument}={value!r}" for argument, value in given]
    if "fused-optimizer" in spec.techniques:
        arguments.append("fused=True")
    if not {"foreach-optimizer", "compiled-update"}.isdisjoint(spec.techniques):
        arguments.append("foreach=True")
    if scales_on_device(spec) and spec.device_type == "cuda" and name in _CAPTURABLE:
        arguments.append("capturable=True")
    lines = ["weights = MasterWeights(model)"] if precision.master_weights else []
    if _compiles_update(spec) and not precision.master_weights:
        lines.append("weights = Weights(model)")
    stepped = "weights.stepped" if precision.master_weights else "[p for p in model.parameters() if p.requires_grad]"
    lines.append(f"optimizer = torch.optim.{name}({stepped}, {', '.join(arguments)})")
    if _dynamic(spec):
        found = next(each for each in DYNAMIC_SCALES if each.name == spec.loss_scale)
        lines.append(f"scale = {found!r}")
        kind = "DeviceScaling(scale, DEVICE, optimizer)"
        lines.append(f"scaling = {kind if scales_on_device(spec) else 'DynamicScaling(scale, DEVICE.type, optimizer)'}")
    elif spec.loss_scale != "none":
        lines.append(f"scaling = StaticScaling({float(spec.loss_scale)!r})")
    elif _compiles_update(spec):
        lines.append("scaling = NoScaling()")
    if _compiles_update(spec):
        lines.append(f"update = CompiledUpdate(optimizer, weights, scaling, {row.clip_grad_norm!r})")
    return "\n".join(lines)


def _step_lines(spec: TrialSpec, row: Workload, precision: Precision) -> str:
    lines: list[str] = []
    mode = {"compile": "default", "compile-max-autotune": "max-autotune-no-cudagraphs"}
    chosen = next((mode[name] for name in spec.techniques if name in mode), None)
    if chosen is not None:
        lines += [f"compute_loss = torch.compile(compute_loss, mode={chosen!r}, dynamic=False)", "", ""]
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
    at_once = launches_of(spec)
    several = f", {at_once}" if at_once > 1 else ""
    lines.append(f"step = StepGraph(train, DEVICE, {carried}{several})" if at_once else "step = train")
    return "\n".join(lines)


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
