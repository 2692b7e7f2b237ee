"""What follows backward: masters, loss scaling, clipping and the optimizer's step, as a script has them."""

from castwise.errors import UsageError
from castwise.registry.precisions import Precision
from castwise.registry.techniques import StepConfig
from castwise.registry.workloads import find_workload
from castwise.render.emit.builder import ScriptBuilder
from castwise.spec.loss_scale import DYNAMIC_SCALES, is_dynamic
from castwise.spec.trial import TrialSpec

# Optimizers of torch that can count their steps on the device.
_CAPTURABLE = ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")

_MASTERS = """\
# The optimizer steps float32 copies of the 16-bit weights.
weights = [p for p in model.parameters() if p.requires_grad]
low = [p for p in weights if p.dtype != torch.float32]
masters = [p.detach().clone().float().requires_grad_() for p in low]
master_of = dict(zip(low, masters))
stepped = [master_of.get(p, p) for p in weights]"""

_MASTER_GRADIENTS = """\
for master in masters:
    master.grad = torch.zeros_like(master)"""

# A weight that took no part in the step must not be decayed or moved by its momentum.
_COLLECT = """\
gradients = [torch.zeros_like(master) for master in masters]


def collect_gradients():
    for master, gradient, weight in zip(masters, gradients, low):
        master.grad = None if weight.grad is None else gradient
    pairs = [(master.grad, weight.grad) for master, weight in zip(masters, low) if weight.grad is not None]
    torch._foreach_copy_(*(list(each) for each in zip(*pairs)))"""

_HALF_SCALER = """\
class HalfGradScaler(torch.amp.GradScaler):  # torch's own refuses float16 gradients
    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)"""

# A skipped first step would leave it as it is in memory.
_MOMENTUM = """\
for tensor in stepped:  # a first step that is skipped would leave it unset
    optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)"""

_DEVICE_SCALE = """\
# The loss scale lives on the device, as in GradScaler, and so does the decision whether a step is skipped.
scale, good_steps = torch.full((), {init!r}, device=DEVICE), torch.zeros((), dtype=torch.int32, device=DEVICE)
overflowed = torch.zeros((), device=DEVICE)"""

_SCALED_STEP = """\
@torch.no_grad()
def scaled_step():
    overflowed.zero_()
    gradients = [tensor.grad for tensor in stepped if tensor.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflowed, scale.double().reciprocal().float())"""

_GUARDED = """\
    before = [(tensor, tensor.clone()) for tensor in touched()]
    optimizer.step()
    for tensor, old in before:
        torch.where(overflowed > 0, old, tensor, out=tensor)
    kept = {id(tensor) for tensor, _ in before}
    for tensor in touched():
        if id(tensor) not in kept:  # a state that this step made, from zeros
            tensor.masked_fill_(overflowed > 0, 0)"""

_TOUCHED = """\
def touched():
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*stepped, *(value for value in states if isinstance(value, torch.Tensor))]"""

_FUSED = "    optimizer.step()  # it reads optimizer.found_inf"

# By optimizer: its function over lists of tensors, its states, the call's lists of states, and the settings of a group.
# Source: torch.optim.
_ADAM_SETTINGS = ("lr", "weight_decay", "eps", "maximize", "amsgrad")
_FUNCTIONS = {
    "SGD": (
        "sgd",
        ("momentum_buffer",),
        "states[0]",
        ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize"),
    ),
    "Adam": (
        "adam",
        ("exp_avg", "exp_avg_sq", "step"),
        "states[0], states[1], [], states[2]",
        (*_ADAM_SETTINGS, "decoupled_weight_decay"),
    ),
    "AdamW": ("adamw", ("exp_avg", "exp_avg_sq", "step"), "states[0], states[1], [], states[2]", _ADAM_SETTINGS),
    "Adadelta": (
        "adadelta",
        ("square_avg", "acc_delta", "step"),
        "*states",
        ("lr", "rho", "weight_decay", "eps", "maximize"),
    ),
}
# Settings that no template has.
_NOT_WRITTEN = {"dampening", "amsgrad", "differentiable"}

