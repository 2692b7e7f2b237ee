"""Seeds of epochs, runs and ranks."""

from itertools import pairwise, product

import torch

from castwise.worker.data.seeding import seed_of

RUNS = (0, 1, 2, 9293, 2**43, 2**43 + 1, 2**63 - 1)  # all that --seed takes


def test_no_two_epochs_runs_or_ranks_share_a_seed() -> None:
    seeds = [seed_of(*each) for each in product(RUNS, (0, 1, 2, 299), (0, 1, 7))]
    assert len(set(seeds)) == len(seeds)


def test_no_two_draw_the_same_on_a_cpu_whose_generator_takes_32_bits() -> None:
    keys = product((0, 1, 2, 3, 9293), (0, 1, 299), range(8))
    drawn = [int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(seed_of(*key)))) for key in keys]
    assert len(set(drawn)) == len(drawn)


def test_epochs_of_runs_and_ranks_do_not_meet_in_32_bits() -> None:
    seeds = sorted(seed_of(run, rank=rank) % 2**32 for run in range(100) for rank in range(64))
    apart = [after - before for before, after in pairwise([*seeds, seeds[0] + 2**32])]
    assert min(apart) > 100_000


def test_torch_takes_every_seed() -> None:
    for run in RUNS:
        torch.Generator().manual_seed(seed_of(run, epoch=10**6, rank=63))


def test_an_epoch_s_seed_is_its_number_behind_the_run_s() -> None:
    """`DistributedSampler` and `feeds.py` add it themselves."""
    assert seed_of(5, epoch=3, rank=2) == seed_of(5, rank=2) + 3
