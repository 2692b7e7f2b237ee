"""What `coalesced-reduce` takes of a step on several GPUs: the copy, the collectives, and other ways to make them.

    python benchmarks/exchange_time.py [--gpus 4] [--workload resnet50] [--precision bf16-master]
        [--nccl MIN_NCHANNELS=32] … [--out FILE]

Each part is captured in a CUDA graph, as in the step, and replayed by all ranks at once. A line a setting of NCCL, the
plain one first: `--nccl NAME=VALUE,NAME=VALUE` sets its environment variables, without their `NCCL_`.

- copy: gradients into one buffer a dtype, as NCCL wants them.
- collectives: by NCCL, one buffer after another; *largest* the largest one alone, *grouped* all in one launch.
- two-shot: the largest by PyTorch's own kernel for memory that all GPUs see, where there is some.
- bring, write: castwise's kernels for such memory, which need no copy, without the barriers between them.
- whole: `coalesced-reduce` itself, by the one way or the other.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from castwise.orchestrator.machine import find_commit
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import find_workload
from castwise.spec.plan import TrialSpec, device_of_rank
from castwise.worker.distributed import Peers, join_peers
from castwise.worker.environment import read_environment
from castwise.worker.kernels.allreduce.gradient_reducer import CoalescedReduce
from castwise.worker.kernels.allreduce.reducer import CollectiveMean, SymmetricMean
from castwise.worker.models import build_task
from castwise.worker.precision import convert_weights
from castwise.worker.timing import stopwatch_of

_IN_A_GRAPH, _REPLAYS = 20, 15
Work = Callable[[], object]


def time_rank(rank: int, spec: TrialSpec, variables: dict[str, str], folder: str) -> None:
    """Time every part as one of the ranks; rank 0 writes the seconds, the slowest rank's, to `folder`/seconds."""
    os.environ.update(variables)
    device = torch.device(device_of_rank(spec.device, rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = (Path(folder) / "meeting").as_uri()
    peers = join_peers(spec.model_copy(update={"device": str(device)}), rank, meeting)
    seconds: dict[str, float | None] = {}
    for name, part in parts_of(make_reduce(spec, device, peers), device, peers):
        every = [own for own in peers.gather_objects(_time(part, device, peers)) if own is not None]
        seconds[name] = max(every, default=None)
    if rank == 0:
        (Path(folder) / "seconds").write_text(json.dumps(seconds))
    peers.close()


def make_reduce(spec: TrialSpec, device: torch.device, peers: Peers) -> CoalescedReduce:
    """Return a model's averaging of gradients, which it has made once."""
    model: nn.Module = build_task(find_workload(spec.workload)).model
    convert_weights(model, find_precision(spec.precision))
    model.to(device, memory_format=torch.channels_last)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    reduce = CoalescedReduce(model, peers)
    reduce()
    return reduce


def parts_of(reduce: CoalescedReduce, device: torch.device, peers: Peers) -> Iterable[tuple[str, Work]]:
    """Return the parts by name, in all ranks the same."""
    mean, groups = reduce.mean, reduce._groups
    assert mean is not None
    gradients = [[torch.zeros_like(weight) for weight in group] for group in groups]

    def whole() -> None:
        for group, own in zip(groups, gradients, strict=True):
            for weight, gradient in zip(group, own, strict=True):
                weight.grad = gradient
        reduce()

    by_collectives = CollectiveMean(groups, peers)
    largest = max(by_collectives.flat, key=Tensor.numel)
    found: list[tuple[str, Work]] = [
        ("copy", lambda: by_collectives.copy(gradients)),
        ("collectives", by_collectives.average),
        ("largest", lambda: peers.all_reduce_mean(largest)),
    ]
    if device.type == "cuda":
        grouped = ("grouped", lambda: _in_one_launch(by_collectives.average, device))
        found += [grouped, ("two-shot", _two_shot(largest, device))]
    if isinstance(mean, SymmetricMean):
        found += [("bring", lambda: mean.scatter(gradients)), ("write", mean.average)]
    return [*found, ("whole", whole)]


def _in_one_launch(collectives: Work, device: torch.device) -> None:
    group = distributed.group.WORLD
    assert group is not None
    group._start_coalescing(device)  # the manager's, which takes different dtypes
    collectives()
    work = group._end_coalescing(device)
    if work is not None:
        work.wait()


def _two_shot(like: Tensor, device: torch.device) -> Work:
    """Return a sum by symmetric memory; it raises where that cannot be had."""
    name = distributed.group.WORLD.group_name
    made: list[Tensor] = []

    def work() -> None:
        if not made:
            from torch.distributed import _symmetric_memory as symmetric

            buffer = symmetric.empty(like.numel(), dtype=like.dtype, device=device)
            symmetric.rendezvous(buffer.zero_(), name)
            made.append(buffer)
        torch.ops.symm_mem.two_shot_all_reduce_(made[0], "sum", name)

    return work


def _works(part: Work) -> bool:
    try:
        part()
    except (RuntimeError, AttributeError, ImportError) as error:
        print(str(error).partition("\n")[0], file=sys.stderr)
        return False
    return True


def _time(part: Work, device: torch.device, peers: Peers) -> float | None:
    """Return a part's seconds, the median over replays; None where a rank cannot make it."""
    if not all(peers.gather_objects(_works(part))):
        return None
    if device.type != "cuda":
        return 0.0  # tried, and nothing to be compared with
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_IN_A_GRAPH):
            part()
    stopwatch, times = stopwatch_of(device), []
    for _ in range(_REPLAYS):
        peers.barrier()
        times.append(stopwatch.time(graph.replay) / _IN_A_GRAPH)
    return statistics.median(times[3:])


def measure(spec: TrialSpec, settings: str) -> dict[str, Any]:
    """Return the seconds of every part under one setting of NCCL, in ranks of their own."""
    pairs = (pair.partition("=") for pair in settings.split(",") if pair)
    variables = {f"NCCL_{name}": value for name, _, value in pairs}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (spec, variables, folder)
        torch.multiprocessing.spawn(time_rank, arguments, nprocs=spec.world_size)  # type: ignore[no-untyped-call]
        return {"nccl": settings, "seconds": json.loads((Path(folder) / "seconds").read_text())}


def main() -> int:
    """Print a line a setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--workload", default="resnet50")
    parser.add_argument("--precision", default="bf16-master")
    parser.add_argument("--device", default="cuda:0", help="of rank 0; cpu tries the program itself")
    parser.add_argument("--nccl", action="append", default=[], metavar="NAME=VALUE,…")
    parser.add_argument("--out", type=Path, help="benchmarks/records/exchange/DATE-NAME.json keeps a run")
    arguments = parser.parse_args()
    spec = TrialSpec(
        workload=arguments.workload,
        precision=arguments.precision,
        loss_scale=find_precision(arguments.precision).loss_scale,
        batch_size=1,
        device=arguments.device,
        world_size=arguments.gpus,
        parallelism="ddp",
    )
    runs = []
    for settings in ("", *arguments.nccl):
        runs.append(measure(spec, settings))
        told = (
            f"{name} {'–' if each is None else f'{1e6 * each:.0f} µs'}" for name, each in runs[-1]["seconds"].items()
        )
        print(f"{settings or 'as it is'}: {', '.join(told)}", flush=True)
    if arguments.out:
        environment = read_environment(torch.device(arguments.device), find_commit())
        asked = {"workload": spec.workload, "precision": spec.precision, "num_gpus": spec.world_size}
        document = {"environment": environment.model_dump(mode="json"), **asked, "runs": runs}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
