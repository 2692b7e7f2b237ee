"""What to paste: the lines of plain PyTorch for a trial's loop, and what to set in the frameworks around it."""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from castwise.records.schema import Facts, Trial
from castwise.registry.precisions import (
    AS_WRITTEN,
    DEFAULT,
    DTYPES,
    Precision,
    find_precision,
    is_same_as_fp32,
    precision_row,
)
from castwise.registry.techniques import TECHNIQUES, rows_of
from castwise.spec.trial import TrialSpec

_MOST_LINES = 15  # of a patch in plain PyTorch
_BATCH_NORM_LOOP = re.compile(r"for module in .*\n    if .*_BatchNorm\):\n        module.float\(\)\n")
_AUTOCAST, _SCALER = "autocast ", "GradScaler"  # of what a script does itself
# The switches of float32 products, PyTorch's defaults, and what a precision sets them to: whether they use TF32.
_SWITCHES = {"cuda.matmul": "torch.backends.cuda.matmul.allow_tf32", "cudnn.conv": "torch.backends.cudnn.allow_tf32"}
_TF32: dict[Literal["ieee", "tf32"] | None, tuple[bool, bool]] = {
    None: (False, True),
    "ieee": (False, False),
    "tf32": (True, True),
}
_CAST_INPUT = re.compile(r"model\(x\.\w+\([\w.]*\)\)")


@dataclass(frozen=True)
class Snippet:
    """One line of a framework that does what a precision does."""

    framework: str
    code: str  # empty if the framework has no such mode


def framework_snippets(
    row: Precision, device_type: str, facts: Facts | None = None, techniques: Sequence[str] = ()
) -> tuple[Snippet, ...]:
    """Return a line for Lightning, Accelerate and transformers each, with the trial's clipping and accumulation.

    The frameworks use a GPU by default, so a CPU has to be named: TrainingArguments refuse bf16 there otherwise.
    """
    names = row.frameworks
    on_cpu = device_type == "cpu"
    clip = facts.clip_grad_norm if facts is not None else None
    accumulate = facts.accumulate if facts is not None and facts.accumulate > 1 else None
    codes = [each.code for each in rows_of(techniques) if each.code is not None]
    lightning = accelerate = transformers = ""
    if names.lightning is not None and (names.lightning_on_cpu or not on_cpu):
        lightning = _call(
            names.setting,
            "Trainer",
            'accelerator="cpu"' if on_cpu else "",
            f'precision="{names.lightning}"',
            "" if clip is None else f"gradient_clip_val={clip:g}",
            f"accumulate_grad_batches={accumulate}" if accumulate else "",
            *(code.lightning for code in codes),
        )
        # Source: lightning.pytorch.plugins.precision.amp (`clip_gradients` refuses optimizers that unscale themselves).
        if (
            clip is not None
            and row.autocast_dtype is not None
            and any(code.optimizer == "fused=True" for code in codes)
        ):
            lightning += "  # without fused=True: with it, Lightning cannot clip here"
    if names.accelerate is not None:
        accelerate = _call(
            names.setting or names.cast,
            "accelerator = Accelerator",
            "cpu=True" if on_cpu else "",
            f'mixed_precision="{names.accelerate}"',
            f"gradient_accumulation_steps={accumulate}" if accumulate else "",
            *(code.accelerate for code in codes),
        )
        if clip is not None:
            accelerate += f"  # after backward: accelerator.clip_grad_norm_(model.parameters(), {clip:g})"
    if names.transformers is not None:
        transformers = _call(
            names.cast,
            "TrainingArguments",
            "use_cpu=True" if on_cpu else "",
            names.transformers,
            # Without it transformers clips to 1: whoever does not clip has said so already.
            "" if clip is None else f"max_grad_norm={clip:g}",
            f"gradient_accumulation_steps={accumulate}" if accumulate else "",
            *(code.transformers for code in codes if not code.optimizer or _optimizer(facts) == "AdamW"),
        )
    lines = {"Lightning": lightning, "Accelerate": accelerate, "transformers": transformers}
    own = None if facts is None else facts.framework  # of a script
    return tuple(Snippet(framework, line) for framework, line in lines.items() if own in (None, framework))


