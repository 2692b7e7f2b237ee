"""The parts of a script that belong to a user's model: it calls their function, and uses what that returns."""

import os
from pathlib import Path

from castwise.errors import UsageError
from castwise.registry.techniques import StepConfig
from castwise.render.emit.builder import ScriptBuilder
from castwise.render.emit.updates import Update
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel, UserParts

# What modules read from their trainer, except for logging.
_TRAINER = """\
from types import SimpleNamespace
# What a module reads from its Trainer; the steps are those that a schedule is planned for.
model._trainer = SimpleNamespace(accumulate_grad_batches={accumulate}, current_epoch=0, global_step=0, max_epochs=1)
for name in ("estimated_stepping_batches", "max_steps", "num_training_batches"):
    setattr(model._trainer, name, 100_000)
model._trainer.is_global_zero, model._trainer.logger, model._trainer.loggers = True, None, []
model._trainer.training, model._trainer.validating, model._trainer.sanity_checking = True, False, False
model._trainer.world_size = 1
model.log = model.log_dict = lambda *arguments, **keywords: None"""

_CAST = """\
def cast(nest, dtype={dtype}):
    return tree_map_only(torch.Tensor, lambda part: part.to(dtype) if part.is_floating_point() else part, nest)"""

_CAST_FORWARD = """\
model.register_forward_pre_hook(lambda model, args, named: (cast(args), cast(named)), with_kwargs=True)
model.register_forward_hook(lambda model, args, output: cast(output, torch.float32))"""

# As castwise reads a model's output if it is given no loss.
_LOSS_OF_OUTPUT = """\
def compute_loss(model, batch):
    output = {call}
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    tensors = [part for part in tree_leaves(output) if isinstance(part, torch.Tensor) and part.is_floating_point()]
    scalars = [part for part in tensors if part.numel() == 1 and part.requires_grad]
    return (loss if loss is not None else scalars[0] if scalars else tensors[0].float().square().mean()).float()"""

_TO_DEVICE = """\
def to_device(batch):  # a batch of your loader
    def move(part):
        part = part.to(DEVICE, torch.float32 if part.is_floating_point() else None, non_blocking=True)
        return {part}

    return tree_map_only(torch.Tensor, move, batch)"""

_RESIZED = """\
def resized(part):  # the example's samples, in turn, as many as a batch has
    return part[torch.arange({size}) % {example_size}] if part.dim() else part"""

_RATES = """\
# Graphs and compiled code read the rates on the device; the scheduler moves them as numbers.
numbers = [float(group["lr"]) for group in optimizer.param_groups]
rates = [torch.tensor(number, device=DEVICE) for number in numbers]
for group, rate in zip(optimizer.param_groups, rates):
    group["lr"] = rate"""

_SCHEDULE = """\
def step_scheduler():
    for group, number in zip(optimizer.param_groups, numbers):
        group["lr"] = number
    scheduler.step()
    numbers[:] = [float(group["lr"]) for group in optimizer.param_groups]
    for group, rate, number in zip(optimizer.param_groups, rates, numbers):
        rate.fill_(number)
        group["lr"] = rate"""

_LEAVES = "from torch.utils._pytree import tree_leaves"
_TREE_MAP = "from torch.utils._pytree import tree_map_only"


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


