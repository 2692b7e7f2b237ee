"""What to paste: `castwise.apply` for a trial's loop, and what to set in the frameworks around it."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from castwise.records.schema import Facts, Trial
from castwise.registry.frameworks import ANY_LOOP, FRAMEWORKS, Framework
from castwise.registry.precisions import (
    AS_WRITTEN,
    DEFAULT,
    DTYPES,
    PRECISIONS,
    TRUE_PRECISIONS,
    Precision,
    find_precision,
    is_same_as_fp32,
    precision_row,
)
from castwise.registry.techniques import Code, compiles, join, rows_of
from castwise.spec.quantities import format_share
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import is_object

WITHOUT = "# or, without castwise:"  # the line above the same by PyTorch alone
# What a script does itself.
_AUTOCAST, _SCALER, _WEIGHTS, _FROZEN, _LAYERS = "autocast ", "GradScaler", "weights ", "frozen ", "layers "
_STATE = "state "
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

    For a script it is one for the framework that takes its steps.
    """
    clip, accumulate = _clip_and_accumulation(facts)
    codes = [technique.code for technique in rows_of(techniques) if technique.code is not None]
    names_optimizer = _optimizer(facts) == "AdamW"  # which transformers has an argument for
    own = None if facts is None else facts.framework  # of a script
    snippets = []
    for name in ANY_LOOP if own is None else {own} & FRAMEWORKS.keys():
        framework, named = FRAMEWORKS[name], _named(name, row, device_type, facts)
        if named is None:
            snippets.append(Snippet(name, ""))
            continue
        fitting = [code for code in codes if not code.optimizer or names_optimizer]
        arguments = [
            _others(framework, device_type, is_of_script=own is not None),
            named,
            "" if clip is None else framework.clipping.format(clip),
            framework.accumulation.format(accumulate) if accumulate > 1 else "",
            *(getattr(code, framework.names) for code in fitting if framework.takes_techniques),
        ]
        first = row.frameworks.setting if name != "transformers" else ""
        first = first or (row.frameworks.cast if name in ("Accelerate", "transformers") else "")
        line = framework.call.format(", ".join(filter(None, arguments)))
        comment = _clipping_comment(name, row, clip, codes)
        snippets.append(Snippet(name, f"{first}; {line}{comment}" if first else f"{line}{comment}"))
    return tuple(snippets)


def _others(framework: Framework, device_type: str, *, is_of_script: bool) -> str | None:
    """Return the arguments that have nothing to do with the precision: a script has its own."""
    if is_of_script and framework.call.endswith("({})"):
        return "..."
    return framework.on_cpu if device_type == "cpu" else ""


def _named(name: str, row: Precision, device_type: str, facts: Facts | None) -> str | None:
    """Return the argument that sets a precision in a framework; None if it has no such precision."""
    framework, names = FRAMEWORKS[name], row.frameworks
    found: str | None = getattr(names, framework.names)
    has_none_here = framework.on_cpu is None and row.autocast_dtype is not None
    if framework.names == "lightning" and not names.lightning_on_cpu:
        has_none_here = True
    if found is None or (device_type == "cpu" and has_none_here):
        return None
    if name == "transformers" and facts is not None and row.autocast_dtype is None:
        # Subclasses such as trl's SFTConfig may have it on by default.
        casts = {"float16": "fp16=False", "bfloat16": "bf16=False"}
        off = [argument for dtype, argument in casts.items() if _AUTOCAST + dtype in facts.own_precision]
        return ", ".join(filter(None, [*off, found]))
    return framework.precision.format(found) if found else ""


def _clipping_comment(framework: str, row: Precision, clip: float | None, codes: Sequence[Code]) -> str:
    if framework == "Accelerate" and clip is not None:
        return f"  # after backward: accelerator.clip_grad_norm_(model.parameters(), {clip:g})"
    is_fused = any(code.optimizer == "fused=True" for code in codes)
    # Source: lightning.pytorch.plugins.precision.amp (`clip_gradients` refuses optimizers that unscale themselves).
    if framework == "Lightning" and clip is not None and row.autocast_dtype is not None and is_fused:
        return "  # without fused=True: with it, Lightning cannot clip here"
    return ""


def _clip_and_accumulation(facts: Facts | None) -> tuple[float | None, int]:
    """Return the norm to which gradients are clipped, and the batches of an optimizer step."""
    return (None, 1) if facts is None else (facts.clip_grad_norm, facts.accumulate)


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


