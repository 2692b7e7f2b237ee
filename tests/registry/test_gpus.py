import itertools
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from castwise.registry.gpus import GPU_MODELS, GpuModel, find_gpu_model, peak
from castwise.registry.precisions import PRECISIONS

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
NAMES = [name for row in GPU_MODELS for name in row.names]
each_row = pytest.mark.parametrize("row", GPU_MODELS, ids=lambda row: row.names[0])

# Multiprocessors, boost clock in MHz, and dense FLOP per clock and multiprocessor in fp32 and in fp16: what
# the peaks must come to but for rounding. Hopper's tensor cores and vector units boost differently.
CHIPS = [
    ("NVIDIA B200", 148, 1980, 256, None),
    ("NVIDIA GeForce RTX 5090", 170, 2407, 256, 512),
    ("NVIDIA GH200 480GB", 132, 1830, None, 4096),
    ("NVIDIA H200", 132, 1980, 256, None),
    ("NVIDIA H200", 132, 1830, None, 4096),
    ("NVIDIA H100 80GB HBM3", 132, 1980, 256, None),
    ("NVIDIA H100 80GB HBM3", 132, 1830, None, 4096),
    ("NVIDIA H100 PCIe", 114, 1755, 256, None),
    ("NVIDIA H100 PCIe", 114, 1620, None, 4096),
    ("NVIDIA L4", 58, 2040, 256, 1024),
    ("NVIDIA L40", 142, 2490, 256, 512),
    ("NVIDIA L40S", 142, 2520, 256, 1024),
    ("NVIDIA RTX 6000 Ada Generation", 142, 2505, 256, 1024),
    ("NVIDIA GeForce RTX 4090", 128, 2520, 256, 512),
    ("NVIDIA A100-SXM4-80GB", 108, 1410, 128, 2048),
    ("NVIDIA A100 80GB PCIe", 108, 1410, 128, 2048),
    ("NVIDIA A100-SXM4-40GB", 108, 1410, 128, 2048),
    ("NVIDIA A30", 56, 1440, 128, 2048),
    ("NVIDIA A40", 84, 1740, 256, 1024),
    ("NVIDIA A10", 72, 1695, 256, 1024),
    ("NVIDIA A10G", 80, 1710, 256, 512),
    ("NVIDIA RTX A6000", 84, 1800, 256, 1024),
    ("NVIDIA GeForce RTX 3090", 82, 1695, 256, 512),
    ("Tesla T4", 40, 1590, 128, 1024),
    ("TITAN RTX", 72, 1770, 128, 1024),
    ("GeForce RTX 2080 Ti", 68, 1545, 128, 512),
    ("Tesla V100-SXM2-16GB", 80, 1530, 128, 1024),
    ("Tesla V100-PCIE-16GB", 80, 1380, 128, 1024),
    ("Tesla V100S-PCIE-32GB", 80, 1597, 128, 1024),
    ("Tesla P100-SXM2-16GB", 56, 1480, 128, 256),
    ("Tesla P100-PCIE-16GB", 56, 1303, 128, 256),
    ("GeForce GTX 1080 Ti", 28, 1582, 256, None),
    ("Tesla K80", 13, 875, 384, None),
    ("AMD Instinct MI300X", 304, 2100, 256, 2048),
    ("AMD Instinct MI250X", 110, 1700, 256, 1024),
    ("AMD Instinct MI210", 104, 1700, 256, 1024),
    ("AMD Instinct MI100", 120, 1502, 256, 1024),
]


def device(name: str) -> GpuModel:
    row = find_gpu_model(name)
    assert row is not None, name
    return row


def known(row: GpuModel, *dtypes: str) -> list[float]:
    return [rate for dtype in dtypes if (rate := peak(row, dtype)) is not None]


def test_no_name_is_in_two_rows():
    assert len(set(NAMES)) == len(NAMES)


@each_row
def test_every_name_finds_its_row(row):
    assert row.names
    for name in row.names:
        assert name == name.strip()
        assert find_gpu_model(name) is row


@each_row
def test_every_row_is_complete_and_frozen(row):
    assert row.source
    assert row.fp32
    assert 8 <= row.memory_gigabytes <= 300
    assert 1e11 < row.bandwidth_bytes_per_second < 1e13
    with pytest.raises(FrozenInstanceError):
        row.fp32 = 1.0


