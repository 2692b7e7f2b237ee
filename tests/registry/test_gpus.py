import pytest
from fake_engine import fake_environment

from castwise.errors import UsageError
from castwise.registry.gpus import (
    GPU_MODELS,
    PEAK_DTYPES,
    GpuModel,
    find_gpu_model,
    gpus_named,
    peak,
    short_device_name,
)

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
    ("AMD Radeon RX 9070 XT", 64, 2970, 256, 1024),
    ("AMD Radeon RX 7900 XTX", 96, 2498, 256, 512),
    ("AMD Instinct MI355X", 256, 2400, 256, 4096),
    ("AMD Instinct MI350X", 256, 2200, 256, 4096),
    ("AMD Instinct MI300X", 304, 2100, 256, 2048),
    ("AMD Instinct MI250X", 110, 1700, 256, 1024),
    ("AMD Instinct MI210", 104, 1700, 256, 1024),
    ("AMD Instinct MI100", 120, 1502, 256, 1024),
]


# What NVIDIA's whitepapers and datasheets print of cards whose peaks are computed, dense, sums in float32. The
# figures of the 4080, 3090 Ti, 3080 Ti, 3070 and RTX 20 are those of Lightning's table, too
# (lightning_fabric/utilities/throughput.py).
PRINTED = [
    ("GeForce RTX 5080", "fp32", 56.3),
    ("GeForce RTX 5070 Ti", "fp32", 43.9),
    ("GeForce RTX 5070", "fp32", 30.9),
    ("RTX PRO 6000 Blackwell Workstation Edition", "fp32", 126.0),
    ("RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),
    ("GeForce RTX 4080 SUPER", "fp32", 52.2),
    ("GeForce RTX 4080", "fp32", 48.7),
    ("GeForce RTX 4080", "fp16", 97.5),
    ("GeForce RTX 3090 Ti", "fp32", 40.0),
    ("GeForce RTX 3090 Ti", "fp16", 80.0),
    ("GeForce RTX 3080 Ti", "fp32", 34.1),
    ("GeForce RTX 3070", "fp32", 20.3),
    ("RTX A5000", "fp16", 111.1),
    ("RTX A4500", "fp16", 94.6),
    ("RTX A4000", "fp16", 76.7),
    ("RTX A2000", "fp16", 31.95),
    ("GeForce RTX 2080 SUPER", "fp32", 11.15),
    ("GeForce RTX 2070 SUPER", "fp32", 9.06),
]


def device(name: str) -> GpuModel:
    row = find_gpu_model(name)
    assert row is not None, name
    return row


@each_row
def test_a_row_is_found_by_its_exact_names_alone(row):
    for name in row.names:
        assert find_gpu_model(name, row.memory_gigabytes * 10**9) is row
        for other in (f"{name} ", f" {name}", f"{name} Laptop GPU", f"{name} MIG 1g.10gb", name.lower()):
            assert find_gpu_model(other) is None


@each_row
def test_a_row_s_figures_are_possible(row):
    assert row.peaks["fp32"] or "not known" in row.source or "prints" in row.source or "print no peak" in row.source
    assert 6 <= row.memory_gigabytes <= 300
    assert 5e10 < row.bandwidth_bytes_per_second < 1e13
    for dtypes in (("fp32", "tf32", "fp16", "fp8"), ("fp32", "tf32", "bf16", "fp8")):
        rates = [rate for dtype in dtypes if (rate := peak(row, dtype)) is not None]
        assert rates == sorted(rates), "a narrower dtype is never slower"
    _, tf32, fp16, bf16, fp8 = row.peaks.values()
    if tf32 is not None:
        assert fp16 == pytest.approx(2 * tf32, rel=0.03)
    if fp8 is not None:
        assert fp8 == pytest.approx(2 * fp16, rel=0.03)
    if row.capability is not None and row.capability < (8, 9):
        assert fp8 is None
    if row.capability is not None and row.capability < (8, 0):
        assert tf32 is bf16 is None


@each_row
def test_measured_products_are_those_of_this_gpu(row):
    for dtype, rate in row.measured.items():
        limit = peak(row, dtype)
        # A clock above the datasheet's: the RTX A2000 by 17 %. A tenth of it: GPUs without hardware for the format.
        assert limit is None or 0.4 < rate / limit < 1.2, dtype


def test_gpus_of_one_name_are_told_apart_by_their_memory():
    ten, twelve = (find_gpu_model("NVIDIA GeForce RTX 3080", size * 2**30) for size in (10, 12))
    assert (ten.bandwidth_bytes_per_second, twelve.bandwidth_bytes_per_second) == (760e9, 912e9)
    assert find_gpu_model("NVIDIA GeForce RTX 3080") is None
    environment = fake_environment((8, 6), gpu="NVIDIA GeForce RTX 3080", gpu_memory_bytes=12_600_000_000)
    assert environment.gpu_model is twelve
    assert find_gpu_model("AMD Instinct MI60 / MI50", 17_163_091_968).peaks["fp16"] == 26.5e12
    assert find_gpu_model("AMD Instinct MI60 / MI50", 34_342_961_152).peaks["fp16"] is None


@pytest.mark.parametrize(("name", "dtype", "printed"), PRINTED)
def test_peaks_are_what_the_vendor_prints(name, dtype, printed):
    (row,) = (row for row in GPU_MODELS if row.names[0] == f"NVIDIA {name}")
    assert peak(row, dtype) == pytest.approx(printed * 1e12, rel=0.006)


@pytest.mark.parametrize("name", ["", "H100", "NVIDIA GeForce RTX 4090 D", "AMD Instinct MI250X / MI250", "cpu"])
def test_an_unknown_name_has_no_row_and_no_peak(name):
    assert find_gpu_model(name) is None
    assert [peak(None, dtype) for dtype in PEAK_DTYPES] == [None] * 5


def test_a_dtype_without_a_column_has_no_peak():
    row = device("NVIDIA H200")
    assert [peak(row, dtype) for dtype in ("fp8-mixed", "float16", "FP16", "names", "")] == [None] * 5


@pytest.mark.parametrize(("name", "multiprocessors", "megahertz", "fp32", "fp16"), CHIPS)
def test_peaks_are_what_the_chip_comes_to(name, multiprocessors, megahertz, fp32, fp16):
    for per_clock, dtype in ((fp32, "fp32"), (fp16, "fp16")):
        if per_clock is not None:
            computed = multiprocessors * megahertz * 1e6 * per_clock
            assert peak(device(name), dtype) == pytest.approx(computed, rel=0.015), dtype


@each_row
def test_a_row_is_found_by_its_short_name(row):
    is_shared = find_gpu_model(row.names[0]) is None
    memory = f" {row.memory_gigabytes}GB" if is_shared else ""
    (found,) = gpus_named(short_device_name(row.names[0]) + memory)
    assert found is row


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("L4", "NVIDIA L4"),
        ("l40s", "NVIDIA L40S"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("RTX 2080Ti", "NVIDIA GeForce RTX 2080 Ti"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("A100 40GB PCIe", "NVIDIA A100-SXM4-40GB"),
        ("H200", "NVIDIA H200"),
        ("3090", "NVIDIA GeForce RTX 3090"),
        ("3090 ti", "NVIDIA GeForce RTX 3090 Ti"),
        ("3080 12GB", "NVIDIA GeForce RTX 3080"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("H 100", "NVIDIA H100 80GB HBM3"),
        ("h100-sxm5-80gb", "NVIDIA H100 80GB HBM3"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("A100 PCIe 80 GB", "NVIDIA A100 80GB PCIe"),
        ("H200_NVL", "NVIDIA H200 NVL"),
    ],
)
def test_people_leave_out_words(name, full):
    assert [row.names[0] for row in gpus_named(name)] == [full]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RTX 4096", "No GPU named 'RTX 4096'. Did you mean RTX 4090"),
        ("", "No GPU named ''"),
        ("NVIDIA", "No GPU named 'NVIDIA'"),
        ("all", "No GPU named 'all'. `castwise list devices` shows those known; --gpu 'L4,H100' names two."),
    ],
)
def test_a_name_of_no_gpu_is_refused(name, message):
    with pytest.raises(UsageError) as raised:
        gpus_named(name)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("V100", ["Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB", "Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"]),
        ("3080", ["NVIDIA GeForce RTX 3080 12GB", "NVIDIA GeForce RTX 3080 10GB"]),
    ],
)
def test_a_name_may_stand_for_several_told_apart_by_memory(name, found):
    spelled = {f"{row.names[0]} {row.memory_gigabytes}GB": row for row in gpus_named(name)}
    assert [long if long in found else row.names[0] for long, row in spelled.items()] == found
