"""Seeds of epochs, runs and ranks."""

from itertools import product

import torch

from castwise.measure.data.seeds import seed_of

RUNS = (0, 1, 2, 9293, 2**43, 2**43 + 1, 2**63 - 1)  # all that --seed takes


def test_no_two_epochs_runs_or_ranks_share_a_seed() -> None:
    seeds = [seed_of(*each) for each in product(RUNS, (0, 1, 2, 299), (0, 1, 7))]
    assert len(set(seeds)) == len(seeds)


def test_torch_takes_every_seed() -> None:
    for run in RUNS:
        torch.Generator().manual_seed(seed_of(run, epoch=10**6, rank=63))


def test_an_epoch_s_seed_is_its_number_behind_the_run_s() -> None:
    """`DistributedSampler` and `feeds.py` add it themselves."""
    assert seed_of(5, epoch=3, rank=2) == seed_of(5, rank=2) + 3
