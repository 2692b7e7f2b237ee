"""Small set-ups of real workloads, with and without techniques, for setting their losses side by side."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from castwise.apply.pytree import Batch
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import Workload, find_workload
from castwise.spec.trial import TrialSpec
from castwise.trial import build
from castwise.trial.build import TrialSetup
from castwise.trial.data.sharding import rank_batches
from castwise.trial.distributed import Peers

# The smallest of each kind of model: convolutions and batch norm under SGD with momentum and clipped gradients, and a
# recurrent network that carries its state; a transformer, whose embedding is tied to its head.
IMAGES, WORDS, ADADELTA, TOKENS = "wrn-28-10", "lstm-lm", "mnist-cnn", "gpt2"
ALONE = Peers()
# On a GPU; half of it on a CPU, which may have no 16 bits.
_BATCH_SIZES = {IMAGES: 8, WORDS: 4, ADADELTA: 16, TOKENS: 8, "resnet18": 16}


def small(name: str) -> Workload:
    """Return a workload of this name, as small as it can be made."""
    row = find_workload(name)
    options: dict[str, dict[str, str | int | float]] = {
        IMAGES: {"depth": 10, "widen": 1, "dropout": 0.0},
        WORDS: {"kind": "LSTM", "width": 16, "dropout": 0.0},
        TOKENS: {"kind": "gpt2", "width": 32, "depth": 2, "heads": 2, "length": 16, "vocabulary": 101},
    }
    return replace(row, options=tuple(options[name].items())) if name in options else row


def spec_of(workload: str, precision: str, *techniques: str, device: str = "cpu", loss_scale: str = "") -> TrialSpec:
    return TrialSpec(
        workload=workload,
        precision=precision,
        loss_scale=loss_scale or find_precision(precision).loss_scale,
        batch_size=_BATCH_SIZES[workload] // (2 if device == "cpu" else 1),
        device=device,
        techniques=techniques,
    )


@functools.cache
def _has_lstm_in_bfloat16() -> bool:
    lstm = nn.LSTM(2, 2)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lstm(torch.zeros(1, 1, 2))
    except RuntimeError:  # "could not create a primitive descriptor"
        return False
    return True


def lstm_anywhere(workload: str) -> AbstractContextManager[None]:
    """Return where a model's LSTM runs under autocast: without oneDNN, where it has none in 16 bits (no AVX-512)."""
    needless = not workload.startswith("lstm") or _has_lstm_in_bfloat16()
    return nullcontext() if needless else torch.backends.mkldnn.flags(enabled=False)


@contextmanager
def setup_of(spec: TrialSpec, peers: Peers = ALONE) -> Iterator[tuple[TrialSetup, list[Batch]]]:
    """Build a spec's small set-up without dropout, whose draws a technique may change, and its batches."""
    row = small(spec.workload)
    found, build.find_workload = build.find_workload, lambda _: row
    try:
        with lstm_anywhere(spec.workload), ExitStack() as stack:
            setup = build.build_trial(spec, stack, peers)
            for module in setup.task.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            batches = rank_batches(row, setup.task, spec, 4, peers)
            yield setup, [setup.prepare(batch) if setup.prepare else batch for batch in batches]
    finally:
        build.find_workload = found


def losses_of(spec: TrialSpec, num_steps: int = 20, peers: Peers = ALONE) -> Tensor:
    """Return the losses of a small set-up's first steps, of shape (num_steps,), float64."""
    with setup_of(spec, peers) as (setup, batches):
        losses = [setup.step(batches[index % len(batches)]).detach() for index in range(num_steps)]
        setup.step.flush()
        return torch.stack(losses).double().cpu()
