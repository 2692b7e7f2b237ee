"""Two GPUs: a rank each, or replicas of DataParallel; real processes, as a sweep starts them."""

import math

import pytest
import torch
from real_gpu import measured, on_gpus, skip_unsupported

from castwise.records.schema import RankSamples, Trial
from castwise.registry.precisions import PRECISIONS, Precision, find_precision
from castwise.spec.recipe import Loader, Recipe
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.spec.types import Parallelism

pytestmark = on_gpus(2)

SHORT = MeasurementProtocol(
    warm_up_steps=2, warm_up_seconds=2.0, block_seconds=0.05, num_blocks=3, timeout_seconds=120.0
)
RESNET18_BYTES = 4 * 11_689_512


def measure(precision: str, parallelism: Parallelism = "ddp", **changes: object) -> Trial:
    row = find_precision(precision)
    skip_unsupported(row)
    fields = {
        "workload": "resnet18",
        "precision": precision,
        "loss_scale": row.loss_scale,
        "batch_size": 32,
        "device": "cuda:0",
        "world_size": 2,
        "parallelism": parallelism,
        "protocol": SHORT,
    }
    return measured(TrialSpec.model_validate(fields | changes))


def check_steady(trial: Trial, num_ranks: int) -> None:
    # Without loss scaling fp16 gradients under- and overflow: the loss may be NaN, the times stand.
    expected = ("ok", "diverged") if trial.spec.precision == "fp16-true" else ("ok",)
    assert trial.status in expected, f"{trial.message}\n{trial.log}"
    assert len(trial.ranks) == num_ranks
    for rank in trial.ranks:
        assert len(rank.blocks) == 3
        assert all(block.seconds > 0 for block in rank.blocks)
        assert trial.status == "diverged" or all(math.isfinite(block.loss) for block in rank.blocks)
        check_memory(rank, trial)
    assert trial.facts is not None
    assert trial.facts.num_parameters == 11_689_512


def check_memory(rank: RankSamples, trial: Trial) -> None:
    assert rank.peak_allocated_bytes is not None
    assert rank.peak_reserved_bytes is not None
    halved = 1 if find_precision(trial.spec.precision).param_dtype == "float32" else 2
    assert RESNET18_BYTES / halved < rank.peak_allocated_bytes <= rank.peak_reserved_bytes


@pytest.mark.parametrize("row", PRECISIONS, ids=lambda row: row.name)
def test_a_rank_on_each_gpu(row: Precision) -> None:
    trial = measure(row.name)
    check_steady(trial, num_ranks=2)
    first, second = trial.ranks
    assert [block.num_steps for block in first.blocks] == [block.num_steps for block in second.blocks]
    losses = [[block.loss for block in rank.blocks if math.isfinite(block.loss)] for rank in trial.ranks]
    assert losses[0] != losses[1] or not any(losses), "each has its own data"
    assert [block.loss_scale for block in first.blocks] == [block.loss_scale for block in second.blocks]


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "fp16-master"])
def test_replicas_of_one_process(precision: str) -> None:
    check_steady(measure(precision, "dp"), num_ranks=1)


def test_a_language_model_on_two_gpus() -> None:
    trial = measure("fp16-mixed", workload="lstm-lm", batch_size=20)
    assert (trial.status, len(trial.ranks)) == ("ok", 2), trial.message


@pytest.mark.parametrize("parallelism", ["ddp", "dp"])
def test_a_training_run_on_two_gpus(parallelism: Parallelism) -> None:
    recipe = Recipe(epochs=2, samples_per_epoch=512, loader=Loader(num_workers=2, pin_memory=True), max_steps=5)
    trial = measure("fp16-mixed", parallelism, kind="training", recipe=recipe)
    assert trial.status == "ok", f"{trial.message}\n{trial.log}"
    per_rank = 32 * 5 * (2 if parallelism == "dp" else 1)
    for rank in trial.ranks:
        assert [(epoch.num_steps, epoch.num_samples) for epoch in rank.epochs] == [(5, per_rank)] * 2
    assert len(trial.ranks) == (2 if parallelism == "ddp" else 1)


def test_memory_that_is_not_there_ends_both_ranks() -> None:
    trial = measure("fp32", batch_size=100_000)
    assert trial.status == "oom", trial.message
    assert trial.message.startswith("rank ")
    assert measure("fp32").status == "ok", "the memory is free again"


def test_gpus_that_are_not_there() -> None:
    count = torch.cuda.device_count()
    trial = measure("fp32", world_size=count + 1)
    assert (trial.status, trial.message) == (
        "unsupported",
        f"{count + 1} GPUs are asked for, and this machine has {count}",
    )