def _call(first: str, function: str, *arguments: str) -> str:
    """Return a line that calls a function with the arguments that are not empty, after another statement if any."""
    call = f"{function}({', '.join(filter(None, arguments))})"
    return f"{first}; {call}" if first else call


def find_calls(file: Path, name: str) -> str:
    """Return where a file of Python calls a function or class: `train.py:12 and 30`; empty if it does not."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, ValueError, SyntaxError):
        return ""
    called = [(node.lineno, node.func) for node in nodes if isinstance(node, ast.Call)]
    lines = {line for line, function in called if name in (getattr(function, "attr", ""), getattr(function, "id", ""))}
    return f"{file.name}:{' and '.join(map(str, sorted(lines)))}" if lines else ""


def own_calls(spec: TrialSpec, facts: Facts | None) -> dict[str, str]:
    """Return in words the user's own calls that make the optimizer and the loader: they have arguments to keep.

    Their lines are named if the spec names the folder of the user's file, as records do not.
    """
    if spec.user_model is None:
        return {}
    file, found = Path(spec.user_model.path), dict[str, str]()
    for made, name in (("optimizer", _optimizer(facts)), ("loader", "DataLoader")):
        at = find_calls(file, name) if name and file.is_absolute() else ""
        if at or spec.is_script:
            found[made] = f"your call of {name or 'torch.optim'}{at and f' at {at}'}"
    return found


def pytorch_code(
    row: Precision,
    device_type: str,
    facts: Facts | None = None,
    techniques: Sequence[str] = (),
    calls: Mapping[str, str] | None = None,
) -> str:
    """Return the lines of plain PyTorch that do what a trial did: its techniques, clipping and accumulation.

    Gradients are unscaled before they are clipped. Unscaling, clipping, stepping and the scale's update come once for
    each optimizer step, after the backward pass of its last batch. `calls` are the user's, by `own_calls`.
    """
    if techniques:
        places = _places(row, device_type, facts, techniques, _optimizer(facts), calls or {})
        return "\n".join(line for lines in places.values() for line, _ in lines)
    lines = _fitting(row.code.replace("{device!r}", f'"{device_type}"'), facts).splitlines()
    lines = [line for line in lines if device_type != "cpu" or "allow_tf32" not in line]  # which does nothing there
    if facts is None or not any(".backward()" in line for line in lines):
        return "\n".join(lines)
    if facts.accumulate > 1:  # forward and backward become a loop over the batches of one step; the loss is their mean
        last = next(index for index, line in enumerate(lines) if ".backward()" in line)
        first = next(index for index, line in enumerate(lines) if line.startswith(("with torch.autocast", "loss =")))
        head = f"for x, y in batches:  # {facts.accumulate} for one optimizer step"
        body = []
        for line in lines[first : last + 1]:
            code, comment, rest = line.partition("  #")
            if code.lstrip().startswith("loss = "):
                code += f" / {facts.accumulate}"
            body.append(f"    {code}{comment}{rest}")
        lines = [*lines[:first], head, *body, *lines[last + 1 :]]
    if facts.clip_grad_norm is not None:
        step = next(i for i, line in enumerate(lines) if line.endswith((".step(optimizer)", "optimizer.step()")))
        tensors = "masters" if any(line.startswith("masters =") for line in lines) else "model.parameters()"
        clipping = [f"torch.nn.utils.clip_grad_norm_({tensors}, {facts.clip_grad_norm:g})"]
        if "scaler" in lines[step]:
            clipping.insert(0, "scaler.unscale_(optimizer)")
        lines = [*lines[:step], *clipping, *lines[step:]]
    return "\n".join(lines)


def precision_of(trial: Trial) -> Precision:
    """Return the row of a trial's precision; of a script as it is written, with what that does itself."""
    row, facts = precision_row(trial.spec.precision), trial.facts
    if row.name != AS_WRITTEN or facts is None:
        return row
    casts = {kind.removeprefix(_AUTOCAST) for kind in facts.own_precision if kind.startswith(_AUTOCAST)}
    tf32 = tuple(facts.fp32_precision.get(name) == "tf32" for name in _SWITCHES)
    most = max(facts.param_dtypes, key=facts.param_dtypes.__getitem__, default="")
    return replace(
        row,
        autocast_dtype=next((dtype for dtype in DTYPES if dtype in casts), None),
        param_dtype=next((dtype for dtype in DTYPES if dtype == most), row.param_dtype),
        float32_matmul=next((products for products, uses in _TF32.items() if uses == tf32), None),
        loss_scale="dynamic" if _SCALER in facts.own_precision else "none",
    )


