"""Made-up records of every kind that a report has a chart or a table for, and the same with hostile words in them."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fake_engine import (
    PRECISION_NAMES,
    FakeEngine,
    fake_environment,
    fake_epoch,
    fake_facts,
    fake_run,
    fake_spec,
    fake_training,
    fake_trial,
    machine_with,
    step_time_of,
)
from fake_gpu import fake_gpu_facts, fake_reading

from castwise.max_batch.options import MaxBatchOptions
from castwise.max_batch.search import prepare_max_batch
from castwise.records.schema import (
    GradientHistogram,
    KernelTime,
    ModuleNumerics,
    ModuleTime,
    RankSamples,
    StepFlops,
    StepNumerics,
    StepProfile,
    Trial,
)
from castwise.records.store import Store
from castwise.registry.kernel_classes import KernelClass
from castwise.spec.trial import MeasurementProtocol

# Ends every element that text may stand in, and then asks for a script in each way that browsers know.
HOSTILE = (
    "</script></title></style></textarea><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
    "\"'><svg onload=window.pwned=1><a href='javascript:window.pwned=1'>%{y}|`*_\u2028"
)


def steady(precision: str = "fp32", repeat: int = 0, factor: float = 1.0, **changes: object) -> Trial:
    """Return a trial of a round, with readings; rounds differ by a thousandth or so."""
    spec = fake_spec(precision, repeat=repeat, protocol=MeasurementProtocol(num_blocks=8), **changes)
    step = 0.1 * step_time_of(precision) * factor * spec.batch_size / 256
    times = tuple(step * (1 + (13 * turn + 7 * repeat + 5 * repeat * len(precision)) % 11 / 4000) for turn in range(8))
    readings = tuple(
        fake_reading(seconds=1.0, energy_joules=300.0, max_temperature_celsius=50.0 + turn) for turn in range(8)
    )
    trial = fake_trial(spec, step_seconds=times, readings=readings, gpu_facts=fake_gpu_facts())
    peak = int(2**30 * (1 + step_time_of(precision)) * spec.batch_size / 256)
    ranks = tuple(
        rank.model_copy(
            update={
                "peak_allocated_bytes": peak,
                "peak_reserved_bytes": peak + 2**28,
                "driver_used_bytes": peak + 2**29,
            }
        )
        for rank in trial.ranks * spec.num_processes
    )
    facts = fake_facts(num_parameters=25_000_000, param_dtypes={"float32": 25_000_000}, data_bytes=2**27)
    started = f"2000-01-01T00:{repeat:02d}:00.000+00:00"
    return trial.model_copy(
        update={"ranks": ranks, "facts": facts, "session_id": f"sitting-{repeat}", "started_at": started}
    )


def every_kind() -> list[Trial]:
    """Return records that every chart of the registry has something in."""
    rounds = [steady(precision, repeat) for repeat in range(3) for precision in PRECISION_NAMES]
    batches = [steady(precision, batch_size=batch) for batch in (32, 64, 512) for precision in ("fp32", "bf16-mixed")]
    too_large = fake_trial(
        fake_spec("fp32", batch_size=4096, protocol=MeasurementProtocol(num_blocks=8)),
        status="oom",
        message="CUDA out of memory (fake)",
        step_seconds=(),
    )
    spread = [
        steady(
            "bf16-mixed", 0, 1.1, workload="resnet101", world_size=number, parallelism="ddp" if number > 1 else "none"
        )
        for number in (1, 2, 4)
    ]
    techniques = ("channels_last", "fused", "compile")
    tuned = [
        steady("bf16-mixed", 0, 0.8**count, workload="wrn-28-10", techniques=techniques[:count]) for count in range(4)
    ]
    diverged = fake_trial(
        fake_spec("fp16-true", workload="dpn92"),
        status="diverged",
        message="the loss was nan (fake)",
        step_seconds=(0.1,) * 6,
        losses=(1.0, 0.9, 0.8, 0.7, float("inf"), float("nan")),
    )
    plain = fake_trial(fake_spec("fp32", workload="dpn92"), step_seconds=(0.2,) * 6)
    runs = [
        fake_run(fake_training(precision, {"epochs": 4, "validate_each_epoch": True}, workload=workload, data_set=data))
        for workload, data in (("wrn-28-10", "cifar10"), ("lstm-lm", "wikitext-2"))
        for precision in ("fp32", "fp16-mixed", "bf16-mixed")
    ]
    recipe = {"epochs": 4, "validate_each_epoch": True}
    runs += [  # pairs with those above
        fake_run(fake_training(precision, recipe, workload="lstm-lm", data_set="wikitext-2", seed=1))
        for precision in ("fp32", "bf16-mixed")
    ]
    own = [{"accuracy": None, "validation_loss": None, "score": 0.5 + number} for number in range(4)]
    for precision in ("fp32", "bf16-mixed"):
        spec = fake_training(precision, recipe, workload="own.py:build")
        epochs = (fake_epoch(spec, number).model_copy(update=scored) for number, scored in enumerate(own))
        runs.append(fake_run(spec, *epochs))
    return [*rounds, *batches, too_large, *spread, *tuned, plain, diverged, *runs, *fits("dpn92")]


def profiled(precision: str = "fp32") -> Trial:
    """Return a trial on an H200 with a profile, a tenth of it idle, and FLOPs, half of them in float32 or all."""
    trial = steady(precision, workload="resnet18")
    step = 0.1 * step_time_of(precision)
    name: KernelClass = "plain_product" if precision == "fp32" else "tensor_core_product"
    profile = StepProfile(
        device_type="cuda",
        num_steps=3,
        seconds=step,
        busy_seconds=0.9 * step,
        idle_seconds=0.1 * step,
        num_kernels=300,
        class_seconds={name: 0.3 * step, "normalisation": 0.4 * step, "elementwise": 0.15 * step, "copy": 0.05 * step},
        module_seconds={"layer1": ModuleTime(forward_seconds=0.2 * step, backward_seconds=0.3 * step)},
        kernels=(KernelTime(name="kernel", kind="normalisation", launches=1, seconds=0.4 * step),),
        numerics=StepNumerics(
            modules=(
                ModuleNumerics(
                    name="conv1",
                    num_weights=100,
                    weights=GradientHistogram(first_exponent=-30, counts="31 0 20 49", largest=2.0**-27),
                    output_sqnr_db=40.0,
                    gradient_sqnr_db=30.0,
                ),
            )
        ),
    )
    flops = StepFlops(
        products={"convolution": {"fp32": 2 * 10**12} if precision == "fp32" else {"bf16": 10**12, "fp32": 10**12}},
        saved_bytes=5 * 10**9,
    )
    (rank, *ranks) = trial.ranks
    return trial.model_copy(
        update={
            "environment": fake_environment(gpu="NVIDIA H200"),
            "profile": profile,
            "ranks": (rank.model_copy(update={"flops": flops}), *ranks),
        }
    )


def fits(workload: str, *precisions: str) -> list[Trial]:
    """Return the trials of a search for the largest batch, the first on the first of January 2000."""
    request = MaxBatchOptions(workload, precisions=precisions or ("fp32", "fp16-master"))
    trials = prepare_max_batch(request, find_machine=machine_with(FakeEngine())).run().trials
    order = sorted(trials, key=lambda trial: trial.started_at)
    return [
        trial.model_copy(update={"started_at": f"2000-01-01T01:{minute:02d}:00.000+00:00"})
        for minute, trial in enumerate(order)
    ]


def many(count: int) -> Iterator[Trial]:
    """Return as many trials, of seven precisions at ever more batch sizes."""
    cells = ((batch, precision) for batch in itertools.count(1) for precision in PRECISION_NAMES)
    for batch, precision in itertools.islice(cells, count):
        yield steady(precision, batch_size=batch)


def poisoned(trial: Trial, *spared: str) -> Trial:
    """Return a trial with hostile words behind those in every field that takes words.

    Args:
        trial: The trial.
        *spared: Fields to leave as they are: a chart of speed-ups needs precisions that are known.
    """
    return Trial.model_validate(_poison(trial.model_dump(mode="json"), "", {*_FIXED, *spared}))


# What has other words than these is refused when the record is read.
_FIXED = {"status", "kind", "parallelism", "recipe", "protocol", "seconds", "value", "device_type", "format"}
_MAY_BE_NONE = {"data_note", "torchvision", "weights"}
_FREE_KEYS = {"param_dtypes", "fp32_precision", "missing"}


def _poison(value: Any, name: str, spared: set[str]) -> Any:
    if name in spared:
        return value
    if isinstance(value, dict):
        words = f" {HOSTILE}" if name in _FREE_KEYS else ""
        return {f"{key}{words}": _poison(each, key, spared) for key, each in value.items()}
    if isinstance(value, list):
        return [_poison(each, name, spared) for each in value]
    if isinstance(value, str) or (value is None and name in _MAY_BE_NONE):
        return f"{value} {HOSTILE}"
    return value


def stored(folder: Path, trials: list[Trial]) -> Path:
    """Write trials into a results folder and return it."""
    store = Store(folder)
    for trial in trials:
        store.save(trial)
    return folder


def other_machine(trial: Trial) -> Trial:
    """Return the same trial, half as fast, on another GPU."""
    ranks = tuple(
        RankSamples.model_validate(
            rank.model_dump()
            | {"blocks": [block.model_dump() | {"seconds": 2 * block.seconds} for block in rank.blocks]}
        )
        for rank in trial.ranks
    )
    return trial.model_copy(update={"environment": fake_environment(gpu="Slow GPU"), "ranks": ranks})
