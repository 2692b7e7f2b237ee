"""Scripts of loops over a model of the user's own: they call the function, and read its parts as castwise does."""

from collections.abc import Mapping
from pathlib import Path

from castwise.errors import UsageError
from castwise.render.emit.source import all_definitions, definitions
from castwise.spec.user_model import UserModel

_MODULES = ("contract", "batches", "loss", "optimizer", "lightning")

_READ = """\
WHOSE = {whose!r}
sys.path.insert(0, {folder!r})
returned = importlib.import_module({module!r}).{function}
if not isinstance(returned, nn.Module | dict | tuple):
    returned = call_without_arguments(returned, WHOSE)
contract = read_contract(returned, WHOSE)
if is_lightning_module(contract.model):
    contract = adapt(contract, WHOSE)
model = contract.model
_in_float32(model)
UNITS_PER_SAMPLE, UNIT = contract.units_per_sample, contract.unit
own_batches = BatchMaker(contract.batch, contract.accumulate, WHOSE)
user_loop = make_loop(contract, WHOSE)
compute_loss = make_compute_loss(contract, WHOSE)"""

_SET = """\
known = inspect.signature(type(optimizer)).parameters if type(optimizer).__module__.startswith("torch.optim.") else {{}}
for settings in (optimizer.defaults, *optimizer.param_groups):
    settings.update({{name: value for name, value in {wanted!r}.items() if name in known}})"""

_BACKWARD = """\
loss = compute_loss(model, part)
if contract.accumulate > 1:
    loss = loss / contract.accumulate"""

_MIRRORED = """\
if step_scheduler is not None:
    step_scheduler = DeviceLearningRates(optimizer, DEVICE, step_scheduler)
"""

_STEP = """\
step_scheduler = None if user_loop.make_scheduler is None else user_loop.make_scheduler(optimizer)
{mirrored}after_step = None if step_scheduler is None else AfterStep(scaling, step_scheduler)
launch = {launch}


def step(batch):
    loss = launch(batch)
    if after_step is not None:
        after_step()
    return loss"""

_CHANNELS_LAST = """\
def laid_out(part):
    return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part


batches = [tree_map_tensors(laid_out, batch) for batch in batches]"""


def check_own(model: UserModel, file: Path | None = None) -> None:
    """Make sure that a script can be written of loops over a user's own model.

    Args:
        model: Where it comes from.
        file: The script.

    Raises:
        UsageError: None can: there is no function that a script could call, or the script would replace its file.
    """
    if model.kind not in ("file", "module"):
        raise UsageError(
            f"No script can be emitted of {model.name}: a script calls a function of yours. Write one that returns the "
            "model, and tune FILE.py:FUNCTION."
        )
    if file is not None and file.resolve() == _source_of(model).resolve():
        raise UsageError(f"{file} is the file your model is in; name another for --emit.")


def _source_of(model: UserModel) -> Path:
    if model.kind == "file":
        return Path(model.path)
    return Path(model.path, *model.name.partition(":")[0].split(".")).with_suffix(".py")


def definitions_of_own(*, rates_on_device: bool) -> str:
    """Return what takes apart what a user's function returned, castwise's own code word for word.

    Args:
        rates_on_device: Whether the loop reads on the device what a scheduler moves.
    """
    parts = [
        "Batch = Any",
        definitions("spec/types.py", ["Unit"]),
        all_definitions("worker/pytree.py"),
        definitions("worker/models/task.py", ["UserLoop"]),
        *(all_definitions(f"worker/user_model/{name}.py") for name in _MODULES),
        definitions("worker/user_model/load.py", ["_in_float32"]),
        definitions("worker/lr_scheduling.py", ["AfterStep"]),
    ]
    if rates_on_device:
        parts.append(definitions("worker/techniques/optimizer_options.py", ["keep_rates_on_device"]))
        parts.append(definitions("worker/lr_scheduling.py", ["DeviceLearningRates"]))
    return "\n\n\n".join(parts)


def model_of_own(model: UserModel) -> str:
    """Return the lines that call the user's function, and name what came of it.

    Raises:
        UsageError: There is none.
    """
    check_own(model)
    path = Path(model.path)
    if model.kind == "file":
        folder, module, function, whose = path.parent, path.stem, model.name, f"{path.name}:{model.name}"
    else:
        module, _, function = model.name.partition(":")
        folder, whose = path, model.name
    return _READ.format(whose=whose, folder=str(folder), module=module, function=function)


def optimizer_of_own(wanted: Mapping[str, bool], *, masters: bool) -> list[str]:
    """Return the lines that make the user's optimizer over what is stepped, set as the loop wants it.

    Args:
        wanted: Settings of torch's optimizers, for those that have them.
        masters: Whether float32 masters are stepped in the weights' places.
    """
    lines = [f"weights = {'MasterWeights' if masters else 'Weights'}(model)"]
    lines.append("optimizer = user_loop.make_optimizer(weights)")
    if wanted:
        lines.append(_SET.format(wanted=dict(wanted)))
    if not {"fused", "foreach"}.isdisjoint(wanted):
        lines.append(f"optimizer._step_supports_amp_scaling = {wanted.get('fused', False)}  # as torch's own do")
    return lines


def train_of_own(*, autocast: str | None, masters: bool, update: bool) -> list[str]:
    """Return the lines that define `train(batch)`.

    Args:
        autocast: What torch.autocast computes in, None without it.
        masters: Whether gradients of masters keep their memory.
        update: Whether what follows backward is one compiled function.
    """
    inner = _BACKWARD.splitlines()
    if autocast is not None:
        inner = [f"with torch.autocast(DEVICE.type, dtype=torch.{autocast}):", *(f"    {line}" for line in inner)]
    lines = ["def train(batch):", f"    {'weights' if masters else 'optimizer'}.zero_grad()", "    total = None"]
    lines.append("    for part in batch if contract.accumulate > 1 else (batch,):")
    lines += [f"        {line}" for line in inner]
    lines += [
        "        scaling.backward(loss)",
        "        total = loss.detach() if total is None else total + loss.detach()",
    ]
    if update:
        lines.append("    update()")
    else:
        lines += ["    weights.collect_gradients()", "    scaling.step(optimizer, contract.clip_grad_norm)"]
        lines.append("    weights.publish()")
    return [*lines, "    return total", "", ""]


def step_of_own(launch: str, *, rates_on_device: bool) -> list[str]:
    """Return the lines that define `step(batch)`: a launch, and the user's scheduler behind it.

    Args:
        launch: What takes a step.
        rates_on_device: Whether it reads on the device what a scheduler moves.
    """
    mirrored = _MIRRORED if rates_on_device else ""
    return _STEP.format(launch=launch, mirrored=mirrored).splitlines()


def batches_of_own(count: int, *, channels_last: bool) -> str:
    """Return the lines that make `batches`.

    Args:
        count: How many, where a function makes them.
        channels_last: Whether images lie with their channels innermost.
    """
    made = f"batches = own_batches.make({count}, BATCH_SIZE, DEVICE, torch.Generator(DEVICE).manual_seed(SEED))"
    return "\n".join([made, *(["", "", _CHANNELS_LAST] if channels_last else [])])
