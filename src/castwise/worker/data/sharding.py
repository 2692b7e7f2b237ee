"""A rank's share of data on the device: its own batches, or its own columns of a text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from castwise.registry.workloads import Workload
from castwise.spec.trial import TrialSpec
from castwise.worker.data.seeding import seed_of
from castwise.worker.distributed import Peers
from castwise.worker.models.task import Batch, Task


def rank_batches(row: Workload, task: Task, spec: TrialSpec, count: int, peers: Peers) -> Sequence[Batch]:
    """Return the batches that this rank's steps use in turn, on its device.

    Images are drawn or shuffled with the rank's own seed. Of a text, which has one order, ranks read different columns.

    Args:
        row: The workload.
        task: Makes the batches.
        spec: The trial, on this rank's device.
        count: The number of batches, if the data has no length of its own.
        peers: The ranks that share the data.
    """
    device = torch.device(spec.device)
    if row.family != "rnn_lm" or peers.world_size == 1:
        own = seed_of(spec.seed, rank=peers.rank) if peers.rank else spec.seed  # a single process uses the trial's seed
        generator = torch.Generator(device).manual_seed(own)
        return task.make_batches(count, spec.process_batch_size, device, generator)
    generator = torch.Generator(device).manual_seed(spec.seed)
    joint = task.make_batches(count, spec.batch_size * peers.world_size, device, generator)
    return [
        (rank_columns(tokens, peers), rank_columns(targets.view(tokens.shape), peers).flatten())
        for tokens, targets in joint
    ]


def rank_columns(rows: Tensor, peers: Peers) -> Tensor:
    """Return a rank's columns of a text that all ranks share.

    Args:
        rows: Words of shape (rows, batch * world size), from `batchify`.
        peers: The ranks.

    Returns:
        Shape (rows, batch).
    """
    return rows.chunk(peers.world_size, dim=1)[peers.rank].contiguous()
