import statistics

import pytest
from fake_engine import fake_facts, fake_spec, fake_trial
from hypothesis import given
from hypothesis import strategies as st

from castwise.analysis import steady_metrics
from castwise.records.schema import Block, RankSamples, Trial

NOTHING = fake_trial(status="oom", step_seconds=())

times = st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=1, max_size=30)


def with_blocks(*blocks: tuple[float, int]) -> Trial:
    samples = RankSamples(blocks=tuple(Block(seconds=s, num_steps=n, loss=1.0) for s, n in blocks))
    return fake_trial().model_copy(update={"ranks": (samples,)})


def test_step_seconds() -> None:
    assert steady_metrics.step_seconds(with_blocks((1.0, 10), (4.0, 20), (0.9, 3))) == pytest.approx(0.2)
    assert steady_metrics.step_seconds(with_blocks((1.0, 10), (4.0, 20))) == pytest.approx(0.15)


def test_throughput_counts_a_samples_units_and_every_process() -> None:
    trial = fake_trial(
        fake_spec(workload="lstm-lm", batch_size=20, world_size=2, parallelism="ddp"),
        step_seconds=(0.1,),
        facts=fake_facts(units_per_sample=35),
    )
    assert steady_metrics.throughput(trial) == pytest.approx(20 * 35 * 2 / 0.1)


def test_throughput_counts_the_samples_of_the_timed_steps() -> None:
    trial = fake_trial(fake_spec(batch_size=64), step_seconds=(0.5, 0.5))
    rank = trial.ranks[0]
    blocks = [
        block.model_copy(update={"num_samples": n * block.num_steps})
        for block, n in zip(rank.blocks, (64, 12), strict=True)
    ]
    counted = trial.model_copy(update={"ranks": (rank.model_copy(update={"blocks": tuple(blocks)}),)})
    assert steady_metrics.throughput(counted) == pytest.approx(38 / 0.5)
    partly = rank.model_copy(update={"blocks": (blocks[0], rank.blocks[1])})
    assert steady_metrics.throughput(trial.model_copy(update={"ranks": (partly,)})) == pytest.approx(64 / 0.5)


def pseudomedian_by_hand(values: list[float]) -> float:
    if len(values) < 4:
        return sorted(values)[len(values) // 2] if len(values) % 2 else sum(values) / 2
    return statistics.median([(a + b) / 2 for i, a in enumerate(values) for b in values[i:]])


@given(times)
def test_throughput_times_step_time_is_the_batch(seconds: list[float]) -> None:
    trial = fake_trial(step_seconds=tuple(seconds))
    throughput, step = steady_metrics.throughput(trial), steady_metrics.step_seconds(trial)
    assert throughput is not None
    assert step is not None
    assert step == pytest.approx(pseudomedian_by_hand(seconds))
    assert throughput * step == pytest.approx(256)
    assert 256 / max(seconds) <= throughput * (1 + 1e-9)
    assert throughput <= 256 / min(seconds) * (1 + 1e-9)


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    # Quartiles of 1, 2, 3, 4, 5 by linear interpolation are 2, 3, 4.
    assert steady_metrics.spread(fake_trial(step_seconds=(5.0, 1.0, 4.0, 2.0, 3.0))) == pytest.approx(2 / 3)
    assert steady_metrics.spread(fake_trial(step_seconds=(0.1,) * 4)) == pytest.approx(0)
    assert steady_metrics.spread(fake_trial(step_seconds=(0.1,) * 3)) is None, "too few blocks"


def test_final_loss_has_its_step() -> None:
    samples = RankSamples(
        blocks=(Block(seconds=1, num_steps=10, loss=2.0), Block(seconds=1, num_steps=7, loss=1.5)),
    )
    trial = fake_trial(facts=fake_facts(warm_up_steps=5)).model_copy(update={"ranks": (samples,)})
    assert steady_metrics.final_loss(trial) == (1.5, 5 + 10 + 7)


def test_skipped_steps_and_peaks_are_taken_over_all_processes() -> None:
    ranks = tuple(
        RankSamples(
            blocks=(Block(seconds=1, num_steps=10, loss=1, skipped_steps=skipped),),
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
        )
        for skipped, allocated, reserved in ((1, 100, None), (2, 300, 400), (0, None, None))
    )
    trial = fake_trial().model_copy(update={"ranks": ranks})
    assert steady_metrics.skipped_steps(trial) == 3
    assert steady_metrics.peak_allocated_bytes(trial) == 300
    assert steady_metrics.peak_reserved_bytes(trial) == 400


@pytest.mark.parametrize(
    "metric",
    [
        steady_metrics.step_seconds,
        steady_metrics.throughput,
        steady_metrics.spread,
        steady_metrics.final_loss,
        steady_metrics.peak_allocated_bytes,
        steady_metrics.peak_reserved_bytes,
    ],
    ids=lambda metric: metric.__name__,
)
def test_figures_of_a_trial_without_blocks_are_none(metric: object) -> None:
    assert metric(NOTHING) is None  # type: ignore[operator]
    assert steady_metrics.skipped_steps(NOTHING) == 0


def test_block_lengths_are_in_steps() -> None:
    trial = fake_trial(step_seconds=(0.1, 0.1, 0.1))
    blocks = tuple(Block(seconds=0.1 * count, num_steps=count, loss=1.0) for count in (2, 6, 2))
    trial = trial.model_copy(update={"ranks": (RankSamples(blocks=blocks),)})
    assert steady_metrics.block_lengths(trial) == [1.0, 3.0, 1.0]
    assert steady_metrics.block_means(trial) == pytest.approx([0.1] * 3)
