"""What a machine is and which precisions it has, as `castwise doctor` prints it."""

import itertools
import platform
from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from castwise._version import __version__
from castwise.cli.measuring import looking
from castwise.orchestrator.machine import detect_devices, find_commit
from castwise.records.schema import Environment
from castwise.records.shared import shared_records
from castwise.registry.architectures import why_no_kernels
from castwise.registry.gpus import GpuModel
from castwise.registry.precisions import (
    NAMED_PRECISIONS,
    PRECISIONS,
    this_cpu,
    why_emulated,
    why_unsupported,
    why_without_torchao,
)
from castwise.show.console import print_line, result_console
from castwise.show.units import format_bytes
from castwise.telemetry.gpu import GpuUnreadableError
from castwise.telemetry.nvml import compute_processes
from castwise.telemetry.sampler import open_monitor

_FACT_WIDTH = len("products measured")  # the longest name: facts are printed as they are known


def doctor() -> int:
    console = result_console()
    console.print("This machine", style="italic")
    # They are known at once; PyTorch takes seconds to start.
    own = f"{__version__} ({commit})" if (commit := find_commit()) else __version__
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    _print_facts(console, [("CPU", this_cpu().name), ("system", system), ("castwise", own)])
    devices = detect_devices()
    with looking(outlook="Starting PyTorch, which takes longest the first time."):
        first = next(devices)
    _print_facts(console, [("torch", f"{first.torch}, torchvision {first.torchvision or 'not installed'}")])
    for number, environment in enumerate(itertools.chain([first], devices)):
        if number:
            console.print(f"\nGPU {number}", style="italic")
        _print_facts(console, _facts(environment))
        console.print("\nPrecisions", style="italic")
        console.print(_precisions(environment))
        for line in foreign_processes(environment):
            print_line(console, line, "yellow")
    return 0


def _print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    table = Table.grid(Column(min_width=_FACT_WIDTH), Column(), padding=(0, 2, 0, 0))
    for name, value in facts:
        table.add_row(name, escape(value))
    console.print(table)


def _precisions(environment: Environment) -> Table:
    table = Table("precision", "here", "what it is, or why not", box=None, pad_edge=False)
    hardware = replace(environment.hardware, name="this CPU" if environment.gpu is None else "this GPU")
    for row in (*PRECISIONS, *NAMED_PRECISIONS):
        impossible = why_unsupported(row, replace(hardware, name="this"))
        if (impossible := impossible or why_without_torchao(row, environment.torchao)) is not None:
            table.add_row(row.name, "[red]impossible[/]", escape(impossible))
        elif (emulated := why_emulated(row, hardware)) is not None:
            table.add_row(row.name, "[yellow]emulated[/]", escape(f"{emulated}: it runs, without the speed"))
        elif hardware.support(row) == "slow" and hardware.architecture is not None:
            table.add_row(row.name, "[yellow]no faster[/]", escape(hardware.architecture.note))
        else:
            table.add_row(row.name, "[green]native[/]", escape(row.summary))
    return table


def foreign_processes(environment: Environment) -> list[str]:
    """Return a line for each process that computes on the GPU now, or one that says why this is unknown."""
    if environment.gpu_uuid is None:
        return []
    try:
        processes = compute_processes(environment.gpu_uuid)
    except GpuUnreadableError as error:
        return [f"Whether other processes use the GPU is unknown: {error}."]
    if not processes:
        return ["No other process computes on this GPU."]
    return [
        f"Process {process.pid} ({process.name}) uses this GPU ({format_bytes(process.memory_bytes)}): figures suffer."
        for process in processes
    ]


def _facts(environment: Environment) -> list[tuple[str, str]]:
    if environment.gpu is None:
        return [("GPU", "none that torch can use")]
    major, minor = environment.capability or (0, 0)
    known = environment.gpu_model
    switches = {"matmul": "cuda.matmul", "convolution": "cudnn.conv", "RNN": "cudnn.rnn"}
    states = {name: environment.fp32_precision.get(path) == "tf32" for name, path in switches.items()}
    tf32 = ", ".join(f"{name} {'on' if is_on else 'off'}" for name, is_on in states.items())
    rows = [row for record in shared_records() if record.gpu == environment.gpu for row in record.rows]
    workloads = {row.workload for row in rows}
    others = (
        f"castwise has figures of {len(workloads)} workloads with this GPU; `castwise run` compares yours with them"
    )
    return [
        ("GPU", f"{environment.gpu}, {format_bytes(environment.gpu_memory_bytes)}, {environment.num_gpus} in all"),
        ("capability", environment.architecture or f"{major}.{minor}"),
        *_formats(environment),
        ("driver", f"{environment.driver or 'unknown'}, CUDA {environment.cuda}, cuDNN {environment.cudnn}"),
        ("datasheet", known.source if known else "not known to castwise: no peak to compare with"),
        ("others", others if rows else "no figures with this GPU are known; `castwise share` makes some of yours"),
        *_products(known),
        ("TF32 by default", f"{tf32} (a trial sets all three itself)"),
        *_driver_facts(environment.gpu_uuid),
    ]


def _formats(environment: Environment) -> list[tuple[str, str]]:
    """Return what the GPU's generation trains in, and what torch lacks for it."""
    generation = environment.hardware.architecture
    if generation is None:
        return [("trains in", "not known to castwise")]
    kernels = why_no_kernels(generation, environment.torch, environment.cuda)
    formats = f"{', '.join(generation.native.split()) or 'fp32'} ({generation.name})"
    return [("trains in", formats), *([("kernels", kernels)] if kernels else [])]


def _products(gpu: GpuModel | None) -> list[tuple[str, str]]:
    rates = {} if gpu is None else gpu.measured
    text = ", ".join(f"{dtype} {rate / 1e12:.4g}" for dtype, rate in rates.items())
    return [("products measured", f"{text} TFLOP/s in PyTorch, by others")] if text else []


def _driver_facts(uuid: str | None) -> list[tuple[str, str]]:
    if uuid is None:
        return []
    try:
        monitor = open_monitor(uuid)
    except GpuUnreadableError as error:
        return [("telemetry", f"not available: {error}")]
    try:
        facts = monitor.facts()
    finally:
        monitor.close()

    def known(name: str, text: str) -> str:
        return f"not available: {facts.missing[name]}" if name in facts.missing else text

    ecc_mode = "unknown" if facts.ecc_mode is None else "on" if facts.ecc_mode else "off"
    ecc = f"{ecc_mode}, {facts.ecc_errors or 0} uncorrected errors since the driver was loaded"
    return [
        ("power limit", known("power_limit_watts", f"{facts.power_limit_watts or 0:.0f} W")),
        ("highest clock", known("max_sm_clock_hertz", f"{(facts.max_sm_clock_hertz or 0) / 1e6:.0f} MHz")),
        ("persistence", known("persistence_mode", "on" if facts.persistence_mode else "off (nvidia-smi -pm 1)")),
        ("ECC", known("ecc_errors", ecc)),
    ]