_NORMS = """\
def norms(gradients, order):
    dtypes = dict.fromkeys(gradient.dtype for gradient in gradients)
    lists = [[gradient for gradient in gradients if gradient.dtype == dtype] for dtype in dtypes]
    return torch.stack([norm for each in lists for norm in torch._foreach_norm(each, order, dtype=torch.float32)])"""


_RESTORE = (
    "for tensor, old in before:  # of a step that is skipped",
    "    tensor.copy_(torch.where(overflowed > 0, old, tensor))",
)
_ROUND = (
    "for weight, tensor in zip(rounded, tensors):",
    "    if weight is not None:",
    "        weight.copy_(tensor)",
)


class Update:
    """The update of one loop: the lines before the step that it needs, and its lines in the step."""

    def __init__(
        self, spec: TrialSpec, config: StepConfig, precision: Precision, clip: float | None, *, is_own: bool
    ) -> None:
        self.unit = find_workload(spec.workload).unit
        self.config, self.precision, self.clip, self.is_own = config, precision, clip, is_own
        self.device_type, self.scale_name = spec.device_type, spec.loss_scale
        self.is_fused = ("fused", True) in config.optimizer_arguments
        self.is_dynamic = is_dynamic(spec.loss_scale)
        self.row = next((row for row in DYNAMIC_SCALES if row.name == spec.loss_scale), None)
        # torch's GradScaler hands its flag to a fused optimizer; a graph has to have the scale on the device itself.
        on_device = self.is_dynamic and config.scales_on_device and (not self.is_fused or config.cuda_graph)
        self.scales_on_device = on_device or (self.is_dynamic and config.compiled_update)
        self.has_scaler = self.is_dynamic and not self.scales_on_device

    @property
    def stepped(self) -> str:
        """Return the tensors that the optimizer steps, as a script writes them."""
        return "stepped" if self.lists_stepped else "model.parameters()"

    @property
    def lists_stepped(self) -> bool:
        """Return whether a script has a list `stepped` of what the optimizer steps."""
        return (
            self.precision.master_weights
            or self.scales_on_device
            or self.config.compiled_update
            or (self.is_own and (self.clip is not None or self.scale_name != "none"))
        )

    def optimizer_arguments(self, name: str) -> dict[str, bool]:
        """Return the arguments that techniques add to an optimizer of this class."""
        arguments = dict(self.config.optimizer_arguments)
        counts = self.config.cuda_graph or self.config.compiled_update or self.scales_on_device
        if counts and self.device_type == "cuda" and name in _CAPTURABLE:
            arguments["capturable"] = True
        return arguments

    def write_weights(self, script: ScriptBuilder) -> None:
        """Write the lines before the optimizer: what it steps."""
        if self.precision.master_weights:
            script.add(_MASTERS)
            if not self.config.compiled_update:
                script.define(_COLLECT) if self.is_own else script.add(_MASTER_GRADIENTS, spacing="\n")
        elif self.lists_stepped and not self.is_own:
            script.add("stepped = [p for p in model.parameters() if p.requires_grad]")

    def write(self, script: ScriptBuilder, optimizer: str, has_momentum: bool, settings: tuple[str, ...] = ()) -> None:
        """Write the lines after an optimizer of this class: loss scaling, and what is compiled.

        Raises:
            UsageError: There are no lines for the optimizer.
        """
        skips_on_device = self.scales_on_device or (self.is_fused and self.is_dynamic)
        if has_momentum and skips_on_device and not self.config.compiled_update:
            script.add(_MOMENTUM.replace("stepped", self.stepped), spacing="\n")
        if self.has_scaler:
            kind = "torch.amp.GradScaler"
            if self.precision.param_dtype == "float16" and not self.precision.master_weights:
                kind = "HalfGradScaler"
                script.define(_HALF_SCALER, moved_name="HalfGradScaler")
            script.add(f"scaler = {kind}(DEVICE.type)", spacing="\n")
        if self.scales_on_device:
            assert self.row is not None, "it is a dynamic scale"
            script.add(_DEVICE_SCALE.format(init=self.row.init))
        if self.config.compiled_update:
            self._write_compiled(script, optimizer, has_momentum, settings)
        elif self.scales_on_device:
            assert self.row is not None, "it is a dynamic scale"
            if self.is_fused:
                script.add("optimizer.found_inf, optimizer.grad_scale = overflowed, None", spacing="\n")
            else:
                script.define(_TOUCHED)
            clip = [f"    torch.nn.utils.clip_grad_norm_(stepped, {self.clip:g})"] if self.clip is not None else []
            moves = [f"    {line}" for line in self._scale_moves]
            script.define(_SCALED_STEP, *clip, _FUSED if self.is_fused else _GUARDED, *moves)

    def _write_compiled(
        self, script: ScriptBuilder, optimizer: str, has_momentum: bool, settings: tuple[str, ...]
    ) -> None:
        """Write `update()`, which reads and writes each gradient, weight and state once, in one compiled function."""
        unwritten = sorted(_NOT_WRITTEN & {*settings})
        if optimizer not in _FUNCTIONS or unwritten:
            what = f"{optimizer} with {unwritten[0]}" if unwritten else optimizer or "an optimizer that is not known"
            raise UsageError(f"No script can be emitted of compiled-update with {what}. Leave the technique out.")
        function, names, lists, chosen = _FUNCTIONS[optimizer]
        has_states = optimizer != "SGD" or has_momentum
        masters, scaled, clipped = self.precision.master_weights, self.scale_name != "none", self.clip is not None
        counted = ", capturable=True" if "step" in names else ""
        if has_states:
            zeros = _listed(tuple(name for name in names if name != "step"))
            script.add(
                "for tensor in stepped:",
                f"    optimizer.state[tensor] = {{name: torch.zeros_like(tensor) for name in {zeros}}}",
                *(['    optimizer.state[tensor]["step"] = torch.zeros((), device=DEVICE)'] if counted else []),
            )
        one_dtype = not self.is_own and (not masters or self.unit != "images")
        if (clipped or self.is_dynamic) and not one_dtype:
            script.define(_NORMS, moved_name="norms")
        factors = [*(["inverse"] if scaled else []), *(["factor"] if clipped else [])]
        flag = ["overflowed"] if self.is_dynamic else []
        given = ["gradients", "tensors", "states", "settings", *(["rounded"] if masters else [])]
        touched = "(*tensors, *(state for each in states for state in each))" if has_states else "tensors"
        body = [
            "gradients = [gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, tensors)]",
            *(f"gradients = list(torch._foreach_mul(gradients, {name}))" for name in factors),
            *([f"before = [(tensor, tensor.clone()) for tensor in {touched}]"] if flag else []),
            f"{function}(tensors, gradients, {lists}, foreach=True{counted}, **settings)",
            *(_RESTORE if flag else ()),
            *(_ROUND if masters else ()),
        ]
        if self.is_own:  # whose optimizer may have groups, and weights that take no part in a step
            body = [f"for {', '.join(given)} in groups:", *(f"    {line}" for line in body)]
        taken = ["groups"] if self.is_own else given
        script.define(
            f"from torch.optim.{function} import {function}",
            "@torch.compile(dynamic=False, fullgraph=True)",
            f"def compiled_step({', '.join([*taken, *factors, *flag])}):",
            *(f"    {line}" for line in body),
            moved_name="compiled_step",
        )
        states = f"[[optimizer.state[tensor][name] for tensor in tensors] for name in {_listed(names)}]"
        states = states if has_states else "[[None] * len(tensors)]"
        made_settings = [
            "settings = {name: group[name] for name in SETTINGS if name in group}",
            *(['settings["beta1"], settings["beta2"] = group["betas"]'] if "exp_avg" in names else []),
        ]
        script.add(f"SETTINGS = {_listed(chosen)}")
        if self.is_own:
            weight = "weight_of.get(tensor, tensor)" if masters else "tensor"
            script.add(*(["weight_of = dict(zip(masters, low))"] if masters else []), spacing="\n")
            rounded = ["[weight_of.get(tensor) for tensor in tensors]"] if masters else []
            body = [
                "groups = []",
                "for group in optimizer.param_groups:",
                f'    tensors = [tensor for tensor in group["params"] if {weight}.grad is not None]',
                f"    gradients = [{weight}.grad for tensor in tensors]",
                f"    states = {states}",
                *(f"    {line}" for line in made_settings),
                f"    groups.append(({', '.join([*given[:4], *rounded])}))",
            ]
            body += ["gradients = [each for group in groups for each in group[0]]"] if clipped or flag else []
        else:
            script.add(f"states = {states.replace('tensors', 'stepped')}", spacing="\n")
            if masters:
                script.add("rounded = [p if p in master_of else None for p in weights]", spacing="\n")
            taken = ["gradients", "stepped", *given[2:]]
            body = [
                f"gradients = [p.grad for p in {'weights' if masters else 'stepped'}]",
                "(group,) = optimizer.param_groups",
                *made_settings,
            ]
        norms = (
            "torch.stack(torch._foreach_norm(gradients, {}, dtype=torch.float32))"
            if one_dtype
            else "norms(gradients, {})"
        )
        if scaled:
            inverse = "scale.double().reciprocal().float()" if flag else 1 / float(self.scale_name)
            body.append(f"inverse = {inverse}")
        if flag:
            body.append(f"overflowed.copy_(~{norms.format('torch.inf')}.isfinite().all())")
        if clipped:
            body += [
                f"norm = torch.linalg.vector_norm({norms.format(2)}){' * inverse' if scaled else ''}",
                f"factor = torch.clamp({self.clip:g} / (norm + 1e-6), max=1.0)",
            ]
        body.append(f"compiled_step({', '.join([*taken, *factors, *flag])})")
        body += self._scale_moves if flag else []
        script.define("@torch.no_grad()", "def update():", *(f"    {line}" for line in body))

    @property
    def _scale_moves(self) -> list[str]:
        """Return the lines that move the loss scale on the device."""
        assert self.row is not None, "it is a dynamic scale"
        factors = f"{self.row.factor!r}, {1 / self.row.factor!r}, {self.row.window}"
        bound = [] if self.row.maximum is None else [f"scale.clamp_(max={self.row.maximum!r})"]
        return [f"torch._amp_update_scale_(scale, good_steps, overflowed, {factors})", *bound]

    @property
    def zero_grad_line(self) -> str:
        """Return what drops the gradients of the step before."""
        return "model.zero_grad()" if self.precision.master_weights else "optimizer.zero_grad()"

    @property
    def backward_line(self) -> str:
        """Return the backward pass, of the scaled loss if it is scaled."""
        if self.has_scaler:
            return "scaler.scale(loss).backward()"
        if self.scale_name == "none":
            return "loss.backward()"
        return f"(loss * {'scale' if self.is_dynamic else float(self.scale_name)!s}).backward()"

    @property
    def lines(self) -> list[str]:
        """Return what follows backward."""
        if self.config.compiled_update:
            return ["update()"]
        clip = [] if self.clip is None else [f"torch.nn.utils.clip_grad_norm_({self.stepped}, {self.clip:g})"]
        if self.scales_on_device:
            lines = ["scaled_step()"]
        elif self.has_scaler:
            lines = ["scaler.unscale_(optimizer)", *clip] if clip else []
            lines += ["scaler.step(optimizer)", "scaler.update()"]
            if self.row is not None and self.row.maximum is not None:
                lines.append(f"scaler._scale.clamp_(max={self.row.maximum!r})")
        else:
            scaled = f"torch._foreach_mul_([p.grad for p in {self.stepped} if p.grad is not None], {{}})"
            unscale = [] if self.scale_name == "none" else [scaled.format(1 / float(self.scale_name))]
            lines = [*unscale, *clip, "optimizer.step()"]
        if not self.precision.master_weights:
            return lines
        copied = "torch._foreach_copy_([master.grad for master in masters], [p.grad for p in low])"
        collect = "collect_gradients()" if self.is_own else copied
        return [collect, *lines, "with torch.no_grad():", "    torch._foreach_copy_(low, masters)"]

    @property
    def saved(self) -> str:
        """Return what is saved of a trained model."""
        return (
            '{"model": model.state_dict(), "masters": masters}'
            if self.precision.master_weights
            else "model.state_dict()"
        )


def _listed(names: tuple[str, ...]) -> str:
    """Return names as Python writes a tuple of them, in double quotes."""
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"({quoted},)" if len(names) == 1 else f"({quoted})"
