"""Seeds that no two epochs, runs or ranks share."""

# Between the seeds of two runs: 2^64 over the golden ratio, whose multiples lie far apart, made odd so that no two are
# the same. Between those of two ranks: 2^64 over the plastic number. Torch's generator on a CPU, a loader's too, takes
# the low 32 bits alone: there as well seeds lie further apart than there are epochs, and a power of 2 would not do.
# Source: pytorch/pytorch aten/src/ATen/core/MT19937RNGEngine.h (`init_with_uint32`).
_RUNS = 0x9E3779B97F4A7C15
_RANKS = 0xC13FA9A902A6328F
_SEEDS = 2**63  # torch takes 64 bits, and an epoch's number may be added


def seed_of(seed: int, epoch: int = 0, rank: int = 0) -> int:
    """Return the seed of an epoch's order and augmentation; a run's is that of its first epoch.

    Were an epoch's number added to the run's seed, the run with the next seed would see in each epoch what this one
    sees in the next.

    Args:
        seed: The run's, below 2^32 where a generator on a CPU is to tell it from all others.
        epoch: Its number from 0.
        rank: The process, where each draws its own.
    """
    return (seed * _RUNS + rank * _RANKS) % _SEEDS + epoch
