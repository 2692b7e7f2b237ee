"""How long the updates of Adam are with its state in fewer bits, beside those of float32 from the same gradients.

    python benchmarks/adam_updates.py --out FILE [--steps N] [lstm]

A network of adam_gpu.py trains in fp32. In each step every other choice gets its weights, gradients and numbers, and
takes a step of its own, which its state remembers. Lengths are of all weights together. Beside castwise's choices the
moments are rounded to the nearest bfloat16, as torch does where weights have that type.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

import adam_gpu
import torch
from stored import RECORDS, markdown, write
from torch import Tensor, nn

from castwise.apply.techniques.optimizer_state import keep_state_in

_NEAREST = "bf16, to the nearest"
KINDS = ("bf16", _NEAREST, "8-bit", "4-bit")
_SHOWN = (1, 100, 300, 600, 1200)  # steps


def _length(weights: list[Tensor], before: list[Tensor]) -> float:
    pairs = zip(weights, before, strict=True)
    return float(torch.stack([(each.detach() - other).square().sum() for each, other in pairs]).sum().sqrt())


def lengths(network: str, num_steps: int) -> dict[str, dict[int, float]]:
    """Return by choice and step how many times as long as fp32's an update is."""
    torch.manual_seed(0)
    described = getattr(adam_gpu, network)()
    model, optimizer, loss = described["model"].train(), described["optimizer"], described["loss"]
    scheduler, batches = described["scheduler"](optimizer), iter(described["training_set"])
    weights = list(model.parameters())
    beside = {}
    for kind in KINDS:
        own = [nn.Parameter(weight.detach().clone()) for weight in weights]
        beside[kind] = own, torch.optim.AdamW(own)
        if kind != _NEAREST:
            keep_state_in(beside[kind][1], kind)
    found: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for step in range(1, num_steps + 1):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        before = [weight.detach().clone() for weight in weights]
        for own, other in beside.values():
            for mine, weight in zip(own, weights, strict=True):
                mine.data.copy_(weight.data)
                mine.grad = None if weight.grad is None else weight.grad.clone()
            for group, numbers in zip(other.param_groups, optimizer.param_groups, strict=True):
                group |= {key: numbers[key] for key in ("lr", "betas", "weight_decay")}
            other.step()
        for state in beside[_NEAREST][1].state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())
        optimizer.step()
        scheduler.step()
        if step in _SHOWN:
            whole = _length(weights, before)
            for kind, (own, _) in beside.items():
                found[kind][step] = _length(own, before) / whole
            print(step, {kind: found[kind][step] for kind in KINDS}, flush=True)
    return found


def table(name: str) -> str:
    """Return the lengths on record."""
    record = json.loads((RECORDS / "adam_updates" / f"{name}.json").read_text())
    steps = list(record["lengths"][KINDS[0]])
    cells = [[kind, *(f"{each[step]:.2f}" for step in steps)] for kind, each in record["lengths"].items()]
    heading = " | ".join(["state", *(f"step {int(step):,}" for step in steps)])
    place = f"{record['network']}, {record['device']}, torch {record['torch']}, {name[:10]}"
    return "\n".join([place, "", *markdown(heading, "l" + "r" * len(steps), cells)]) + "\n"


def main() -> None:
    """Train, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="lstm", choices=("lstm", "transformer", "resnet9"))
    parser.add_argument("--steps", type=int, default=max(_SHOWN))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    record = {"network": options.network, "device": device, "torch": torch.__version__}
    record["started_at"] = datetime.now(UTC).isoformat(timespec="seconds")
    write(options.out, record | {"lengths": lengths(options.network, options.steps)})


if __name__ == "__main__":
    main()
