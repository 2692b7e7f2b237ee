"""What blocks say of a process beside what processes differ by, on made-up rounds."""

import statistics
from pathlib import Path

import pytest
import trust_tables
from fake_engine import fake_spec, fake_trial
from fake_gpu import fake_gpu_facts

from castwise.analysis.statistics import noise_of
from castwise.records.schema import Trial
from castwise.records.store import Store
from castwise.records.telemetry import EnergyMeasurement

BLOCKS = (0.99, 1.0, 1.01, 1.0, 0.99, 1.01)


def process(repeat: int, seconds: float) -> Trial:
    return fake_trial(fake_spec(repeat=repeat), step_seconds=tuple(seconds * block for block in BLOCKS))


def test_the_standard_error_of_a_process_is_that_of_the_pseudomedian_of_its_blocks() -> None:
    noise, count = noise_of(BLOCKS), len(BLOCKS)
    assert trust_tables.standard_error(process(0, 0.1)) == pytest.approx(1.0233 * noise / count**0.5)


def test_processes_of_all_invocations_stand_beside_what_their_blocks_say(tmp_path: Path) -> None:
    seconds = (0.100, 0.110, 0.105, 0.102)
    folders = [tmp_path / "one", tmp_path / "two"]
    for repeat, each in enumerate(seconds):
        Store(folders[repeat // 2]).save(process(repeat, each))
    where, _, head, _, row = trust_tables.processes(folders).splitlines()
    assert where.startswith("On Fake GPU (castwise 0.0")
    shown = dict(
        zip((cell.strip() for cell in head.split("|")), (cell.strip() for cell in row.split("|")), strict=True)
    )
    error = trust_tables.standard_error(process(0, 0.1))
    apart = statistics.stdev(seconds) / statistics.fmean(seconds)
    assert (shown["cell"], shown["processes"], shown["blocks each"]) == ("resnet50, fp32, batch 256", "4", "6")
    assert shown["standard error by blocks"] == f"{error:.2%}"
    assert float(shown["processes differ by"].removesuffix("%")) / 100 == pytest.approx(apart, rel=0.03)
    assert float(shown["times as much"]) == pytest.approx(apart / error, rel=0.05)


def stretch(excess: float, watts: float, **changes: object) -> Trial:
    trial = fake_trial(fake_spec(**{"techniques": ("cuda-graph",), **changes}), step_seconds=(0.1,) * 4)
    metered = EnergyMeasurement(joules=watts * 0.5, seconds=0.5, num_ticks=5, step_seconds=0.1 * (1 + excess))
    return trial.model_copy(update={"metered": metered, "gpu_facts": fake_gpu_facts()})


def test_how_much_longer_steps_take_at_a_stretch_by_the_power_they_draw() -> None:
    far = [stretch(excess, 400.0) for excess in (-0.003, -0.002, -0.001)]
    held = [stretch(excess, 690.0) for excess in (0.01, 0.02, 0.03)]
    one, paced = stretch(0.5, 600.0), stretch(0.9, 400.0, techniques=())
    where, _, _, _, *rows = trust_tables.stretches([*far, *held, one, paced]).splitlines()
    assert where.startswith("On Fake GPU")
    assert rows == [
        "| under 80% | 3 | -0.20% | -0.25% … -0.15% | -0.10% |",
        "| 98% and more | 3 | +2.00% | +1.50% … +2.50% | +3.00% |",
    ]
