"""What a device does at the most: products of square matrices in each format, and copies within its memory.

    python benchmarks/ceilings.py [--device cuda:0] [--side 8192] [--copy-bytes 4294967296]

Prints JSON: FLOP/s by format, and bytes_per_second, reads and writes together. Each is the best of several turns.
"""

import argparse
import json
import sys
from collections.abc import Callable

import torch

from castwise.registry.precisions import find_precision
from castwise.worker.precision import numeric_state
from castwise.worker.timing import stopwatch_of

# By castwise's name of the format: the dtype of the factors, and the precision whose float32 switches it takes.
_FORMATS = {
    "fp32": (torch.float32, "fp32"),
    "tf32": (torch.float32, "tf32"),
    "fp16": (torch.float16, "fp16-mixed"),
    "bf16": (torch.bfloat16, "bf16-mixed"),
}
COPY_BYTES = 2**32
_TURNS, _REPEATS = 5, 10


def measure(device: torch.device, side: int, copy_bytes: int) -> dict[str, float]:
    """Return FLOP/s by format, and bytes per second."""
    found = {name: _product(device, side, *settings) for name, settings in _FORMATS.items()}
    found["bytes_per_second"] = copy_bandwidth(device, copy_bytes)
    return found


def copy_bandwidth(device: torch.device, copy_bytes: int) -> float:
    """Return the bytes per second of a copy within the device's memory, reads and writes together."""
    source = torch.zeros(copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(device, lambda: target.copy_(source))


def _product(device: torch.device, side: int, dtype: torch.dtype, precision: str) -> float:
    with numeric_state(find_precision(precision)):
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        result = torch.empty_like(left)
        return 2 * side**3 / _fastest(device, lambda: torch.mm(left, right, out=result))


def _fastest(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of one piece of work, of the fastest turn."""

    def several() -> None:
        for _ in range(_REPEATS):
            work()

    stopwatch = stopwatch_of(device)
    stopwatch.time(several)
    return min(stopwatch.time(several) for _ in range(_TURNS)) / _REPEATS


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    arguments = parser.parse_args()
    print(json.dumps(measure(torch.device(arguments.device), arguments.side, arguments.copy_bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
