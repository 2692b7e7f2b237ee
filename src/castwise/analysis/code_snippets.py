"""What to paste: `castwise.apply` for a trial's loop, and what to set in the frameworks around it."""

import ast
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
from castwise.registry.techniques import compiles, join, rows_of
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import is_object

_AUTOCAST, _SCALER = "autocast ", "GradScaler"  # of what a script does itself
# The switches of float32 products, PyTorch's defaults, and what a precision sets them to: whether they use TF32.
_SWITCHES = {"cuda.matmul": "torch.backends.cuda.matmul.allow_tf32", "cudnn.conv": "torch.backends.cudnn.allow_tf32"}
_TF32: dict[Literal["ieee", "tf32"] | None, tuple[bool, bool]] = {
    None: (False, True),
    "ieee": (False, False),
    "tf32": (True, True),
}


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


def loop_code(
    row: Precision, spec: TrialSpec | None = None, facts: Facts | None = None, gains: Sequence[str] = ()
) -> list[str]:
    """Return what to write in a loop in Python to have what a trial had: `castwise.apply`, and what it leaves.

    A precision that is a switch or two needs no more than these; one that is a few lines comes with them, too.

    Args:
        row: The precision that is switched on.
        spec: The trial's, with its device and techniques; without one it is the plain loop on a GPU.
        facts: The clipping and accumulation of the trial, and what is known of the loop.
        gains: What the changes bought.
    """
    device_type, techniques = ("cuda", ()) if spec is None else (spec.device_type, spec.techniques)
    plain = row.code.format(device=device_type).splitlines()
    if device_type == "cpu":
        plain = [line for line in plain if "allow_tf32" not in line]  # which does nothing there
    bought = [f"# {', '.join(gains)}"] if gains else []
    calls = {} if spec is None else own_calls(spec, facts)
    is_switch = row.autocast_dtype is None and row.param_dtype == "float32"
    if (is_switch and not techniques) or row.name == AS_WRITTEN or (facts is not None and facts.framework):
        return [*(plain if is_switch else []), *bought, *_technique_lines(techniques, facts, calls)]
    rows = rows_of(techniques)
    applied = [each.name for each in rows if not each.unfit_settings("apply")]
    if row.float8_recipe and not compiles(applied):
        applied.append("compile")  # without which it is several times slower
    added = f', techniques="{join(applied)}"' if applied else ""
    clip, accumulate = (None, 1) if facts is None else (facts.clip_grad_norm, facts.accumulate)
    lines = [
        "import castwise",
        f'applied = castwise.apply(model, optimizer, precision="{row.name}"{added})  # once, before the loop',
        *bought,
        "with applied.autocast():  # each step",
        f"    loss = loss_fn(model(x), y){f' / {accumulate}' if accumulate > 1 else ''}",
        "applied.backward(loss)",
        f"applied.step({'' if clip is None else f'clip_grad_norm={clip:g}'})",
    ]
    lines[-1] += f"  # after every {accumulate} batches" if accumulate > 1 else ""
    if plain and not techniques and clip is None and accumulate == 1:
        lines += ["# or, without castwise:", *plain]
    lines += _technique_lines([name for name in techniques if name not in applied], facts, calls)
    comments = [each.code.step for each in rows if each.name in applied and each.code is not None]
    lines += [comment for comment in comments if comment.startswith("#")]
    needed = [each.name for each in rows if each.code is None and each.name not in applied]
    if needed and spec is not None:
        # A script needs a function that it can call.
        workload = "FILE.py:FUNCTION" if is_object(spec.workload) else spec.workload
        lines.append(f"# castwise tune {workload} --emit train.py writes this loop, with {', '.join(needed)}")
    return lines


def _technique_lines(techniques: Sequence[str], facts: Facts | None, calls: Mapping[str, str]) -> list[str]:
    """Return the lines and arguments of techniques that are no more than that, for a loop of plain PyTorch."""
    codes = [each.code for each in rows_of(techniques) if each.code is not None]
    lines = [code.model for code in codes if code.model]
    for made, usual in (("optimizer", f"your {_optimizer(facts) or 'optimizer'}"), ("loader", "your DataLoader")):
        arguments = ", ".join(filter(None, (getattr(code, made) for code in codes)))
        if arguments:
            lines.append(f"# add {arguments} to {calls.get(made, usual)}")
    return [*lines, *(code.step for code in codes if code.step)]


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
        begins_scaling = now.loss_scale == "none" != row.loss_scale
        if before and after and not (begins_scaling or row.master_weights):
            lines = [f"# the autocast{at(_AUTOCAST + before)}: dtype=torch.{after}"]
        elif before:
            lines = [f"# remove the autocast{at(_AUTOCAST + before)}"]
        if now.loss_scale != "none" and (row.loss_scale == "none" or row.master_weights):
            lines.append(f"# remove the GradScaler{at(_SCALER)}")
        if row.master_weights or (after and (begins_scaling or not before)):
            lines += loop_code(row, spec.model_copy(update={"techniques": ()}), facts)
    return "\n".join([*lines, *_technique_lines(spec.techniques, facts, own_calls(spec, facts))])


def loop_patch(row: Precision, spec: TrialSpec, facts: Facts | None, gains: Mapping[str, str]) -> str:
    """Return what to change in a loop, in at most fifteen lines: `castwise.apply` first, then the frameworks' lines.

    Args:
        row: The precision that is switched on.
        spec: The loop, with its device and techniques.
        facts: The clipping and accumulation of the trial.
        gains: What a precision or a technique bought, by its name.
    """
    bought = list(dict.fromkeys(gains[name] for name in (row.name, *spec.techniques) if name in gains))
    lines = loop_code(row, spec, facts, bought)
    snippets = framework_snippets(row, spec.device_type, facts, spec.techniques) if row.name != AS_WRITTEN else ()
    return "\n".join([*lines, *framework_lines(snippets)])


def framework_lines(snippets: Sequence[Snippet]) -> list[str]:
    """Return a comment for each framework with what to set there, and one for those that have no such precision."""
    lines = [f"# {snippet.framework}: {snippet.code}" for snippet in snippets if snippet.code]
    lacking = [snippet.framework for snippet in snippets if not snippet.code]
    return lines + ([f"# {', '.join(lacking)}: no such precision"] if lacking else [])


def _optimizer(facts: Facts | None) -> str:
    """Return the class of a trial's optimizer; empty if it is not known."""
    return "" if facts is None else facts.optimizer.partition("(")[0]
