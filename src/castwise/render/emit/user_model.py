"""The parts of a script that belong to a user's model: it calls their function, and reads what that returns."""

from pathlib import Path

from castwise.errors import UsageError
from castwise.registry.techniques import StepConfig
from castwise.render.emit.builder import ScriptBuilder
from castwise.spec.user_model import UserModel

_ROOM = "castwise.worker.user_model"

_CALL = """\
import importlib
import sys
from torch import nn
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
user_batches = BatchMaker(contract.batch, contract.accumulate, WHOSE)
user_loop = make_loop(contract, WHOSE)
compute_loss = make_compute_loss(contract, WHOSE)"""

_SET = """\
import inspect
known = inspect.signature(type(optimizer)).parameters if type(optimizer).__module__.startswith("torch.optim.") else {{}}
for settings in (optimizer.defaults, *optimizer.param_groups):
    settings.update({{name: value for name, value in {wanted!r}.items() if name in known}})"""

_AFTER_STEP = """\
after_step = None if step_scheduler is None else AfterStep(scaling, step_scheduler)


def step(batch):
    loss = launch(batch)
    if after_step is not None:
        after_step()
    return loss"""

_CHANNELS_LAST = """\
def prepared(part):
    return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part


batches = [tree_map_tensors(prepared, batch) for batch in batches]"""


def check_user_model(model: UserModel, file: Path | None = None) -> None:
    """Make sure that a script can be written of loops over a user's model.

    Raises:
        UsageError: There is no function that a script could call, or the script `file` would replace the model's.
    """
    if model.kind not in ("file", "module"):
        raise UsageError(
            f"No script can be emitted of {model.name}: a script calls a function of yours. Write one that returns the "
            "model, and tune FILE.py:FUNCTION."
        )
    source = Path(model.path)
    if model.kind == "module":
        source = source.joinpath(*model.name.partition(":")[0].split(".")).with_suffix(".py")
    if file is not None and file.resolve() == source.resolve():
        raise UsageError(f"{file} is the file your model is in; name another for --emit.")


def write_call(script: ScriptBuilder, model: UserModel) -> None:
    """Write the lines that call the user's function, and name the parts of what it returned.

    Raises:
        UsageError: There is no such function.
    """
    check_user_model(model)
    path = Path(model.path)
    if model.kind == "file":
        folder, module, function, whose = path.parent, path.stem, model.name, f"{path.name}:{model.name}"
    else:
        module, _, function = model.name.partition(":")
        folder, whose = path, model.name
    script.copy(
        f"{_ROOM}.contract:call_without_arguments",
        f"{_ROOM}.contract:read_contract",
        f"{_ROOM}.lightning:is_lightning_module",
        f"{_ROOM}.lightning:adapt",
        f"{_ROOM}.load:_in_float32",
        f"{_ROOM}.batches:BatchMaker",
        f"{_ROOM}.loop:make_loop",
        f"{_ROOM}.loop:make_compute_loss",
    )
    script.add_section(_CALL.format(whose=whose, folder=str(folder), module=module, function=function))


def write_optimizer(script: ScriptBuilder, config: StepConfig, *, capturable: bool) -> None:
    """Write the lines that make the user's optimizer over what is stepped, set as the loop wants it."""
    script.add("optimizer = user_loop.make_optimizer(weights)")
    wanted = dict(config.optimizer_arguments)
    if wanted:  # they exclude each other
        wanted = {name: wanted.get(name, False) for name in ("fused", "foreach")}
        script.add(f"optimizer._step_supports_amp_scaling = {wanted['fused']}  # as torch's own do")
    if capturable:
        wanted["capturable"] = True
    if wanted:
        script.add(_SET.format(wanted=wanted))


def write_step(script: ScriptBuilder, launch: str, config: StepConfig) -> None:
    """Write the lines that define `step(batch)`: the expression `launch`, and the user's scheduler after it."""
    if config.steps_per_launch > 1:  # which cannot follow a scheduler
        script.add_section(f"step = {launch}")
        return
    script.copy("castwise.worker.lr_schedules:AfterStep")
    script.add("step_scheduler = None if user_loop.make_scheduler is None else user_loop.make_scheduler(optimizer)")
    if config.reads_rates_on_device:
        script.copy("castwise.worker.lr_schedules:DeviceLearningRates")
        script.add("if step_scheduler is not None:")
        script.add("    step_scheduler = DeviceLearningRates(optimizer, DEVICE, step_scheduler)")
    script.add(f"launch = {launch}")
    script.add_section(_AFTER_STEP)


def write_batches(script: ScriptBuilder, count: int, config: StepConfig) -> None:
    """Write the lines that make `batches`: `count` of them, if a function of the user's makes them."""
    generator = "torch.Generator(DEVICE).manual_seed(SEED)"
    script.add_section(f"batches = user_batches.make({count}, BATCH_SIZE, DEVICE, {generator})")
    if config.channels_last:
        script.copy("castwise.worker.pytree:tree_map_tensors")
        script.add_section(_CHANNELS_LAST)