def script_code(written: Trial, taken: Trial) -> str:
    """Return what to change in a script: how what it does as it is written differs from a trial, and its techniques.

    Args:
        written: The script as it is written; its facts say what it does itself.
        taken: The script with another precision, with techniques, or both.
    """
    spec, facts, now = taken.spec, taken.facts, precision_of(written)
    row, device_type, hardware = precision_row(spec.precision), spec.device_type, written.environment.hardware
    row = now if row.name == AS_WRITTEN else row
    own, framework = (written.facts.own_precision, written.facts.framework) if written.facts is not None else ({}, "")

    def at(kind: str) -> str:
        return f" at {' and '.join(own[kind])}" if own.get(kind) else ""

    before, after = now.autocast_dtype, row.autocast_dtype
    code = pytorch_code(row, device_type, facts).splitlines()
    lines: list[str] = []
    if (before, row.master_weights) == (after, False):
        if after is None and not is_same_as_fp32(
            find_precision(DEFAULT), hardware
        ):  # else there is one kind of product
            switches = zip(_SWITCHES.values(), _TF32[now.float32_matmul], _TF32[row.float32_matmul], strict=True)
            lines = [f"{switch} = {wanted}" for switch, present, wanted in switches if present != wanted]
    elif framework:
        (snippet,) = framework_snippets(row, device_type, written.facts)
        lines = [f"{snippet.code}  # {framework}" if snippet.code else f"# {framework}: no such precision"]
    else:
        if before and after:
            lines = [f"# the autocast{at(_AUTOCAST + before)}: dtype=torch.{after}"]
            code = [line for line in code if "scaler" in line and now.loss_scale == "none"]
        elif before:
            lines = [f"# remove the autocast{at(_AUTOCAST + before)}"]
        if now.loss_scale != row.loss_scale == "none":
            lines.append(f"# remove the GradScaler{at(_SCALER)}")
        lines += code if after or row.master_weights else []
    plain, techniques = replace(row, code=""), spec.techniques
    added = pytorch_code(plain, device_type, facts, techniques, own_calls(spec, facts)) if techniques else ""
    return "\n".join(filter(None, [*lines, added]))


def _fitting(code: str, facts: Facts | None) -> str:
    """Return a precision's lines for a model of which is known what it has: batch norm, tokens, an optimizer."""
    layers = None if facts is None else facts.layers
    if layers is not None and "batch norm" not in layers:
        code = _BATCH_NORM_LOOP.sub("", code)
    if layers is not None and "embedding" in layers:  # tokens stay integers
        code = _CAST_INPUT.sub("model(x)", code)
    kind = _optimizer(facts)
    is_torchs = any(kind in row.optimizers for row in TECHNIQUES)
    return code.replace("torch.optim.SGD(", f"torch.optim.{kind}(") if is_torchs else code


