"""Seeds that no two epochs, runs or ranks share."""

# Between the seeds of two runs: 2^64 over the golden ratio, whose multiples lie far apart, made odd so that no two are
# the same. Between those of two ranks: more than there are epochs.
_RUNS = 0x9E3779B97F4A7C15
_RANKS = 2**32
_SEEDS = 2**63  # torch takes 64 bits, and an epoch's number may be added


def seed_of(seed: int, epoch: int = 0, rank: int = 0) -> int:
    """Return the seed of an epoch's order and augmentation; a run's is that of its first epoch.

    Were an epoch's number added to the run's seed, the run with the next seed would see in each epoch what this one
    sees in the next.

    Args:
        seed: The run's.
        epoch: Its number from 0.
        rank: The process, where each draws its own.
    """
    return (seed * _RUNS + rank * _RANKS) % _SEEDS + epoch
