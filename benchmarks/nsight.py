"""What the GPU's counters of castwise say, beside Nsight Compute on plain loops that share no code with castwise.

    ncu --replay-mode app-range --clock-control none --cache-control none --csv --page raw --metrics METRICS \\
        python benchmarks/nsight.py LOOP > LOOP.csv    # each of LOOPS, on a GPU; --metrics prints METRICS
    python benchmarks/nsight.py --read FOLDER --out benchmarks/records/nsight/DATE-NAME.json

Nsight Compute slows the host, so its own time of a step means nothing. How long the Tensor Cores were active, and how
many bytes were moved, does not depend on that: both are divided by the step's time as castwise measured it.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from stored import RECORDS, load, markdown, write
from torch import nn

TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
MEMORY, TIME = "dram__bytes.sum.pct_of_peak_sustained_elapsed", "gpu__time_duration.sum"
METRICS = ",".join((TIME, TENSOR, MEMORY))
_NUM_STEPS = 10
# By name: castwise's workload, precision and techniques, and where its trial is.
LOOPS = {
    "mlp": ("mlp-4096", "tf32", (), "why"),
    "resnet50": ("resnet50", "bf16-mixed", (), "causes"),
    "resnet50-nhwc": ("resnet50", "bf16-mixed", ("channels-last",), "causes"),
    "resnet50-fp32": ("resnet50", "fp32", (), "why"),
    "gpt2": ("gpt2.py:build", "bf16-mixed", (), "why"),
}


def loop_of(name: str) -> Callable[[], None]:
    """Return a plain training step."""
    torch.manual_seed(0)
    model: nn.Module
    if name == "gpt2":
        import gpt2

        parts = gpt2.build()
        model, batch = parts["model"].cuda().train(), {key: part.cuda() for key, part in parts["batch"].items()}
        optimizer, loss_of = parts["optimizer"](model.parameters()), lambda: gpt2.training_step(model, batch)
    elif name == "mlp":
        torch.set_float32_matmul_precision("high")
        model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(4096, 4096), nn.ReLU())][:-1]).cuda()
        samples, targets = torch.randn(2, 512, 4096, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss_of = lambda: nn.functional.mse_loss(model(samples), targets)  # noqa: E731
    else:
        from torchvision.models import resnet50

        layout = torch.channels_last if name.endswith("nhwc") else torch.contiguous_format
        model = resnet50().cuda().to(memory_format=layout)
        images = torch.randn(256, 3, 224, 224, device="cuda").contiguous(memory_format=layout)
        labels = torch.randint(1000, (256,), device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.backends.cudnn.allow_tf32 = not name.endswith("fp32")
        loss_of = lambda: nn.functional.cross_entropy(model(images), labels)  # noqa: E731
    is_mixed = LOOPS[name][1] == "bf16-mixed"

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16) if is_mixed else nullcontext():
            loss = loss_of()
        loss.backward()
        optimizer.step()

    return step


def run(name: str) -> None:
    """Take some steps, which `ncu` counts as one range."""
    step = loop_of(name)
    for _ in range(_NUM_STEPS):
        step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for _ in range(_NUM_STEPS):
        step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def read(folder: Path) -> list[dict[str, Any]]:
    """Return what `ncu` counted in a step of each loop: seconds of full use of Tensor Cores, and of memory."""
    loops = []
    for name in LOOPS:
        lines = (line for line in (folder / f"{name}.csv").read_text().splitlines() if not line.startswith("=="))
        found = list(csv.DictReader(lines))[1]  # after the units
        time, tensor, memory = (float(found[metric].replace(",", "")) for metric in (TIME, TENSOR, MEMORY))
        step = 1e-9 * time / 100 / _NUM_STEPS
        loops.append({"name": name, "tensor_seconds": tensor * step, "memory_seconds": memory * step})
    return loops


def table(record: dict[str, Any]) -> str:
    """Return the shares of a step by castwise and by Nsight Compute, and the largest difference."""
    from castwise.analysis.causes import diagnose
    from castwise.analysis.result_table import compare
    from castwise.render.table import markdown_text
    from castwise.render.units import format_seconds

    found = {
        (each.row.trial.spec.workload.rpartition("/")[2], each.row.precision, each.row.techniques, folder): each
        for folder in ("why", "causes")
        for each in diagnose(compare(load(RECORDS / folder)))
    }
    rows, differences = list[list[str]](), list[float]()
    for loop in record["loops"]:
        workload, precision, techniques, _ = LOOPS[loop["name"]]
        own = found[LOOPS[loop["name"]]]
        seconds, counters = own.row.step_seconds or 0.0, own.counters
        assert counters is not None
        clocks = [reading.sm_clock_hertz for trial in own.row.trials for reading in trial.readings]
        slower = record["clock_hertz"] / statistics.fmean(clock for clock in clocks if clock)
        pairs = [
            (counters.tensor_share or 0.0, slower * loop["tensor_seconds"] / seconds),
            (counters.dram_share or 0.0, loop["memory_seconds"] / seconds),
        ]
        differences += [abs(ours - theirs) for ours, theirs in pairs]
        cells = [f"{100 * share:.1f} %" for pair in pairs for share in pair]
        cause = own.causes[0].name if own.causes else "–"
        label = markdown_text(", ".join((precision, *techniques)))
        rows.append([workload, label, format_seconds(seconds), *cells, cause])
    heading = "workload | loop | step | Tensor Cores busy: castwise | Nsight Compute | memory busy: castwise"
    lines = markdown(f"{heading} | Nsight Compute | first cause", "llrrrrrl", rows)
    return "\n".join([record["where"], "", *lines, "", f"Largest difference: {100 * max(differences):.1f} points.\n"])


def main() -> int:
    """Run a loop, or read what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", nargs="?", choices=LOOPS)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--read", type=Path, metavar="DIR")
    parser.add_argument("--where", default="", help="GPU, driver, date, ncu's version")
    parser.add_argument("--clock-mhz", type=float, default=1980.0, help="of the GPU under ncu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.metrics:
        print(METRICS)
    elif arguments.loop:
        run(arguments.loop)
    elif arguments.read:
        clock = 1e6 * arguments.clock_mhz
        write(arguments.out, {"where": arguments.where, "clock_hertz": clock, "loops": read(arguments.read)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
