"""The parts of a script that belong to a user's model: it calls their function, and uses what that returns."""

import os
from collections.abc import Mapping
from pathlib import Path

from castwise.emit.builder import ScriptBuilder
from castwise.errors import UsageError
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import step_config_of
from castwise.registry.workloads import find_workload
from castwise.spec.loss_scale import is_dynamic
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

_RESIZED = """\
def resized(part):  # the example's samples, in turn, as many as a batch has
    return part[torch.arange({size}) % {example_size}] if part.dim() else part"""


_PRECISION, _RATES = "castwise.apply.precision", "castwise.trial.lr_schedules"
# What the model is called with, by the batch's form.
_INPUTS = {"tensor": "batch", "tuple": "*batch", "dict": "**batch"}


def check_user_model(model: UserModel, file: Path | None = None) -> None:
    """Raise UsageError if no script can call what makes a user's model, or would be written over it."""
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
    """A user's model in the script `file`; `CastwiseModel` has the same methods."""

    about = "Model, loss, optimizer and example batch are those of your own function."

    def __init__(
        self, spec: TrialSpec, model: UserModel, parts: UserParts | None, script: ScriptBuilder, file: Path
    ) -> None:
        check_user_model(model, file)
        if parts is None or parts.batch_form in ("mapping", "other"):
            why = "of another form than a tensor, a tuple, a list or a dict" if parts is not None else "not known"
            raise UsageError(f"No script can be emitted of {model.name}: its batch is {why}.")
        self.spec, self.model, self.parts, self._script, self._file = spec, model, parts, script, file
        self.clip, self.accumulate = parts.clip_grad_norm, parts.accumulate
        self.unit, self.units_per_sample = parts.unit, parts.units_per_sample
        self.steps_scheduler = parts.scheduler != "none"
        self.casts_calls = parts.lightning is None  # else its step casts the batch

    def _part(self, name: str) -> str:
        """Return where a part is that the function returned."""
        if self.parts.form == "dict":
            return f'parts["{name}"]'
        names = {"loss": "loss_fn", "batch": "make_batch" if self.parts.batch == "function" else "example"}
        return names.get(name, name)

    def write_model(self) -> None:
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
            self._script.add("import sys", "from pathlib import Path")
            lines.append(f'sys.path.insert(0, str(Path(__file__).resolve().parent / "{relative}"))')
        if all(part.isidentifier() for part in module.split(".")):
            lines += [f"from {module} import {function}  # your own model", ""]
        else:
            self._script.add("import importlib")
            lines.append(f'{function} = importlib.import_module("{module}").{function}  # your own model')
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
        self._script.add(*lines, hoist=False)
        if parts.lightning is not None:
            self._script.add(_TRAINER.format(accumulate=parts.accumulate))
            calls = {"setup": 'model.setup("fit")', "configure_model": "model.configure_model()"}
            self._script.add(*(calls[name] for name in parts.lightning.hooks), spacing="\n")
            if parts.lightning.optimizer_at or "optimizer" not in parts.names:
                self._script.add("configured = model.configure_optimizers()", spacing="\n")

    @property
    def optimizer_name(self) -> str:
        return self.parts.optimizer_name

    def write_optimizer(self, added: Mapping[str, bool], weights_class: str) -> None:
        """Write the lines that make the optimizer over the weights of a class, with arguments that techniques add."""
        parts, has_masters = self.parts, weights_class not in ("", "Weights")
        weights = "weights.stepped" if has_masters else "[p for p in model.parameters() if p.requires_grad]"
        if parts.optimizer == "none":
            written = "".join(f", {argument}={value}" for argument, value in added.items())
            self._script.add(f"optimizer = torch.optim.AdamW({weights}, lr=0.0001{written})")
            return
        given = self._part("optimizer")
        if parts.lightning is not None and "optimizer" not in parts.names:
            given = f"configured{parts.lightning.optimizer_at}"
        lines = [f"optimizer = {given}{f'({weights})' if parts.optimizer == 'function' else ''}"]
        if has_masters and parts.optimizer == "instance":
            lines.append("weights.adopt(optimizer)")
        if added:
            kernels = {"fused": False, "foreach": False} if {"fused", "foreach"} & {*added} else {}
            settings = ", ".join(f"{argument}={value}" for argument, value in (kernels | dict(added)).items())
            lines += [
                "for settings in (optimizer.defaults, *optimizer.param_groups):  # or pass these where you make it",
                f"    settings.update({settings})",
            ]
        self._script.add(*lines)

    def write_scheduler(self) -> None:
        """Write the lines that make the user's scheduler, and `step_scheduler()`; none if there is none."""
        if not self.steps_scheduler:
            return
        made = self._part("scheduler") + ("(optimizer)" if self.parts.scheduler == "function" else "")
        if self.parts.lightning is not None and "scheduler" not in self.parts.names:
            (at, *others) = self.parts.lightning.schedulers_at
            if others:
                raise UsageError(f"No script can be emitted of {self.model.name}: it has several schedulers.")
            made = f"configured{at}"
        step = "scheduler.step"
        if self.parts.has_total_steps:
            step = f"{self._script.copy('castwise.trial.user_model.loop:step_of')}(scheduler)"
        if step_config_of(self.spec.techniques).reads_rates_on_device:
            step = f"{self._script.copy(f'{_RATES}:DeviceLearningRates')}(optimizer, DEVICE, {step})"
        if is_dynamic(self.spec.loss_scale):  # not after a step that was skipped
            step = f"{self._script.copy(f'{_RATES}:AfterStep')}(scaling, {step})"
        self._script.add(f"scheduler = {made}", f"step_scheduler = {step}")

    def write_loss(self) -> None:
        """Write the lines that define `compute_loss(model, batch)`, whose loss is float32."""
        parts, script, precision = self.parts, self._script, find_precision(self.spec.precision)
        in_float32 = ".float()" if precision.is_16_bit else ""
        if parts.lightning is not None:
            batch = "batch"
            if precision.param_dtype != "float32":
                cast = script.copy(f"{_PRECISION}:cast_floating")
                batch = f"{cast}(batch, torch.{precision.param_dtype})"
            lines = [
                f"    loss = model.training_step({batch}, 0)",
                f'    return (loss["loss"] if isinstance(loss, dict) else loss){in_float32}',
            ]
        elif "training_step" in parts.names:
            script.add('training_step = parts["training_step"]')
            lines = [f"    return training_step(model, batch){in_float32}"]
        elif "loss" not in parts.names:
            call = f"model({_INPUTS[parts.batch_form]})"
            lines = [f"    return {call}.loss{in_float32}"]
            if not parts.is_of_transformers:
                loss_of_output = script.copy("castwise.trial.user_model.loop:loss_of_output")
                lines = [f'    return {loss_of_output}({call}, "{self.model.name}")[0]']
        else:
            if parts.form == "dict" or parts.has_loss_module:
                script.add(f"loss_fn = {self._part('loss')}{'.to(DEVICE)' if parts.has_loss_module else ''}")
            if parts.batch_form == "tuple":
                lines = ["    *inputs, target = batch", f"    return loss_fn(model(*inputs), target){in_float32}"]
            else:
                target = ", batch" if parts.batch_form == "dict" else ""
                lines = [f"    return loss_fn(model({_INPUTS[parts.batch_form]}){target}){in_float32}"]
        script.define("def compute_loss(model, batch):", *lines)

    def write_batches(self) -> None:
        """Write the lines that define `batches`, of an example only one."""
        spec, parts, script = self.spec, self.parts, self._script
        count = find_workload(spec.workload).resident_batches
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
                script.define(_RESIZED.format(size=size, example_size=parts.example_size))
                made = f"tree_map_tensors(resized, {made})"
        made = f"to_device({made})"
        if parts.accumulate > 1:
            made = f"[{made} for _ in range({parts.accumulate})]"
        about = "# The example batch that was measured stands in for your data."
        if parts.batch == "function":
            about = "# Batches of your function stand in for your data."
        listed = f"[{made} for _ in range({count})]" if count > 1 else f"[{made}]"
        script.add(about, f"torch.manual_seed({spec.seed})", f"batches = {listed}")