def loop_code(row: Precision, spec: TrialSpec, facts: Facts | None = None, gains: Sequence[str] = ()) -> list[str]:
    """Return what to write in a loop in Python to have what a trial had: `castwise.apply`, and what it leaves.

    A precision that is a switch or two needs no more than these; one that is a few lines comes with them, too. `gains`
    are what the changes bought.
    """
    is_switch = row.autocast_dtype is None and row.param_dtype == "float32"
    # The switches do nothing on a CPU.
    plain = [] if is_switch and spec.device_type == "cpu" else row.code.format(device=spec.device_type).splitlines()
    bought = [f"# {', '.join(gains)}"] if gains else []
    if (is_switch and not spec.techniques) or row.name == AS_WRITTEN or (facts is not None and facts.framework):
        return [*(plain if is_switch else []), *bought, *_technique_lines(spec.techniques, spec, facts)]
    applied = [technique.name for technique in rows_of(spec.techniques) if not technique.unfit_settings("apply")]
    lines = _applied_lines(row, applied, bought, facts)
    if plain and not spec.techniques and _clip_and_accumulation(facts) == (None, 1):
        lines += [WITHOUT, *plain]
    return [*lines, *_left_lines(spec, facts)]


def _left_lines(spec: TrialSpec, facts: Facts | None) -> list[str]:
    """Return what castwise.apply leaves of a trial's techniques: lines and arguments, and a loop of its own."""
    rows = rows_of(spec.techniques)
    left = [technique for technique in rows if technique.unfit_settings("apply")]
    lines = _technique_lines([technique.name for technique in left], spec, facts)
    steps = [technique.code.step for technique in rows if technique not in left and technique.code is not None]
    lines += [step for step in steps if step.startswith("#")]
    if needed := [technique.name for technique in left if technique.code is None]:
        # A script needs a function that it can call.
        workload = "FILE.py:FUNCTION" if is_object(spec.workload) else spec.workload
        lines.append(f"# castwise tune {workload} --emit train.py writes this loop, with {', '.join(needed)}")
    return lines


def _applied_lines(row: Precision, techniques: Sequence[str], bought: Sequence[str], facts: Facts | None) -> list[str]:
    if row.float8_recipe and not compiles(techniques):
        techniques = [*techniques, "compile"]  # without which it is several times slower
    added = f', techniques="{join(techniques)}"' if techniques else ""
    clip, accumulate = _clip_and_accumulation(facts)
    divided, after = (f" / {accumulate}", f"  # after every {accumulate} batches") if accumulate > 1 else ("", "")
    return [
        "import castwise",
        f'applied = castwise.apply(model, optimizer, precision="{row.name}"{added})  # once, before the loop',
        *bought,
        "with applied.autocast():  # each step",
        f"    loss = loss_fn(model(x), y){divided}",
        "applied.backward(loss)",
        f"applied.step({'' if clip is None else f'clip_grad_norm={clip:g}'}){after}",
    ]


def _technique_lines(techniques: Sequence[str], spec: TrialSpec, facts: Facts | None) -> list[str]:
    """Return the lines and arguments of techniques that are no more than that, for a loop of plain PyTorch."""
    codes = [technique.code for technique in rows_of(techniques) if technique.code is not None]
    calls, lines = own_calls(spec, facts), [code.model for code in codes if code.model]
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
    casts, trained = _own(facts, _AUTOCAST), _own(facts, _WEIGHTS)
    tf32 = tuple(facts.fp32_precision.get(name) == "tf32" for name in _SWITCHES)
    return replace(
        row,
        autocast_dtype=next((dtype for dtype in DTYPES if dtype in casts), None),
        param_dtype=next((dtype for dtype in DTYPES if dtype in trained), row.param_dtype),
        float32_matmul=next((products for products, uses in _TF32.items() if uses == tf32), None),
        loss_scale="dynamic" if _SCALER in facts.own_precision else "none",
    )


def _own(facts: Facts, kind: str) -> dict[str, str]:
    """Return what a script does itself of a kind, each with its lines in words."""
    return {
        name.removeprefix(kind): " and ".join(lines if len(lines) < 4 else [lines[0], f"{len(lines) - 1} more lines"])
        for name, lines in facts.own_precision.items()
        if name.startswith(kind)
    }


def written_name(trial: Trial) -> str:
    """Return the precision that a script as written trains in, empty if it is none that is more than a switch."""
    now = precision_of(trial)
    if now.name != AS_WRITTEN or (now.param_dtype, now.autocast_dtype) == ("float32", None):
        return ""
    if now.param_dtype != "float32":
        return next((name for name, dtype in TRUE_PRECISIONS.items() if dtype == now.param_dtype), "")
    formats = (now.param_dtype, now.autocast_dtype, now.loss_scale)
    rows = (row for row in PRECISIONS if formats == (row.param_dtype, row.autocast_dtype, row.loss_scale))
    return next((row.name for row in rows if row.autocast_dtype), "")


