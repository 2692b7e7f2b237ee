"""What to paste: the lines of plain PyTorch for a trial's loop, and what to set in the frameworks around it."""

from dataclasses import dataclass

from castwise.records.schema import Facts
from castwise.registry.precisions import Precision


@dataclass(frozen=True)
class Snippet:
    """One line of a framework that does what a precision does."""

    framework: str
    code: str  # empty if the framework has no such mode


def framework_snippets(row: Precision, device_type: str, facts: Facts | None = None) -> tuple[Snippet, ...]:
    """Return a line for Lightning, Accelerate and transformers each, with the trial's clipping and accumulation.

    The frameworks use a GPU by default, so a CPU has to be named: TrainingArguments refuse bf16 there otherwise.
    """
    names = row.frameworks
    on_cpu = device_type == "cpu"
    clip = facts.clip_grad_norm if facts is not None else None
    accumulate = facts.accumulate if facts is not None and facts.accumulate > 1 else None
    lightning = accelerate = transformers = ""
    if names.lightning is not None and (names.lightning_on_cpu or not on_cpu):
        lightning = _call(
            names.setting,
            "Trainer",
            'accelerator="cpu"' if on_cpu else "",
            f'precision="{names.lightning}"',
            "" if clip is None else f"gradient_clip_val={clip:g}",
            f"accumulate_grad_batches={accumulate}" if accumulate else "",
        )
    if names.accelerate is not None:
        accelerate = _call(
            names.setting or names.cast,
            "accelerator = Accelerator",
            "cpu=True" if on_cpu else "",
            f'mixed_precision="{names.accelerate}"',
            f"gradient_accumulation_steps={accumulate}" if accumulate else "",
        )
        if clip is not None:
            accelerate += f"; accelerator.clip_grad_norm_(model.parameters(), {clip:g})"
    if names.transformers is not None:
        transformers = _call(
            names.cast,
            "TrainingArguments",
            "use_cpu=True" if on_cpu else "",
            names.transformers,
            f"max_grad_norm={clip or 0:g}",  # its own default clips to 1; 0 does not clip
            f"gradient_accumulation_steps={accumulate}" if accumulate else "",
        )
    lines = {"Lightning": lightning, "Accelerate": accelerate, "transformers": transformers}
    return tuple(Snippet(framework, line) for framework, line in lines.items())


def _call(first: str, function: str, *arguments: str) -> str:
    """Return a line that calls a function with the arguments that are not empty, after another statement if any."""
    call = f"{function}({', '.join(filter(None, arguments))})"
    return f"{first}; {call}" if first else call


def pytorch_code(row: Precision, device_type: str, facts: Facts | None = None) -> str:
    """Return the lines of plain PyTorch that do what a trial did: its clipping and accumulation in their places.

    Gradients are unscaled before they are clipped. Unscaling, clipping, stepping and the scale's update come once for
    each optimizer step, after the backward pass of its last batch.
    """
    lines = row.code.replace("{device!r}", f'"{device_type}"').splitlines()
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
