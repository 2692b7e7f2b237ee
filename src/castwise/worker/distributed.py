"""Several GPUs as one: the processes that share a step and what they agree on, and the model spread over them."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from castwise.spec.trial import TrialSpec, device_of_rank

_T = TypeVar("_T")


class Peers:
    """The processes of a trial, as one of them sees them: here one that is by itself, to which all this is free.

    What a step's gradients go through is a collective: a rank that does not take part lets the others wait for ever.
    So whatever decides whether there is another step has to be agreed on.

    Attributes:
        rank: This process's number.
        world_size: How many processes there are.
    """

    rank = 0
    world_size = 1

    def broadcast_object(self, value: _T) -> _T:
        """Return rank 0's value, in every rank; all have to ask."""
        return value

    def gather_objects(self, value: _T) -> list[_T]:
        """Return every rank's value, in every rank, by rank; all have to ask."""
        return [value]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors rank 0's values, in every rank; all have to ask for as many of the same shapes and dtypes."""

    def all_reduce_mean(self, tensor: Tensor) -> None:
        """Give a contiguous tensor the mean of all ranks' values, in every rank; all have to ask."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def close(self) -> None:
        """End the connections; nothing can be agreed on any more."""


class ProcessGroup(Peers):
    """The ranks of a `torch.distributed` process group, which there is one of in a process."""

    def __init__(self, device: torch.device) -> None:
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        self._device = device

    def broadcast_object(self, value: _T) -> _T:
        """Return rank 0's value, in every rank."""
        box = [value]
        distributed.broadcast_object_list(box, src=0, device=self._device)
        return box[0]

    def gather_objects(self, value: _T) -> list[_T]:
        """Return every rank's value, in every rank, by rank."""
        boxes: list[Any] = [None] * self.world_size
        distributed.all_gather_object(boxes, value)
        return boxes

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors rank 0's values, in every rank."""
        for tensor in tensors:
            values = tensor.detach().contiguous()  # NCCL takes no others
            distributed.broadcast(values, src=0)
            tensor.copy_(values)

    def all_reduce_mean(self, tensor: Tensor) -> None:
        """Give a contiguous tensor the mean of all ranks' values, in every rank.

        It is divided before it is summed, as DistributedDataParallel does: of float16 gradients under a loss scale the
        sum can overflow where the mean does not. NCCL's mean is made so as well, and takes no kernel for it.

        Source: NVIDIA/nccl src/enqueue.cc (hostToDevRedOp: ncclAvg of floats multiplies by 1 / ranks first);
        pytorch/pytorch torch/csrc/distributed/c10d/reducer.cpp (mark_variable_ready_dense).
        """
        if self._device.type == "cuda":
            distributed.all_reduce(tensor, distributed.ReduceOp.AVG)
        else:
            distributed.all_reduce(tensor.mul_(1 / self.world_size))  # gloo has no mean

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        distributed.barrier()

    def close(self) -> None:
        """End the process group."""
        distributed.destroy_process_group()


def join_peers(spec: TrialSpec, rank: int, rendezvous: str) -> Peers:
    """Meet the other processes of a `ddp` trial and return them.

    On a CPU the ranks share out the cores: each having threads for all of them would slow all down.

    Args:
        spec: The trial, on this rank's device.
        rank: This process's number, from 0.
        rendezvous: `file://` URI of a file that does not exist yet, the same for all; it needs no port, which
            another program might take first.

    Raises:
        RuntimeError: The others did not come within the protocol's `timeout_seconds`.
    """
    device = torch.device(spec.device)
    is_cuda = device.type == "cuda"
    if not is_cuda:
        torch.set_num_threads(max(1, torch.get_num_threads() // spec.world_size))
    distributed.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=spec.world_size,
        timeout=timedelta(seconds=spec.protocol.timeout_seconds),
        device_id=device if is_cuda else None,
    )
    return ProcessGroup(device)


def spread(model: nn.Module, spec: TrialSpec) -> nn.Module:
    """Return what the forward pass goes through, so that a step runs on all GPUs of a spec: the model in a wrapper.

    Args:
        model: On the spec's device, with its precision applied: the gradients that are averaged over the ranks, or
            summed over the replicas, are those that backward leaves.
        spec: The trial, on this rank's device.
    """
    if spec.parallelism == "ddp":
        # Its ids are for models on GPUs; without buffers' rank-0 values each step, batch norm would drift apart.
        return DistributedDataParallel(model, device_ids=[spec.device] if spec.device_type == "cuda" else None)
    if spec.parallelism == "dp":
        return nn.DataParallel(model, device_ids=list(devices_of(spec)))
    return model


def devices_of(spec: TrialSpec) -> tuple[torch.device, ...]:
    """Return the devices that this process's steps run on."""
    count = spec.world_size // spec.num_processes
    return tuple(torch.device(device_of_rank(spec.device, replica)) for replica in range(count))
