"""What the hooks of a script cost: a loop without and with them, in turn, in one process on the CPU.

python benchmarks/script_hooks.py [PRECISION]

By default `as-written`. The loop without hooks has autocast and loss scaling written by hand.
"""

import queue
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset, dataloader

from castwise.registry.precisions import AS_WRITTEN, find_precision
from castwise.worker.precision import autocast_maker
from castwise.worker.script.hooks import ScriptHooks
from castwise.worker.script.precision import OutsidePrecision
from castwise.worker.script.techniques import OutsideTechniques

_STEPS, _TURNS, _MODULES = 50, 200, 5
_REPLACED = (
    (Tensor, "backward"),
    (dataloader._BaseDataLoaderIter, "__next__"),
    *((torch.autocast, name) for name in ("__init__", "__enter__", "__exit__")),
    *((torch.amp.GradScaler, name) for name in ("scale", "step")),
)


def make_loop(autocast: Callable[[], AbstractContextManager[Any]], *, scales: bool = False) -> Callable[[], float]:
    """Return a function that takes steps of a model of small modules, and returns the seconds of one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(_MODULES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)  # the loss has no least value
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    data = DataLoader(TensorDataset(torch.randn(_STEPS, 4)), batch_size=1)

    def loop() -> float:
        started = time.perf_counter()
        for (batch,) in data:
            optimizer.zero_grad()
            with autocast():
                loss = model(batch).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return (time.perf_counter() - started) / _STEPS

    return loop


def main() -> None:
    torch.set_num_threads(1)
    row = find_precision(sys.argv[1] if sys.argv[1:] else AS_WRITTEN)
    plain = make_loop(autocast_maker(row, "cpu"), scales=row.loss_scale != "none")
    hooked = make_loop(nullcontext)
    plain()
    originals = [getattr(owner, name) for owner, name in _REPLACED]
    techniques = OutsideTechniques((), torch.device("cpu"))
    hooks = ScriptHooks(OutsidePrecision(row, "cpu"), techniques, queue.SimpleQueue().empty)
    hooked()
    hooks.stop_looking()
    replaced = [getattr(owner, name) for owner, name in _REPLACED]
    of_steps = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    kept = [dict(each) for each in of_steps]
    before, after = list[float](), list[float]()
    for _ in range(_TURNS):
        for each in of_steps:
            each.clear()
        for (owner, name), function in zip(_REPLACED, originals, strict=True):
            setattr(owner, name, function)
        before.append(plain())
        for each, found in zip(of_steps, kept, strict=True):
            each.update(found)
        for (owner, name), function in zip(_REPLACED, replaced, strict=True):
            setattr(owner, name, function)
        after.append(hooked())
    cost = statistics.median(with_hooks - without for with_hooks, without in zip(after, before, strict=True))
    print(f"a step without hooks {1e6 * min(before):.0f} µs, with them {1e6 * min(after):.0f} µs (least of {_TURNS})")
    print(f"median of the differences {1e6 * cost:.0f} µs a step: {100 * cost / 10e-3:.2f} % of 10 ms")


if __name__ == "__main__":
    main()
