"""Steps on several GPUs: the ranks' process group, and the model wrapped for them."""

import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from castwise.apply.techniques.blocks import repeated_blocks
from castwise.errors import UsageError
from castwise.registry.techniques import step_config_of
from castwise.spec.trial import TrialSpec, device_of_rank

_T = TypeVar("_T")


class Peers:
    """The processes of a trial, as one of them sees them. This class is a single process: its methods do nothing.

    The gradients of a step go through a collective: if a rank does not take part, the others wait forever. So
    whatever decides whether there is another step must be the same in all ranks, and all must call these methods.
    """

    rank = 0
    world_size = 1
    join_seconds = 0.0  # until all were there

    def broadcast_object(self, value: _T) -> _T:
        """Return rank 0's value in every rank."""
        return value

    def gather_objects(self, value: _T) -> list[_T]:
        """Return every rank's value in every rank, by rank."""
        return [value]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values into tensors, in every rank; all must pass as many of the same shapes and dtypes."""

    def all_reduce_mean(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the mean over all ranks, in every rank."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def close(self) -> None:
        """End the connections; nothing can be exchanged any more."""


class _ProcessGroup(Peers):
    def __init__(self, device: torch.device) -> None:
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        self._device = device

    def broadcast_object(self, value: _T) -> _T:
        box = [value]
        distributed.broadcast_object_list(box, src=0, device=self._device)
        return box[0]

    def gather_objects(self, value: _T) -> list[_T]:
        boxes: list[Any] = [None] * self.world_size
        distributed.all_gather_object(boxes, value)
        return boxes

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            values = tensor.detach().contiguous()  # NCCL requires it
            distributed.broadcast(values, src=0)
            tensor.copy_(values)

    def all_reduce_mean(self, tensor: Tensor) -> None:
        # Divided before it is summed, as DistributedDataParallel does: the sum of float16 gradients under a loss scale
        # can overflow though the mean does not. NCCL's mean does the same, without a kernel of its own.
        # Source: NVIDIA/nccl src/enqueue.cc (hostToDevRedOp: ncclAvg of floats multiplies by 1 / ranks first);
        # pytorch/pytorch torch/csrc/distributed/c10d/reducer.cpp (mark_variable_ready_dense).
        if self._device.type == "cuda":
            distributed.all_reduce(tensor, distributed.ReduceOp.AVG)
        else:
            distributed.all_reduce(tensor.mul_(1 / self.world_size))  # gloo has no mean

    def barrier(self) -> None:
        distributed.barrier()

    def close(self) -> None:
        distributed.destroy_process_group()


def join_peers(spec: TrialSpec, rank: int, rendezvous: str) -> Peers:
    """Form the process group of a `ddp` or `fsdp` trial and return it; on a CPU the ranks divide the cores' threads.

    `rendezvous` is the `file://` URI of a file that does not exist yet, the same for all ranks. Unlike a port, no other
    program can take it first.

    Raises:
        RuntimeError: The other ranks did not join within the protocol's `timeout_seconds`.
    """
    device, began = torch.device(spec.device), time.perf_counter()
    is_cuda = device.type == "cuda"
    if not is_cuda:  # if each had threads for all of the cores, all would be slower
        torch.set_num_threads(max(1, torch.get_num_threads() * spec.num_nodes // spec.world_size))
    distributed.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=spec.world_size,
        timeout=timedelta(seconds=spec.protocol.timeout_seconds),
        device_id=device if is_cuda else None,
    )
    peers = _ProcessGroup(device)
    peers.join_seconds = time.perf_counter() - began
    return peers


def spread(model: nn.Module, spec: TrialSpec) -> nn.Module:
    """Return the converted model wrapped so that a step runs on all GPUs of a spec, which is on this rank's device."""
    loop = step_config_of(spec.techniques)
    if spec.parallelism == "ddp":
        # It copies rank 0's buffers in each step, without which batch norm would drift apart. Ids are for GPUs only.
        ids, arguments = [spec.device] if spec.device_type == "cuda" else None, dict(loop.ddp_arguments)
        wrapper = DistributedDataParallel(model, device_ids=ids, **arguments)  # type: ignore[arg-type]  # by its name
        if loop.reduces_in_bf16:
            wrapper.register_comm_hook(None, bf16_compress_hook)
        return wrapper
    if spec.parallelism == "dp":
        return nn.DataParallel(model, device_ids=list(devices_of(spec)))
    return model


def shard(model: nn.Module, peers: Peers, *, keeps_whole_weights: bool = False) -> None:
    """Shard a model in place by FSDP2: each repeated block by itself, and then the rest; parameters are replaced.

    Shards, what ranks exchange and gradients are float32, and autocast casts as in any other loop. A
    MixedPrecisionPolicy would halve what ranks exchange, but it rounds all weights: those of normalizations and
    embeddings, too, which autocast leaves in float32.
    """
    peers.broadcast([*model.parameters(), *model.buffers()])
    device_type = next(model.parameters()).device.type
    assert distributed.group.WORLD is not None, "the ranks have joined"
    mesh = DeviceMesh.from_group(distributed.group.WORLD, device_type)
    uses = _count_uses(model)
    # Tied weights stay tied only if they are sharded together.
    blocks = [block for block in repeated_blocks(model) if _count_uses(block).items() <= uses.items()]
    for part in (*blocks, model):  # by default torch keeps what is no block's
        fully_shard(part, mesh=mesh, reshard_after_forward=False if keeps_whole_weights else None)
    for part in model.modules() if device_type == "cpu" else ():
        if isinstance(part, FSDPModule):
            if not hasattr(part, "set_force_sum_reduction_for_comms"):
                raise UsageError(f"fsdp on a CPU needs a newer torch; this is torch {torch.__version__}.")
            part.set_force_sum_reduction_for_comms(True)  # gloo has no mean


def _count_uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Return the number of a module's parts that have each of its parameters."""
    return Counter(parameter for part in module.modules() for parameter in part.parameters(recurse=False))


def devices_of(spec: TrialSpec) -> tuple[torch.device, ...]:
    """Return the devices that this process's steps run on."""
    count = spec.world_size // spec.num_processes
    return tuple(torch.device(device_of_rank(spec.device, replica)) for replica in range(count))
