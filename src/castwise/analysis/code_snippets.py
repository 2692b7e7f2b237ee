"""What to paste: the lines of plain PyTorch for a trial's loop, and what to set in the frameworks round it."""

from dataclasses import dataclass, replace

from castwise.records.schema import Facts
from castwise.registry.precisions import Precision

_INDENT = "    "


# Lightning's word for autocast to float16, in whose place its Trainer takes bfloat16 on a CPU.
_REPLACED_ON_CPU = "16-mixed"


@dataclass(frozen=True)
class Snippet:
    """One line of a framework that does what a precision does.

    Attributes:
        framework: The framework's name.
        code: The line; empty where the framework has no such mode.
    """

    framework: str
    code: str


@dataclass(frozen=True)
class _Frameworks:
    """What a precision is called elsewhere; None where it does not exist.

    Attributes:
        lightning: `precision` of Lightning's Trainer.
        accelerate: `mixed_precision` of Accelerate's Accelerator.
        arguments: The arguments of transformers' TrainingArguments.
        first: A line that goes before.
    """

    lightning: str | None
    accelerate: str | None
    arguments: str | None
    first: str = ""


# Source: the documentation of Lightning 2.6 (Trainer, precision), Accelerate 1.15 (Accelerator, mixed_precision) and
# transformers 5.23 (TrainingArguments: bf16, fp16, tf32). Their tf32 sets matrix products; convolutions and RNNs use it
# anyway.
_FRAMEWORKS: dict[str, _Frameworks] = {
    "fp32": _Frameworks("32-true", "no", "tf32=False"),
    "tf32": _Frameworks("32-true", "no", "tf32=True", 'torch.set_float32_matmul_precision("high")'),
    "fp16-mixed": _Frameworks("16-mixed", "fp16", "fp16=True"),
    "bf16-mixed": _Frameworks("bf16-mixed", "bf16", "bf16=True"),
    "fp16-master": _Frameworks(None, None, None),
    "bf16-master": _Frameworks(None, None, None),
    "fp16-true": _Frameworks("16-true", "no", "", "model.to(torch.float16)"),
    "bf16-true": _Frameworks("bf16-true", "no", "", "model.to(torch.bfloat16)"),
}


def framework_snippets(row: Precision, device_type: str, facts: Facts | None = None) -> tuple[Snippet, ...]:
    """Return a line for Lightning, Accelerate and transformers each, with the trial's clipping and accumulation.

    Args:
        row: The precision.
        device_type: "cpu" or "cuda". They take the GPU by themselves, and on a CPU have to be told: TrainingArguments
            refuse bf16 there otherwise.
        facts: What the trial ran; None leaves clipping and accumulation out.
    """
    on_cpu = device_type == "cpu"
    names = _FRAMEWORKS[row.name]
    if on_cpu and names.lightning == _REPLACED_ON_CPU:
        names = replace(names, lightning=None)
    clip = facts.clip_grad_norm if facts is not None else None
    accumulate = facts.accumulate if facts is not None and facts.accumulate > 1 else None
    return (
        Snippet("Lightning", _lightning(names, clip, accumulate, on_cpu=on_cpu)),
        Snippet("Accelerate", _accelerate(names, clip, accumulate, on_cpu=on_cpu)),
        Snippet("transformers", _arguments(names, clip, accumulate, on_cpu=on_cpu)),
    )


def _lightning(names: _Frameworks, clip: float | None, accumulate: int | None, *, on_cpu: bool) -> str:
    if names.lightning is None:
        return ""
    arguments = ['accelerator="cpu"'] if on_cpu else []
    arguments += [f'precision="{names.lightning}"']
    arguments += [f"gradient_clip_val={clip:g}"] if clip is not None else []
    arguments += [f"accumulate_grad_batches={accumulate}"] if accumulate else []
    # Lightning casts the model itself for its true precisions.
    first = names.first if "model" not in names.first else ""
    return _after(first, f"Trainer({', '.join(arguments)})")


def _accelerate(names: _Frameworks, clip: float | None, accumulate: int | None, *, on_cpu: bool) -> str:
    if names.accelerate is None:
        return ""
    arguments = ["cpu=True"] if on_cpu else []
    arguments += [f'mixed_precision="{names.accelerate}"']
    arguments += [f"gradient_accumulation_steps={accumulate}"] if accumulate else []
    line = _after(names.first, f"accelerator = Accelerator({', '.join(arguments)})")
    return line + (f"; accelerator.clip_grad_norm_(model.parameters(), {clip:g})" if clip is not None else "")


def _arguments(names: _Frameworks, clip: float | None, accumulate: int | None, *, on_cpu: bool) -> str:
    if names.arguments is None:
        return ""
    arguments = ["use_cpu=True"] if on_cpu else []
    arguments += [names.arguments] if names.arguments else []
    # Its own default clips to 1; 0 is its word for not at all.
    arguments += [f"max_grad_norm={clip or 0:g}"]
    arguments += [f"gradient_accumulation_steps={accumulate}"] if accumulate else []
    first = names.first if "model" in names.first else ""
    return _after(first, f"TrainingArguments({', '.join(arguments)})")


def _after(first: str, line: str) -> str:
    return f"{first}; {line}" if first else line


def pytorch_code(row: Precision, device_type: str, facts: Facts | None = None) -> str:
    """Return the lines of plain PyTorch that do what a trial did: its clipping and accumulation in their places.

    Clipping comes behind unscaling, since a norm of scaled gradients is none; unscaling, clipping, stepping and the
    scale's update come once an optimizer step, behind the last of its batches' backward passes.

    Args:
        row: The precision.
        device_type: "cpu" or "cuda".
        facts: What the trial ran; None leaves clipping and accumulation out.
    """
    lines = row.code.replace("{device!r}", f'"{device_type}"').splitlines()
    if facts is None or not any(".backward()" in line for line in lines):
        return "\n".join(lines)
    if facts.accumulate > 1:
        lines = _accumulated(lines, facts.accumulate)
    if facts.clip_grad_norm is not None:
        lines = _clipped(lines, facts.clip_grad_norm)
    return "\n".join(lines)


def _accumulated(lines: list[str], count: int) -> list[str]:
    """Put forward and backward into a loop over the batches of one optimizer step, whose mean is the loss."""
    last = next(index for index, line in enumerate(lines) if ".backward()" in line)
    first = next(index for index, line in enumerate(lines) if line.startswith(("with torch.autocast", "loss =")))
    body = [_INDENT + _divided(line, count) for line in lines[first : last + 1]]
    return [*lines[:first], f"for x, y in batches:  # {count} for one optimizer step", *body, *lines[last + 1 :]]


def _divided(line: str, count: int) -> str:
    """Divide the line's loss by the number of batches, where it is the line that computes it."""
    code, comment, rest = line.partition("  #")
    return f"{code} / {count}{comment}{rest}" if code.lstrip().startswith("loss = ") else line


def _clipped(lines: list[str], norm: float) -> list[str]:
    step = next(index for index, line in enumerate(lines) if line.endswith((".step(optimizer)", "optimizer.step()")))
    tensors = "masters" if any(line.startswith("masters =") for line in lines) else "model.parameters()"
    clipping = [f"torch.nn.utils.clip_grad_norm_({tensors}, {norm:g})"]
    if "scaler" in lines[step]:
        clipping.insert(0, "scaler.unscale_(optimizer)")
    return [*lines[:step], *clipping, *lines[step:]]
