"""Seeds that no two epochs, runs or ranks share."""

_EPOCH_BITS = 20
_SEED_BITS = 32


def seed_of(seed: int, epoch: int = 0, rank: int = 0) -> int:
    """Return the seed of an epoch's order and augmentation, or with that of its first epoch, of a run's.

    Seeds beside each other are runs beside each other: were an epoch's number just added, the second run would see in
    each epoch what the first saw in the next one.

    Args:
        seed: The run's.
        epoch: Its number from 0.
        rank: The process, where each draws its own.
    """
    return (rank << _SEED_BITS + _EPOCH_BITS) + (seed << _EPOCH_BITS) + epoch
