"""How many blocks a process takes, and how long each is."""

import random
from collections.abc import Callable

import pytest

from castwise.orchestrator.block_schedule import BlockSchedule, PriorStats
from castwise.spec.trial import MeasurementProtocol

PROTOCOL = MeasurementProtocol(num_blocks=12, min_blocks=4)


def run(schedule: BlockSchedule, step_seconds: Callable[[], float]) -> list[int]:
    """Take schedule until there are no more; return how long each was."""
    lengths = []
    while schedule.goes_on:
        length = schedule.length
        schedule.add(sum(step_seconds() for _ in range(length)), length, length)
        lengths.append(length)
    return lengths


def noisy(noise: float) -> Callable[[], float]:
    rng = random.Random(3)
    return lambda: 0.1 * (1 + noise * rng.gauss(0, 1))


@pytest.mark.parametrize(
    ("changes", "prior", "noise", "lengths", "is_quiet"),
    [
        ({}, None, 0.0005, [1, 1, 1, 1], True),
        ({}, None, 0.02, [1, 1, 1, 1, 3, 3, 2], False),
        ({}, PriorStats(noise=0.02, step_seconds=0.1), 0.0, [3, 3, 3, 3], False),
        ({"num_blocks": 6, "min_blocks": 3}, PriorStats(noise=0.05, step_seconds=0.1), 0.05, [1, 1, 2, 2], False),
        ({"max_seconds": 0.1}, None, 0.02, [1, 1, 1, 1], False),
        # Of processes that are 2 % apart one need not be known to a seventh of a per cent.
        ({}, PriorStats(0.01, 0.1, process_std=0.02), 0.01, [1, 1, 1, 1], True),
    ],
)
def test_blocks_of_a_process(
    changes: dict[str, float], prior: PriorStats | None, noise: float, lengths: list[int], is_quiet: bool
) -> None:
    schedule = BlockSchedule(PROTOCOL.model_copy(update=changes), prior)
    assert run(schedule, noisy(noise)) == lengths
    assert schedule.is_quiet == is_quiet


def test_usual_blocks_until_known() -> None:
    lengths = run(BlockSchedule(PROTOCOL), noisy(0.004))
    assert 4 < len(lengths) < 12
    assert set(lengths) == {1}


def test_own_noise_counts() -> None:
    """Of one that flips between two speeds three blocks are alike in a quarter of all cases."""
    quiet = PriorStats(noise=0.0001, step_seconds=0.1)
    for fewest in (1, 3, 4):
        protocol = PROTOCOL.model_copy(update={"min_blocks": fewest})
        assert run(BlockSchedule(protocol, quiet), noisy(0.0)) == [1, 1, 1, 1]
    assert sum(run(BlockSchedule(PROTOCOL, quiet), noisy(0.02))) == 12


def test_alike_processes_need_all_blocks() -> None:
    alike = PriorStats(0.01, 0.1, process_std=0.001)
    assert sum(run(BlockSchedule(PROTOCOL, alike), noisy(0.01))) == 12
