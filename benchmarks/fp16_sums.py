"""How far products of float16 matrices are off, added up in float32 and in float16 (`fp16-accumulation`).

    python benchmarks/fp16_sums.py --out FILE

Both matrices are drawn from a normal distribution. An error is that of the whole product over the exact one, in the
Frobenius norm; float64 gives the exact one. The result is rounded to float16, as that of a model's layer is.
"""

import argparse
import json
from pathlib import Path

import torch
from stored import RECORDS, markdown, place_of, write

from castwise.orchestrator.machine import detect_machine

ADDENDS = (256, 1024, 4096, 16384)
_ROWS = 1024  # and columns of the product


def errors(addends: int) -> dict[str, float]:
    """Return the error of a product whose elements are sums of so many addends, by what they are added up in."""
    draw = torch.Generator("cuda").manual_seed(addends)
    shapes = ((_ROWS, addends), (addends, _ROWS))
    left, right = (torch.randn(shape, device="cuda", generator=draw).half() for shape in shapes)
    exact = left.double() @ right.double()
    found = {}
    for name, allowed in (("float32", False), ("float16", True)):
        torch.backends.cuda.matmul.allow_fp16_accumulation = allowed
        found[name] = float((left @ right - exact).norm() / exact.norm())
    return found


def table(_: str) -> str:
    """Return the errors on record by the number of addends."""
    (path,) = (RECORDS / "fp16_sums").glob("*.json")
    record = json.loads(path.read_text())
    rows = [[f"{int(n):,}", *(f"{100 * row[name]:.2f} %" for name in row)] for n, row in record["errors"].items()]
    lines = markdown("addends | error, sums in float32 | in float16", "rrr", rows)
    return "\n".join([place_of(record["environment"], path.stem[:10]), "", *lines]) + "\n"


def main() -> None:
    """Measure and record the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = {str(addends): errors(addends) for addends in ADDENDS}
    machine = detect_machine("cuda:0", None)
    write(arguments.out, {"environment": machine.environment.model_dump(mode="json"), "errors": found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