@pytest.mark.parametrize("name", NAMES)
def test_no_part_of_a_name_finds_a_row(name):
    parts = {name[start:stop] for start, stop in itertools.combinations(range(len(name) + 1), 2)} - set(NAMES)
    assert [part for part in parts if find_gpu_model(part) is not None] == []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_longer_and_no_other_case_finds_a_row(name):
    for other in (f"{name} ", f" {name}", f"{name} Laptop GPU", f"{name} MIG 1g.10gb", name.lower()):
        assert find_gpu_model(other) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "H100",
        "NVIDIA H100",
        "NVIDIA A100",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA L40G",
        "AMD Instinct MI60 / MI50",
        "AMD Instinct MI250X / MI250",
        "cpu",
    ],
)
def test_an_unknown_name_has_no_row_and_no_peak(name):
    assert find_gpu_model(name) is None
    assert [peak(find_gpu_model(name), dtype) for dtype in DTYPES] == [None] * 5


def test_a_peak_is_its_column_and_other_dtypes_have_none():
    row = device("NVIDIA H200")
    assert [peak(row, dtype) for dtype in DTYPES] == [row.fp32, row.tf32, row.fp16, row.bf16, row.fp8]
    assert [peak(row, dtype) for dtype in ("fp8-mixed", "float16", "FP16", "names", "")] == [None] * 5


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.name)
def test_every_precision_names_a_column(precision):
    assert peak(device("NVIDIA H200"), precision.peak_dtype) is not None


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9e12),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("Tesla T4", "fp16", 65e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("AMD Instinct MI300X", "bf16", 1307.4e12),
    ],
)
def test_peaks_are_dense(name, dtype, expected):
    assert peak(device(name), dtype) == expected


@pytest.mark.parametrize(("name", "multiprocessors", "megahertz", "fp32", "fp16"), CHIPS)
def test_peaks_are_what_the_chip_comes_to(name, multiprocessors, megahertz, fp32, fp16):
    for per_clock, dtype in ((fp32, "fp32"), (fp16, "fp16")):
        if per_clock is not None:
            computed = multiprocessors * megahertz * 1e6 * per_clock
            assert peak(device(name), dtype) == pytest.approx(computed, rel=0.015), dtype


@each_row
def test_narrower_dtypes_are_never_slower(row):
    for dtypes in (("fp32", "tf32", "fp16", "fp8"), ("fp32", "tf32", "bf16", "fp8")):
        rates = known(row, *dtypes)
        assert rates == sorted(rates)


@each_row
def test_matrix_rates_double_as_the_width_halves(row):
    if row.tf32 is not None:
        assert row.fp16 == pytest.approx(2 * row.tf32, rel=0.03)
    if row.fp8 is not None:
        assert row.fp8 == pytest.approx(2 * row.fp16, rel=0.03)


@pytest.mark.parametrize(
    "row",
    [row for row in GPU_MODELS if row.capability in {(8, 0), (9, 0), (10, 0)}],
    ids=lambda row: row.names[0],
)
def test_data_centre_parts_gain_at_every_step(row):
    assert row.fp32 < row.tf32 < row.fp16
    assert row.fp16 == row.bf16
    assert row.fp8 is None or row.fp16 < row.fp8


@each_row
def test_no_peak_without_hardware_for_it(row):
    if row.capability is None:
        return
    assert (row.tf32 is None) == (row.capability < (8, 0))
    assert (row.bf16 is None) == (row.capability < (8, 0))
    assert (row.fp8 is None) == (row.capability < (8, 9))


def test_l4_l40_and_l40s_are_three_gpus():
    l4, l40, l40s = (device(f"NVIDIA {name}") for name in ("L4", "L40", "L40S"))
    assert l4.fp16 < l40.fp16 < l40s.fp16
    assert l4.memory_gigabytes < l40.memory_gigabytes


def test_a10_and_a10g_are_two_gpus():
    a10, a10g = device("NVIDIA A10"), device("NVIDIA A10G")
    assert a10.fp16 > a10g.fp16
    assert a10.fp32 < a10g.fp32


@pytest.mark.parametrize("dtype", DTYPES)
def test_h200_is_an_h100_sxm_with_other_memory(dtype):
    h100, h200 = device("NVIDIA H100 80GB HBM3"), device("NVIDIA H200")
    assert peak(h200, dtype) == pytest.approx(peak(h100, dtype), rel=0.002)  # the datasheets round differently
    assert h200.bandwidth_bytes_per_second > 1.4 * h100.bandwidth_bytes_per_second
    assert h200.memory_gigabytes > h100.memory_gigabytes


def test_the_module_needs_no_torch():
    code = "import sys, castwise.registry.gpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