def written_in_words(trial: Trial) -> str:
    """Return in which precision a script as written trains, and what that loses; empty if there is nothing to say."""
    facts, now, said = trial.facts, precision_of(trial), list[str]()
    if now.name != AS_WRITTEN or facts is None:
        return ""
    trained, casts, lost = _own(facts, _WEIGHTS), _own(facts, _AUTOCAST), facts.lost_updates
    if trained:
        names = " and ".join(f"{name}{at and f' ({at})'}" for name, at in trained.items())
        said.append(f"Your script trains in pure {names}: its weights have no float32 copy.")
    elif name := written_name(trial):
        at = next((f"autocast at {lines}" for lines in casts.values() if lines), "")
        if facts.framework and (named := _named(facts.framework, precision_row(name), trial.spec.device_type, None)):
            at = FRAMEWORKS[facts.framework].call.format(named)
        said.append(f"Your script already trains in {name}{at and f' ({at})'}.")
    if lost is not None:
        rate = "" if lost.learning_rate is None else f" at a learning rate of {lost.learning_rate:g}"
        most = f", of {lost.weight} {format_share(lost.weight_share)}" if lost.weight_share > lost.share else ""
        said.append(f"A step of {_optimizer(facts)}{rate} leaves {format_share(lost.share)} of them as they are{most}.")
    for state, at in _own(facts, _STATE).items():
        whose = "Adam" if "Adam" in _optimizer(facts) else _optimizer(facts)
        bits = state.replace("-bit", " bits")
        said.append(f"Your script keeps {whose}'s state in {bits}{at and f' ({at})'}.")
    if frozen := _own(facts, _FROZEN):
        said.append(f"Its frozen weights stay in {' and '.join(frozen)} in every precision.")
    if layers := _own(facts, _LAYERS):
        said.append(f"{' and '.join(layers)} stay as they are in every precision.")
    return " ".join(said)


def script_code(written: Trial, taken: Trial) -> str:
    """Return what to change in a script as it is written, whose facts say what it does itself, to get another trial."""
    spec, facts, now = taken.spec, taken.facts, precision_of(written)
    row, device_type, hardware = precision_row(spec.precision), spec.device_type, written.environment.hardware
    row = now if row.name == AS_WRITTEN else row
    own, framework = (written.facts.own_precision, written.facts.framework) if written.facts is not None else ({}, "")
    lines: list[str] = []
    if (now.autocast_dtype, row.master_weights) == (row.autocast_dtype, False):
        # Else there is one kind of product.
        if row.autocast_dtype is None and not is_same_as_fp32(find_precision(DEFAULT), hardware):
            switches = zip(_SWITCHES.values(), _TF32[now.float32_matmul], _TF32[row.float32_matmul], strict=True)
            lines = [f"{switch} = {wanted}" for switch, present, wanted in switches if present != wanted]
    elif framework:
        (snippet,) = framework_snippets(row, device_type, written.facts)
        lines = [f"{snippet.code}  # {framework}" if snippet.code else f"# {framework}: no such precision"]
    else:
        lines, is_all = _changed_autocast(now, row, own)
        lines += [] if is_all else loop_code(row, spec.model_copy(update={"techniques": ()}), facts)
    if now.param_dtype != "float32" and row.keeps_float32_weights and written.facts is not None:
        at = " and ".join(filter(None, _own(written.facts, _WEIGHTS).values()))
        lines.insert(0, f"# weights in float32, by dtype=torch.float32 or model.float(){at and f': {at}'}")
    return "\n".join([*lines, *_technique_lines(spec.techniques, spec, facts)])


def _changed_autocast(now: Precision, row: Precision, own: Mapping[str, Sequence[str]]) -> tuple[list[str], bool]:
    """Return what changes of a script's own autocast and GradScaler, and whether that is all that a precision needs."""

    def at(kind: str) -> str:
        return f" at {' and '.join(own[kind])}" if own.get(kind) else ""

    before, after = now.autocast_dtype, row.autocast_dtype
    begins_scaling = now.loss_scale == "none" != row.loss_scale
    keeps_autocast = bool(before and after) and not (begins_scaling or row.master_weights)
    lines = []
    if before:
        where = f"the autocast{at(_AUTOCAST + before)}"
        lines.append(f"# {where}: dtype=torch.{after}" if keeps_autocast else f"# remove {where}")
    if now.loss_scale != "none" and (row.loss_scale == "none" or row.master_weights):
        lines.append(f"# remove the GradScaler{at(_SCALER)}")
    return lines, keeps_autocast or (after is None and not row.master_weights)


def loop_patch(row: Precision, spec: TrialSpec, facts: Facts | None, gains: Mapping[str, str]) -> str:
    """Return what to change in a loop, in at most fifteen lines: `castwise.apply` first, then the frameworks' lines.

    `gains` are what a precision or a technique bought, by its name.
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
