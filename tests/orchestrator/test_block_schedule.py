"""How many blocks a process takes, and how long each is."""

import random
from collections.abc import Callable

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


def test_quiet_process_takes_min_blocks() -> None:
    schedule = BlockSchedule(PROTOCOL)
    assert run(schedule, noisy(0.0005)) == [1, 1, 1, 1]
    assert schedule.is_quiet


def test_noisy_process_takes_long_blocks() -> None:
    schedule = BlockSchedule(PROTOCOL)
    assert run(schedule, noisy(0.02)) == [1, 1, 1, 1, 3, 3, 2]
    assert not schedule.is_quiet


def test_usual_blocks_until_known() -> None:
    lengths = run(BlockSchedule(PROTOCOL), noisy(0.004))
    assert 4 < len(lengths) < 12
    assert set(lengths) == {1}


def test_prior_stats_count_from_the_first_block() -> None:
    assert run(BlockSchedule(PROTOCOL, PriorStats(noise=0.02, step_seconds=0.1)), noisy(0.0)) == [3, 3, 3, 3]


def test_own_noise_counts() -> None:
    """Of one that flips between two speeds three blocks are alike in a quarter of all cases."""
    quiet = PriorStats(noise=0.0001, step_seconds=0.1)
    for fewest in (1, 3, 4):
        protocol = PROTOCOL.model_copy(update={"min_blocks": fewest})
        assert run(BlockSchedule(protocol, quiet), noisy(0.0)) == [1, 1, 1, 1]
    assert sum(run(BlockSchedule(PROTOCOL, quiet), noisy(0.02))) == 12


def test_max_seconds_and_min_blocks() -> None:
    protocol = MeasurementProtocol(num_blocks=12, min_blocks=4, max_seconds=0.1)
    assert len(run(BlockSchedule(protocol), noisy(0.02))) == 4


def test_few_blocks() -> None:
    protocol = MeasurementProtocol(num_blocks=6, min_blocks=3)
    assert run(BlockSchedule(protocol, PriorStats(noise=0.05, step_seconds=0.1)), noisy(0.05)) == [1, 1, 2, 2]


def test_large_between_process_std_needs_fewer_blocks() -> None:
    """Of processes that are 2 % apart one need not be known to a seventh of a per cent."""
    noise, step_seconds = 0.01, 0.1
    alike = PriorStats(noise, step_seconds, process_std=0.001)
    differing = PriorStats(noise, step_seconds, process_std=0.02)
    assert sum(run(BlockSchedule(PROTOCOL, alike), noisy(noise))) == 12
    assert run(BlockSchedule(PROTOCOL, differing), noisy(noise)) == [1, 1, 1, 1]
