"""Telemetry of a trial on two GPUs: real processes, and what the real driver says of both."""

import subprocess
import sys

import pytest
import torch
from real_gpu import measured, on_gpus

from castwise.analysis.energy import energy_of, power_watts
from castwise.analysis.warnings import warnings_of
from castwise.records.schema import Trial
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.spec.types import Parallelism
from castwise.telemetry.sampler import open_monitor

pytestmark = on_gpus(2)

# A block of half a second holds a tick of the driver's counter, which comes ten times a second.
BLOCKS = MeasurementProtocol(
    warm_up_steps=2, warm_up_seconds=2.0, block_seconds=0.5, num_blocks=3, timeout_seconds=120.0
)


def uuid_of(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def measure(parallelism: Parallelism, world_size: int = 2) -> Trial:
    spec = TrialSpec(
        workload="resnet18",
        precision="fp32",
        loss_scale="none",
        batch_size=64,
        device="cuda:0",
        world_size=world_size,
        parallelism=parallelism,
        protocol=BLOCKS,
    )
    trial = measured(spec)
    assert trial.status == "ok", f"{trial.message}\n{trial.log}"
    return trial


def counters() -> list[float]:
    monitors = [open_monitor(uuid_of(index)) for index in range(2)]
    readings = [monitor.read_energy().energy_joules for monitor in monitors]
    for monitor in monitors:
        monitor.close()
    if None in readings:
        pytest.skip("these GPUs have no energy counter")
    return [joules or 0.0 for joules in readings]


@pytest.mark.parametrize("parallelism", ["ddp", "dp"])
def test_both_gpus_are_watched_and_their_energy_is_the_sum(parallelism: Parallelism) -> None:
    before = counters()
    trial = measure(parallelism)
    spent = [after - first for after, first in zip(counters(), before, strict=True)]
    assert trial.environment.gpu_uuids[:2] == (uuid_of(0), uuid_of(1))
    assert [reading.num_gpus for reading in trial.readings] == [2, 2, 2]
    assert "gpu" not in {name for reading in trial.readings for name in reading.missing}, trial.telemetry_note
    watched = [reading.energy_joules for reading in trial.readings]
    assert None not in watched, trial.telemetry_note
    seconds = sum(reading.seconds for reading in trial.readings)
    watts = sum(joules or 0.0 for joules in watched) / seconds
    assert trial.energy_measurement is not None
    assert (trial.energy_measurement.num_gpus, trial.energy_measurement.missing) == (2, "")
    metered_watts = trial.energy_measurement.joules / trial.energy_measurement.seconds
    # Set-up and start are in the counters from before to after, and draw less than steps do: the mean power of either
    # GPU over the whole trial is less than its power while steps run, and so both together are more than either.
    either = [joules / trial.duration_seconds for joules in spent]
    print(f"{parallelism}: {watts:.0f} W in blocks, {metered_watts:.0f} W sustained, GPUs over the trial {either}")
    assert watts > max(either)
    assert metered_watts > max(either)
    energy = energy_of([trial])
    assert energy is not None
    assert energy[1] == "sustained counter"
    assert power_watts(trial) == pytest.approx(metered_watts / 2)


def test_two_gpus_draw_more_than_one() -> None:
    one, two = measure("none", world_size=1), measure("ddp")
    assert one.energy_measurement is not None
    assert two.energy_measurement is not None
    if one.energy_measurement.missing or two.energy_measurement.missing:
        pytest.skip(f"not metered: {one.energy_measurement.missing or two.energy_measurement.missing}")
    assert [reading.num_gpus for reading in one.readings] == [1, 1, 1]
    alone, both = (
        one.energy_measurement.joules / one.energy_measurement.seconds,
        two.energy_measurement.joules / two.energy_measurement.seconds,
    )
    print(f"{alone:.0f} W on one GPU, {both:.0f} W on two")
    assert both > 1.3 * alone


def test_another_s_process_on_the_second_gpu_is_seen() -> None:
    # A process that nobody waits for is no descendant of this one, as another user's is none. It ends with its input.
    code = "import torch; held = torch.ones(1, device='cuda:1'); print('ready', flush=True); input()"
    command = ["setsid", "--fork", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        monitor = open_monitor(uuid_of(1))
        present = monitor.read().processes
        monitor.close()
        if not present:
            pytest.skip("the driver shows no processes here")
        trial = measure("ddp")
    assert [reading.affected_gpus.get("foreign_processes") for reading in trial.readings] == [("cuda:1",)] * 3
    assert [reading.foreign_processes for reading in trial.readings] == [1] * 3
    (warning,) = [each for each in warnings_of(trial) if each.name == "foreign-process"]
    assert "on cuda:1" in warning.seen