def loop_patch(row: Precision, spec: TrialSpec, facts: Facts | None, gains: Mapping[str, str], command: str) -> str:
    """Return what to change in a loop of plain PyTorch, in at most fifteen lines, by where it goes; then frameworks.

    Args:
        row: The precision that is switched on.
        spec: The loop, with its device and techniques.
        facts: The clipping and accumulation of the trial.
        gains: What to say of a precision or a technique at its first line, by its name.
        command: Writes the whole loop.
    """
    device_type, techniques, calls = spec.device_type, spec.techniques, own_calls(spec, facts)
    rest = [each.name for each in rows_of(techniques) if each.code is None]
    shorter = replace(row, code=f"# {row.name}: {command}")  # if need be: the loop's own lines are where they are
    for attempt, known in ((row, facts), (row, None), (shorter, None)):
        places = _places(attempt, device_type, known, techniques, _optimizer(facts), calls)
        if sum(len(lines) + 1 for lines in places.values() if lines) + bool(rest) <= _MOST_LINES:
            break
    said: set[str] = set()
    text: list[str] = []
    for place, lines in places.items():
        text += [f"# {place}"] if lines else []
        for line, owner in lines:
            note = gains.get(owner, "") if owner not in said else ""
            said.add(owner)
            joint = "; " if "  # " in line else "  # "
            commented = f"{line} ({note})" if line.startswith("#") else f"{line}{joint}{note}"
            text.append(commented if note else line)
    if rest:
        named = ", ".join(f"{name} ({gains[name]})" if name in gains else name for name in rest)
        text.append(f"# more than some lines, {named}: {command}")
    snippets = framework_snippets(row, device_type, facts, techniques) if row.name != AS_WRITTEN else ()
    text += [f"# {each.framework}: {each.code}" for each in snippets if each.code]
    lacking = [each.framework for each in snippets if not each.code]
    return "\n".join([*text, *([f"# {', '.join(lacking)}: no such precision"] if lacking else [])])


def _places(
    row: Precision,
    device_type: str,
    facts: Facts | None,
    techniques: Sequence[str],
    optimizer_name: str,
    calls: Mapping[str, str],
) -> dict[str, list[tuple[str, str]]]:
    """Return lines with the name of the technique or precision that they belong to, by where they go."""
    codes = [(each.name, each.code) for each in rows_of(techniques) if each.code is not None]
    model: list[tuple[str, str]] = []
    optimizer: list[tuple[str, str]] = []
    lines = pytorch_code(row, device_type, facts).splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith(("with ", "loss =", "for x, y"))), len(lines))
    for line in lines[:first]:
        is_optimizer = line.startswith(("params", "masters", "optimizer", "scaler"))
        (optimizer if is_optimizer else model).append((line, row.name))
    model += [(code.model, name) for name, code in codes if code.model]
    arguments = ", ".join(code.optimizer for _, code in codes if code.optimizer)
    if arguments:
        name = next(name for name, code in codes if code.optimizer)
        at = next((i for i, (line, _) in enumerate(optimizer) if line.startswith("optimizer")), None)
        kind, stepped = optimizer_name or "AdamW", "model.parameters()" if at is None else "masters"
        line = f"optimizer = torch.optim.{kind}({stepped}, lr=lr, {arguments})"
        if "optimizer" in calls:
            weights = "" if at is None else ", and give it masters instead of the model's parameters"
            line = f"# add {arguments} to {calls['optimizer']}{weights}"
        if at is None:
            optimizer.append((line, name))
        else:
            optimizer[at] = (line, name)
    step = [(code.step, name) for name, code in codes if code.step]
    line = f"# add {{}} to {calls['loader']}" if "loader" in calls else "loader = DataLoader(..., {})"
    loader = [(line.format(code.loader), name) for name, code in codes if code.loader]
    return {
        "model": model,
        "data": loader,
        "optimizer": optimizer,
        "step": step + [(x, row.name) for x in lines[first:]],
    }


def _optimizer(facts: Facts | None) -> str:
    """Return the class of a trial's optimizer; empty if it is not known."""
    return "" if facts is None else facts.optimizer.partition("(")[0]