class OwnModel:
    """A user's model in the script `file`.

    Raises:
        UsageError: There is no function to call, or what it returns is not known or has no lines.
    """

    def __init__(self, model: UserModel, parts: UserParts | None, file: Path) -> None:
        check_user_model(model, file)
        if parts is None or parts.batch_form in ("mapping", "other"):
            why = "of another form than a tensor, a tuple, a list or a dict" if parts is not None else "not known"
            raise UsageError(f"No script can be emitted of {model.name}: its batch is {why}.")
        self.model, self.parts, self._file = model, parts, file

    def _part(self, name: str) -> str:
        """Return where a part is that the function returned."""
        if self.parts.form == "dict":
            return f'parts["{name}"]'
        return {"loss": "loss_fn", "batch": "make_batch" if self.parts.batch == "function" else "example"}.get(
            name, name
        )

    def write_call(self, script: ScriptBuilder) -> None:
        """Write the lines that call the function, and make `model` of what it returns."""
        path, parts = Path(self.model.path), self.parts
        if self.model.kind == "file":
            folder, module, function = path.parent, path.stem, self.model.name
        else:
            folder = path
            module, _, function = self.model.name.partition(":")
        own_folder = self._file.absolute().parent
        lines = []
        if folder.resolve() != own_folder.resolve():
            relative = Path(os.path.relpath(folder.resolve(), own_folder.resolve())).as_posix()
            script.add("import sys", "from pathlib import Path")
            lines.append(f'sys.path.insert(0, str(Path(__file__).resolve().parent / "{relative}"))')
        if all(part.isidentifier() for part in module.split(".")):
            lines += [f"from {module} import {function}  # your own model", ""]
        else:
            script.add("import importlib")
            lines += [
                f'{function} = importlib.import_module("{module}").{function}  # your own model',
            ]
        call = f"{function}()" if parts.is_function else function
        if parts.form == "model":
            lines.append(f"model = {call}")
        elif parts.form == "dict":
            lines += [f"parts = {call}", f'model = parts["model"]{"()" if parts.makes_model else ""}']
        else:
            names = [self._part(name) for name in parts.names]
            lines.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}")
            lines += ["model = model()"] if parts.makes_model else []
        if not parts.is_float32:
            lines.append("model.to(torch.float32)")
        script.add(*lines, hoist=False)
        if parts.lightning is not None:
            script.add(_TRAINER.format(accumulate=parts.accumulate))
            calls = {"setup": 'model.setup("fit")', "configure_model": "model.configure_model()"}
            script.add(*(calls[name] for name in parts.lightning.hooks), spacing="\n")
            if parts.lightning.optimizer_at or "optimizer" not in parts.names:
                script.add("configured = model.configure_optimizers()", spacing="\n")

    def cast_lines(self, dtype: str) -> list[str]:
        """Return the lines that let a model of 16-bit weights take and return float32."""
        hooks = [] if self.parts.lightning is not None else [_CAST_FORWARD, ""]  # its step gets the batch
        return [_TREE_MAP, "", "", _CAST.format(dtype=dtype), "", "", *hooks]

    def write_optimizer(self, script: ScriptBuilder, update: Update, config: StepConfig) -> None:
        """Write the lines that make the user's optimizer over what is stepped, and its scheduler."""
        parts, name = self.parts, self.parts.optimizer_name
        added = update.optimizer_arguments(name)
        lightning = parts.lightning
        given = (
            f"configured{lightning.optimizer_at}"
            if lightning is not None and "optimizer" not in parts.names
            else self._part("optimizer")
        )
        weights = "stepped" if update.precision.master_weights else "[p for p in model.parameters() if p.requires_grad]"
        lines = []
        if parts.optimizer == "none":
            written = "".join(f", {argument}={value}" for argument, value in added.items())
            lines.append(f"optimizer = torch.optim.AdamW({weights}, lr=0.0001{written})")
        else:
            lines.append(f"optimizer = {given}{f'({weights})' if parts.optimizer == 'function' else ''}")
            if update.precision.master_weights and parts.optimizer == "instance":
                lines += [
                    "for group in optimizer.param_groups:",
                    '    group["params"] = [master_of.get(p, p) for p in group["params"]]',
                ]
            if "fused" in added or "foreach" in added:
                added = {"fused": False, "foreach": False} | added
            if added:
                settings = ", ".join(f"{argument}={value}" for argument, value in added.items())
                lines += [
                    "for group in optimizer.param_groups:  # or pass these where you make it",
                    f"    group.update({settings})",
                ]
            if added.get("fused") and update.has_scaler:
                lines.append("optimizer._step_supports_amp_scaling = True")
        if update.lists_stepped and not (update.precision.master_weights and parts.optimizer == "none"):
            lines.append('stepped = [p for group in optimizer.param_groups for p in group["params"]]')
        script.add(*lines)
        update.write(script, name, "momentum" in parts.optimizer_settings and name == "SGD", parts.optimizer_settings)
        self._write_scheduler(script, config)

    def _write_scheduler(self, script: ScriptBuilder, config: StepConfig) -> None:
        if self.parts.scheduler == "none":
            return
        if self.parts.lightning is not None and "scheduler" not in self.parts.names:
            (at, *others) = self.parts.lightning.schedulers_at
            if others:
                raise UsageError(f"No script can be emitted of {self.model.name}: it has several schedulers.")
            made = f"configured{at}"
        else:
            made = self._part("scheduler") + ("(optimizer)" if self.parts.scheduler == "function" else "")
        script.add(f"scheduler = {made}")
        if config.reads_rates_on_device:
            script.add(_RATES)
            script.define(_SCHEDULE)

    def step_lines(self, step: list[str], update: Update, config: StepConfig) -> list[str]:
        """Return the lines of the loop that take a step and move the scheduler, unless the step was skipped."""
        if self.parts.scheduler == "none":
            return step
        moved = "step_scheduler()" if config.reads_rates_on_device else "scheduler.step()"
        conditions = ["scheduler.last_epoch + 1 < scheduler.total_steps"] if self.parts.has_total_steps else []
        before = []
        if update.has_scaler:
            before = ["scale = scaler.get_scale()"]
            conditions.append("scaler.get_scale() >= scale")
        elif update.is_dynamic:
            conditions.append("not overflowed.item()")
        if conditions:
            return [*before, *step, f"if {' and '.join(conditions)}:  # not after a skipped step", f"    {moved}"]
        return [*step, moved]

    def write_loss(self, script: ScriptBuilder, dtype: str, *, is_16_bit: bool) -> None:
        """Write the lines that define `compute_loss(model, batch)`, whose loss is float32."""
        parts, in_float32 = self.parts, ".float()" if is_16_bit else ""
        if parts.lightning is not None:
            batch = "cast(batch)" if dtype else "batch"
            script.define(
                "def compute_loss(model, batch):",
                f"    loss = model.training_step({batch}, 0)",
                f'    return (loss["loss"] if isinstance(loss, dict) else loss){in_float32}',
            )
            return
        if "training_step" in parts.names:
            script.add('training_step = parts["training_step"]')
            script.define("def compute_loss(model, batch):", f"    return training_step(model, batch){in_float32}")
            return
        inputs = {"tensor": "batch", "dict": "**batch"}
        if "loss" not in parts.names:
            call = f"model({inputs.get(parts.batch_form, '*batch')})"
            if parts.is_of_transformers:
                script.define("def compute_loss(model, batch):", f"    return {call}.loss{in_float32}")
            else:
                script.define(_LEAVES, _LOSS_OF_OUTPUT.format(call=call))
            return
        if parts.form == "dict" or parts.has_loss_module:
            script.add(f"loss_fn = {self._part('loss')}{'.to(DEVICE)' if parts.has_loss_module else ''}")
        if parts.batch_form == "tuple":
            lines = ["    *inputs, target = batch", f"    return loss_fn(model(*inputs), target){in_float32}"]
        else:
            target = ", batch" if parts.batch_form == "dict" else ""
            lines = [f"    return loss_fn(model({inputs[parts.batch_form]}){target}){in_float32}"]
        script.define("def compute_loss(model, batch):", *lines)

    def write_batches(self, script: ScriptBuilder, spec: TrialSpec, count: int, is_channels_last: bool) -> None:
        """Write the lines that define `to_device(batch)`, and `batches`: `count`, of an example only one."""
        parts = self.parts
        laid_out = "part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part"
        script.define(_TREE_MAP, _TO_DEVICE.format(part=laid_out if is_channels_last else "part"))
        size = "BATCH_SIZE" if parts.accumulate == 1 else f"BATCH_SIZE // {parts.accumulate}"
        batch = self._part("batch")
        if parts.lightning is not None and parts.lightning.has_loader:
            batch = "model.train_dataloader()"
        if parts.batch == "function":
            made = f"{batch}({size})"
        else:
            made = f"next(iter({batch}))" if parts.batch == "loader" else batch
            count = 1
            if parts.example_size is not None and parts.example_size != spec.batch_size // parts.accumulate:
                script.define(_TREE_MAP, _RESIZED.format(size=size, example_size=parts.example_size))
                made = f"tree_map_only(torch.Tensor, resized, {made})"
        made = f"to_device({made})"
        if parts.accumulate > 1:
            made = f"[{made} for _ in range({parts.accumulate})]"
        about = "# The example batch that was measured stands in for your data."
        if parts.batch == "function":
            about = "# Batches of your function stand in for your data."
        listed = f"[{made} for _ in range({count})]" if count > 1 else f"[{made}]"
        script.add(about, f"torch.manual_seed({spec.seed})", f"batches = {listed}")
