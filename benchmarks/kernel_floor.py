"""The least time of a goal's step with the library's own kernels: its convolutions and matrix products, each alone.

    python benchmarks/kernel_floor.py [--rows wrn,resnet50] [--out FILE] [--budget 35] [--cached] [--search 10]

Every distinct convolution and matrix product of a step (`kernel_products.py`, counted on the meta device) is timed
alone on the device (`kernel_times.py`); their sum, and the bytes of all else at the bandwidth of a copy, are what no
loop goes below that has these kernels and fuses no more than `work_counter.py` assumes. docs/benchmarks.md says what
that forbids, and what it does not.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from ceilings import COPY_BYTES, copy_bandwidth
from goal_bounds import ELEMENT_BYTES
from goal_rows import GoalRow, find_rows
from goal_specs import Setting, run_recipe, tiny
from goal_tables import measured_rows
from goals import describe, write
from kernel_floor_tables import TRAFFIC, lines_of
from kernel_products import Product
from kernel_times import ROTATED_BYTES, Manner, time_way, ways_of
from stored import RECORDS
from work_counter import count_step

from castwise.errors import CastwiseError, UsageError
from castwise.orchestrator.machine import detect_machine
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import find_workload
from castwise.worker.precision import numeric_state

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
_SECONDS = 0.1  # of the replays of a product in one way, at the most
_BUDGET_SECONDS = 35.0
_TINY_COPY_BYTES = 65536


@dataclass
class FloorBench:
    """What products are timed on, and what was found of those that rows share.

    Attributes:
        device: The device.
        bytes_per_second: Of a copy within its memory.
        budget: Seconds of a row.
        rotated_bytes: As in `Manner`.
        is_tiny: The same.
    """

    device: torch.device
    bytes_per_second: float
    budget: float
    rotated_bytes: int
    is_tiny: bool
    _found: dict[tuple[Product, torch.dtype], "Timed"] = field(default_factory=dict)

    def measure(self, row: GoalRow) -> dict[str, Any] | None:
        """Return a row's record; None where it has recurrent layers, whose kernels are not products alone."""
        setting = Setting(str(self.device), Path(), is_tiny=self.is_tiny)
        started = time.monotonic()
        work, products = count_step(find_workload(row.workload), row.batch_size, run_recipe(row, setting))
        if any(operation.name == "recurrent" for operation in work.operations):
            return None
        precision = find_precision(row.ours[0].precision)
        size = ELEMENT_BYTES[precision.peak_dtype]
        manner = Manner(self.device, _DTYPES[precision.peak_dtype], self.rotated_bytes, self.is_tiny)
        with numeric_state(precision):
            timed = list(self._each(Counter(products), manner, size, started + self.budget))
        return describe(row, setting) | {
            "data_set": row.data_set,
            "format": precision.peak_dtype,
            "products": timed,
            "rest_bytes": work.rest_bytes(size),
            "seconds": time.monotonic() - started,
        }

    def _each(self, counts: Counter[Product], manner: Manner, size: int, deadline: float) -> Iterator[dict[str, Any]]:
        # What computes most comes first: where the budget ends before them all, the rest are small.
        order = sorted(counts, key=lambda each: counts[each] * each.flops, reverse=True)
        num_ways = sum(len(list(ways_of(product))) for product in order)
        # Half of the time goes to searches and captures.
        seconds = min(_SECONDS, self.budget / num_ways / 2)
        for product in order:
            key = product, manner.dtype
            if key not in self._found and time.monotonic() < deadline:
                self._found[key] = _time(product, manner, seconds)
            yield self._facts(product, counts[product], size, self._found.get(key, Timed()))

    def _facts(self, product: Product, count: int, size: int, timed: "Timed") -> dict[str, Any]:
        """Return what a record keeps of a product."""
        seconds = dict(timed.seconds)
        if product.has_few_channels or not seconds:
            # A loop need not leave these to the library: a depthwise convolution's own kernel, or a first convolution
            # over pairs of pixels, can come near what the bytes allow.
            seconds[TRAFFIC] = product.elements * size / self.bytes_per_second
        facts = {"label": product.label, "count": count, "flops": product.flops, "elements": product.elements}
        return facts | asdict(product) | {"seconds": seconds, "failed": timed.failed}


@dataclass(frozen=True)
class Timed:
    """What was measured of a product.

    Attributes:
        seconds: Of one, by the way that it is computed in.
        failed: Why the other ways have none.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def _time(product: Product, manner: Manner, seconds: float) -> Timed:
    timed = Timed()
    for way in ways_of(product):
        try:
            timed.seconds[way.name] = time_way(way, product, manner, seconds)
        except RuntimeError as error:  # the library has no kernel for it, or the device no memory
            timed.failed[way.name] = str(error).strip().partition("\n")[0]
    return timed


def smallest(row: GoalRow, device: str) -> GoalRow:
    """Return a row with the smallest batch that batch norm takes; its figures mean nothing."""
    return replace(tiny(row, device), batch_size=2)


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="names joined by commas; all on one GPU without recurrent layers by default")
    parser.add_argument("--device", help="cuda:N, or cpu with --tiny; the first GPU by default")
    parser.add_argument("--budget", type=float, default=_BUDGET_SECONDS, help="seconds of a row; %(default)g")
    parser.add_argument("--search", type=int, default=10, help="kernels that cuDNN tries, as in any loop; 0 is all")
    parser.add_argument("--cached", action="store_true", help="leave tensors in the cache where they fit")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to try this program itself")
    parser.add_argument("--out", type=Path, help="benchmarks/records/kernel_floor/DATE-NAME.json keeps a run")
    return parser.parse_args()


def main() -> int:
    """Time the products of the rows; print a line each, and its slowest products."""
    arguments = parse()
    try:
        rows = find_rows(arguments.rows)
        if not arguments.tiny and (arguments.device == "cpu" or not torch.cuda.is_available()):
            raise UsageError("Kernels are timed on a GPU; --tiny tries the program on a CPU.")
        bench = detect_machine(arguments.device, None)
    except (ValueError, CastwiseError) as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.rows is None:  # a step on several GPUs is that of one
        rows = tuple(row for row in rows if row.world_size == 1)
    device = torch.device(bench.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.benchmark_limit = arguments.search
    bandwidth = copy_bandwidth(device, _TINY_COPY_BYTES if arguments.tiny else COPY_BYTES)
    rotated_bytes = 0 if arguments.cached or arguments.tiny else ROTATED_BYTES
    floor_bench = FloorBench(device, bandwidth, arguments.budget, rotated_bytes, arguments.tiny)
    document: dict[str, Any] = {
        "environment": bench.environment.model_dump(mode="json"),
        "date": datetime.now(UTC).date().isoformat(),
        "bytes_per_second": bandwidth,
        "rotated_bytes": rotated_bytes,
        "search_limit": arguments.search,
        "rows": [],
    }
    measured = measured_rows(RECORDS / "goals")
    for row in rows:
        found = floor_bench.measure(smallest(row, bench.device) if arguments.tiny else row)
        if found is None:
            print(f"{row.name:13} has recurrent layers, which are not timed here", flush=True)
            continue
        document["rows"].append(found)
        print(
            "\n".join(lines_of(found, bandwidth, measured.get(row.name))), f"    ({found['seconds']:.0f} s)", sep="\n"
        )
        sys.stdout.flush()
        write(arguments.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
