"""Distinct seeds for epochs, runs and ranks."""

# Distance between the seeds of two runs: 2^64 / golden ratio, whose multiples are far apart, made odd so that none are
# equal. Between those of two ranks: 2^64 / plastic number. Torch's generator on a CPU, as in a loader, uses the low 32
# bits only: there too the distances are larger than the number of epochs, which a power of 2 would not ensure.
# Source: pytorch/pytorch aten/src/ATen/core/MT19937RNGEngine.h (`init_with_uint32`).
_RUNS = 0x9E3779B97F4A7C15
_RANKS = 0xC13FA9A902A6328F
_SEEDS = 2**63  # torch takes 64 bits, and an epoch's number may be added


def seed_of(seed: int, epoch: int = 0, rank: int = 0) -> int:
    """Return the seed of an epoch's order and augmentation; a run's is that of its first epoch.

    If an epoch's number were added to the run's seed, the run with the next seed would see in each epoch what this run
    sees in the next.

    Args:
        seed: The run's, below 2^32 to be distinct for a generator on a CPU.
        epoch: Its number from 0.
        rank: The process, if each draws its own numbers.
    """
    return (seed * _RUNS + rank * _RANKS) % _SEEDS + epoch
