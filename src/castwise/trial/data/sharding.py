"""A rank's share of data on the device, and distinct seeds for epochs, runs and ranks."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from castwise.apply.pytree import Batch
from castwise.registry.workloads import Workload
from castwise.spec.trial import TrialSpec
from castwise.trial.distributed import Peers
from castwise.trial.models.task import Task

# Distance between the seeds of two runs: 2^64 / golden ratio, whose multiples are far apart, made odd so that none are
# equal. Between those of two ranks: 2^64 / plastic number. Torch's generator on a CPU, as in a loader, uses the low 32
# bits only: there too the distances are larger than the number of epochs, which a power of 2 would not ensure.
# Source: pytorch/pytorch aten/src/ATen/core/MT19937RNGEngine.h (`init_with_uint32`).
_RUNS = 0x9E3779B97F4A7C15
_RANKS = 0xC13FA9A902A6328F
_SEEDS = 2**63  # torch takes 64 bits, and an epoch's number may be added


def seed_of(seed: int, epoch: int = 0, rank: int = 0) -> int:
    """Return the seed of an epoch's order and augmentation in a rank; a run's is that of its first epoch.

    If an epoch's number were added to the run's seed, the run with the next seed would see in each epoch what this run
    sees in the next. The run's seed is below 2^32 to be distinct for a generator on a CPU.
    """
    return (seed * _RUNS + rank * _RANKS) % _SEEDS + epoch


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, Python and NumPy: the user's own code may draw from any of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def rank_batches(row: Workload, task: Task, spec: TrialSpec, count: int, peers: Peers) -> Sequence[Batch]:
    """Return the batches that this rank's steps use in turn, on its device; `count` if the data has no length.

    Images are drawn or shuffled with the rank's own seed. Of a text, which has one order, ranks read different columns.
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
    """Return a rank's columns, of shape (rows, batch), of words that ranks share, (rows, batch * world size)."""
    return rows.chunk(peers.world_size, dim=1)[peers.rank].contiguous()
