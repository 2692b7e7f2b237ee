"""A training loop in plain PyTorch, as one writes it by hand: what `by_hand.py` compares castwise's loops with.

    python benchmarks/hand_loops.py WORKLOAD BATCH_SIZE PRECISION [--compile] [--pad] [--device DEVICE] [--seconds S]

Prints a line of JSON: the images, tokens or samples per second. The model, its batches and its optimizer's arguments
are castwise's, so that both sides compute the same; the loop shares no code with castwise's.
"""

import argparse
import inspect
import json
import time
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.analysis.statistics import pseudomedian
from castwise.registry.workloads import Workload, find_workload
from castwise.trial.models import build_task

_FIRST_STEPS = 4  # libraries are loaded, algorithms searched, code compiled
_WARM_UP_SECONDS = 1.5
_BLOCK_SECONDS, _FEWEST_BLOCKS = 0.2, 3
_FP8 = "fp8-tensorwise"


def pad_vocabulary(model: nn.Module) -> None:
    """Give a transformer's decoder, and the embedding that shares its weight, rows up to a multiple of 64.

    The loss runs over the logits of the added rows, too. Source: karpathy/nanoGPT model.py (50,257 words to 50,304).
    """
    words, head = model.tokens, model.head
    missing = -head.out_features % 64
    words.weight = head.weight = nn.Parameter(functional.pad(head.weight.detach(), (0, 0, 0, missing)))
    if head.bias is not None:
        head.bias = nn.Parameter(functional.pad(head.bias.detach(), (0, missing)))
    words.num_embeddings = head.out_features = head.out_features + missing


def convert_to_fp8(model: nn.Module) -> None:
    """Let a transformer's linear layers run in FP8, but not its decoder.

    Source: the example of torchao's `convert_to_float8_training`.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_converted(layer: nn.Module, name: str) -> bool:
        return name != "head" and layer.in_features % 16 == layer.out_features % 16 == 0

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)


class HandLoop:
    """A loop with all that is easily had: channels_last for images, cuDNN's search, a fused optimizer, autocast."""

    def __init__(
        self,
        row: Workload,
        batch_size: int,
        precision: str,
        device: torch.device,
        *,
        compiled: bool = False,
        padded: bool = False,
    ) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        self._device, self._clip = device, row.clip_grad_norm
        self._is_mixed = precision in ("bf16-mixed", _FP8)
        task = build_task(row)
        self._compute_loss = torch.compile(task.compute_loss, dynamic=False) if compiled else task.compute_loss
        self.units_per_step = batch_size * task.units_per_sample

        if padded:
            pad_vocabulary(task.model)
        self._model = model = task.model.to(device).train()
        if precision == _FP8:
            convert_to_fp8(model)
        generator = torch.Generator(device).manual_seed(0)
        self._batches = task.make_batches(row.resident_batches, batch_size, device, generator)
        if row.unit == "images":
            model.to(memory_format=torch.channels_last)
            self._batches = [
                tuple(part.to(memory_format=torch.channels_last) if part.dim() == 4 else part for part in batch)
                for batch in self._batches
            ]
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        kind = getattr(torch.optim, row.optimizer.name)
        fused = {"fused": True} if "fused" in inspect.signature(kind).parameters else {}
        self._optimizer = kind(self._weights, **dict(row.optimizer.arguments), **fused)
        self._num_steps = 0

    def step(self, batch: tuple[Tensor, ...]) -> None:
        """Train on a batch."""
        self._optimizer.zero_grad()
        with torch.autocast(self._device.type, dtype=torch.bfloat16) if self._is_mixed else nullcontext():
            loss = self._compute_loss(self._model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._weights, self._clip)
        self._optimizer.step()

    def time_steps(self, count: int) -> float:
        """Take steps, and return the seconds of one."""
        self._synchronize()
        started = time.perf_counter()
        for number in range(self._num_steps, self._num_steps + count):
            self.step(self._batches[number % len(self._batches)])
        self._synchronize()
        self._num_steps += count
        return (time.perf_counter() - started) / count

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main() -> None:
    """Warm a loop up, time it in blocks, and print its speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("batch_size", type=int)
    parser.add_argument("precision", choices=("fp32", "tf32", "bf16-mixed", _FP8))
    parser.add_argument("--compile", action="store_true", help="model and loss are under torch.compile")
    parser.add_argument("--pad", action="store_true", help="a transformer's vocabulary is padded to a multiple of 64")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=4.0, help="of all timed blocks")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    row = find_workload(arguments.workload)
    loop = HandLoop(
        row, arguments.batch_size, arguments.precision, device, compiled=arguments.compile, padded=arguments.pad
    )
    loop.time_steps(_FIRST_STEPS)
    step_seconds = loop.time_steps(_FIRST_STEPS)
    warm_up_steps = round(min(_WARM_UP_SECONDS, arguments.seconds) / step_seconds)
    step_seconds = loop.time_steps(max(_FIRST_STEPS, warm_up_steps))
    block_seconds = min(_BLOCK_SECONDS, arguments.seconds / _FEWEST_BLOCKS)
    per_block = max(1, round(block_seconds / step_seconds))
    num_blocks = max(_FEWEST_BLOCKS, round(arguments.seconds / (per_block * step_seconds)))
    seconds = pseudomedian([loop.time_steps(per_block) for _ in range(num_blocks)])
    print(json.dumps({"per_second": loop.units_per_step / seconds}))


if __name__ == "__main__":
    main()
