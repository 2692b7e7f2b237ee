"""The GPUs whose datasheet peaks are known: one row each, found by the exact name that the driver prints.

"NVIDIA L4" is a prefix of "NVIDIA L40S", whose peaks are three times as high. Every peak is dense: if `source` says
"sparse figures halved", the datasheet prints the rate with 2:4 structured sparsity. A peak holds at the boost clock;
GeForce cards run above it when cool (173 for 165.2 TFLOP/s: github.com/zzc0721/torch-performance-test-data).
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from castwise.errors import UsageError, unknown_name

PEAK_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class GpuModel:
    """What a GPU's vendor prints of it, for one device as PyTorch counts them.

    A board that PyTorch sees as two devices (Tesla K80, Instinct MI250X) has half the board's figures. None is a rate
    without hardware for it, or one that the vendor does not print.
    """

    names: tuple[str, ...]  # all that `torch.cuda.get_device_name` prints: older drivers leave out the "NVIDIA"
    capability: tuple[int, int] | None  # None without CUDA
    memory_gigabytes: int  # the vendor's GB, neither exactly 10⁹ nor 2³⁰ bytes
    bandwidth_bytes_per_second: float  # of the device's own memory
    # By dtype, dense FLOP/s accumulated in float32: of the tensor or matrix units if there are any for that dtype, else
    # of the vector units. For float16 on GeForce that is half the headline, and what PyTorch asks for.
    peaks: Mapping[str, float | None] = field(hash=False)
    source: str  # the titles of the vendor's documents


def _row(
    names: tuple[str, ...],
    capability: tuple[int, int] | None,
    memory_gigabytes: int,
    bandwidth_gigabytes_per_second: float,
    teraflops: tuple[float | None, ...],
    source: str,
) -> GpuModel:
    """Return a row from figures in the datasheets' units; teraflops are those of PEAK_DTYPES."""
    peaks = {
        dtype: None if rate is None else float(round(rate * 1e12))
        for dtype, rate in zip(PEAK_DTYPES, teraflops, strict=True)
    }
    bandwidth = float(round(bandwidth_gigabytes_per_second * 1e9))
    return GpuModel(names, capability, memory_gigabytes, bandwidth, peaks, source)


_BLACKWELL = "NVIDIA Blackwell datasheet, individual Blackwell GPU of HGX B200 (sparse figures halved)"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet, 96 GB HBM3 (sparse figures halved)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (sparse figures halved)"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture whitepaper; bandwidth: NVIDIA H100 Tensor Core GPU datasheet"
_H100_NVL = "NVIDIA H100 Tensor Core GPU datasheet, H100 NVL (sparse figures halved)"
_L4 = "NVIDIA L4 Tensor Core GPU datasheet (sparse figures halved)"
_L40 = "NVIDIA L40 datasheet"
_L40S = "NVIDIA L40S datasheet"
_ADA_PRO = "NVIDIA Ada GPU Architecture whitepaper for professional GPUs, RTX 6000 Ada Generation"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_A30 = "NVIDIA A30 Tensor Core GPU datasheet"
_A10 = "NVIDIA A10 Tensor Core GPU datasheet"
_A10G = "NVIDIA A10G datasheet (published by AWS)"
_A40 = "NVIDIA A40 datasheet"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper V2"
_T4 = "NVIDIA T4 Tensor Core GPU datasheet; bandwidth: NVIDIA T4 Tensor Core GPU product brief"
_TURING = "NVIDIA Turing GPU Architecture whitepaper, reference boards"
_TITAN_RTX = "NVIDIA Ampere GA102 GPU Architecture whitepaper V2, appendix A"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"
_P100_SXM2 = "NVIDIA Tesla P100 for NVLink-optimized servers datasheet"
_P100_PCIE = "NVIDIA Tesla P100 for PCIe-based servers datasheet"
_K80 = "NVIDIA Tesla K80 datasheet, with GPU Boost; half a board, which is one device"
_MI300X = "AMD Instinct MI300X Accelerator data sheet"
_MI250X = "AMD Instinct MI250X Accelerator data sheet; half a board (one of two dies), which is one device"
_MI210 = "AMD Instinct MI210 Accelerator data sheet"
_MI100 = "AMD Instinct MI100 Accelerator data sheet"

# Some names stand for two GPUs of different peaks and have no row: "AMD Instinct MI60 / MI50" and
# "AMD Instinct MI250X / MI250" (source: libdrm, data/amdgpu.ids), "NVIDIA GeForce RTX 3080".
GPU_MODELS: tuple[GpuModel, ...] = (
    # names, compute capability, GB, GB/s, TFLOP/s in (fp32, tf32, fp16, bf16, fp8), source
    _row(("NVIDIA B200",), (10, 0), 180, 7700, (75, 1100, 2250, 2250, 4500), _BLACKWELL),
    _row(("NVIDIA GeForce RTX 5090",), (12, 0), 32, 1792, (104.8, 104.8, 209.5, 209.5, 419), _RTX_BLACKWELL),
    _row(("NVIDIA GH200 480GB",), (9, 0), 96, 4000, (67, 494.5, 989.5, 989.5, 1979), _GH200),
    _row(("NVIDIA H200",), (9, 0), 141, 4800, (67, 494.5, 989.5, 989.5, 1979), _H200),
    _row(("NVIDIA H200 NVL",), (9, 0), 141, 4800, (60, 417.5, 835.5, 835.5, 1670.5), _H200),
    _row(("NVIDIA H100 80GB HBM3",), (9, 0), 80, 3350, (66.9, 494.7, 989.4, 989.4, 1978.9), _H100),
    _row(("NVIDIA H100 PCIe",), (9, 0), 80, 2000, (51.2, 378, 756, 756, 1513), _H100),
    _row(("NVIDIA H100 NVL",), (9, 0), 94, 3900, (60, 417.5, 835.5, 835.5, 1670.5), _H100_NVL),
    _row(("NVIDIA L4",), (8, 9), 24, 300, (30.3, 60, 121, 121, 242.5), _L4),
    _row(("NVIDIA L40",), (8, 9), 48, 864, (90.5, 90.5, 181.05, 181.05, 362), _L40),
    _row(("NVIDIA L40S",), (8, 9), 48, 864, (91.6, 183, 362.05, 362.05, 733), _L40S),
    _row(("NVIDIA RTX 6000 Ada Generation",), (8, 9), 48, 960, (91.1, 182.1, 364.2, 364.2, 728.5), _ADA_PRO),
    _row(("NVIDIA GeForce RTX 4090",), (8, 9), 24, 1008, (82.6, 82.6, 165.2, 165.2, 330.3), _ADA),
    _row(
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM-80GB", "A100-SXM4-80GB", "A100-SXM-80GB"),
        (8, 0),
        80,
        2039,
        (19.5, 156, 312, 312, None),
        _A100,
    ),
    _row(("NVIDIA A100 80GB PCIe",), (8, 0), 80, 1935, (19.5, 156, 312, 312, None), _A100),
    _row(
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        (8, 0),
        40,
        1555,
        (19.5, 156, 312, 312, None),
        _A100,
    ),
    _row(("NVIDIA A30",), (8, 0), 24, 933, (10.3, 82, 165, 165, None), _A30),
    _row(("NVIDIA A40", "A40"), (8, 6), 48, 696, (37.4, 74.8, 149.7, 149.7, None), _A40),
    _row(("NVIDIA A10",), (8, 6), 24, 600, (31.2, 62.5, 125, 125, None), _A10),
    _row(("NVIDIA A10G",), (8, 6), 24, 600, (35, 35, 70, 70, None), _A10G),
    _row(("NVIDIA RTX A6000", "RTX A6000"), (8, 6), 48, 768, (38.7, 77.4, 154.8, 154.8, None), _GA102),
    _row(
        ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        (8, 6),
        24,
        936,
        (35.6, 35.6, 71, 71, None),
        _GA102,
    ),
    _row(("Tesla T4",), (7, 5), 16, 320, (8.1, None, 65, None, None), _T4),
    _row(("NVIDIA TITAN RTX", "TITAN RTX"), (7, 5), 24, 672, (16.3, None, 130.5, None, None), _TITAN_RTX),
    _row(
        ("NVIDIA GeForce RTX 2080 Ti", "GeForce RTX 2080 Ti"),
        (7, 5),
        11,
        616,
        (13.4, None, 53.8, None, None),
        _TURING,
    ),
    _row(("Tesla V100-SXM2-16GB",), (7, 0), 16, 900, (15.7, None, 125, None, None), _V100),
    _row(("Tesla V100-SXM2-32GB",), (7, 0), 32, 900, (15.7, None, 125, None, None), _V100),
    _row(("Tesla V100-PCIE-16GB",), (7, 0), 16, 900, (14, None, 112, None, None), _V100),
    _row(("Tesla V100-PCIE-32GB",), (7, 0), 32, 900, (14, None, 112, None, None), _V100),
    _row(("Tesla V100S-PCIE-32GB",), (7, 0), 32, 1134, (16.4, None, 130, None, None), _V100),
    _row(("Tesla P100-SXM2-16GB",), (6, 0), 16, 732, (10.6, None, 21.2, None, None), _P100_SXM2),
    _row(("Tesla P100-PCIE-16GB",), (6, 0), 16, 732, (9.3, None, 18.7, None, None), _P100_PCIE),
    _row(("Tesla P100-PCIE-12GB",), (6, 0), 12, 549, (9.3, None, 18.7, None, None), _P100_PCIE),
    # The whitepaper prints no float16 rate for it.
    _row(
        ("NVIDIA GeForce GTX 1080 Ti", "GeForce GTX 1080 Ti"),
        (6, 1),
        11,
        484,
        (11.3, None, None, None, None),
        _TURING,
    ),
    _row(("Tesla K80",), (3, 7), 12, 240, (4.365, None, None, None, None), _K80),
    _row(("AMD Instinct MI300X",), None, 192, 5300, (163.4, 653.7, 1307.4, 1307.4, 2614.9), _MI300X),
    _row(("AMD Instinct MI250X",), None, 64, 1600, (47.85, None, 191.5, 191.5, None), _MI250X),
    _row(("AMD Instinct MI210",), None, 64, 1600, (45.3, None, 181, 181, None), _MI210),
    _row(("AMD Instinct MI100",), None, 32, 1200, (46.1, None, 184.6, 92.3, None), _MI100),
)

_BY_NAME = {name: row for row in GPU_MODELS for name in row.names}


def find_gpu_model(name: str) -> GpuModel | None:
    """Return the row with exactly this name, or None; neither a part of a name nor another case counts."""
    return _BY_NAME.get(name)


# What a name has besides the model: the vendor, and the memory of a board that comes with one size.
_BESIDES = re.compile(r"\((?:R|TM)\)|^(?:NVIDIA |AMD )?(?:GeForce |Tesla )?| 80GB HBM3$")
_LEFT_OUT = {"nvidia", "amd", "intel", "apple", "geforce", "tesla", "instinct", "radeon"}


def short_device_name(device: str) -> str:
    """Return a device's name without its vendor: `H200` for `NVIDIA H200`."""
    return _BESIDES.sub("", device) or device


def named_gpu(name: str) -> GpuModel:
    """Return the row that a name stands for, as people write it: "L4", "4090", "RTX 2080Ti", "A100 80GB PCIe".

    Raises:
        UsageError: No GPU is named so, or several are.
    """
    found = gpus_named(name)
    if len(found) == 1:
        return found[0]
    known = ", ".join(short_device_name(row.names[0]) for row in found)
    raise UsageError(f"'{name}' stands for {len(found)} GPUs. Name one: {known}.")


def gpus_named(name: str) -> list[GpuModel]:
    """Return all rows that a name stands for, at least one: those of A100 with 80 and with 40 GB, for example.

    Raises:
        UsageError: No GPU is named so.
    """
    wanted = _words(name)
    whole = [
        row for row in GPU_MODELS if any(wanted in (_words(own), _words(short_device_name(own))) for own in row.names)
    ]
    found = whole or [row for row in GPU_MODELS if wanted and any(_has(own, wanted) for own in row.names)]
    if not found:
        known = [short_device_name(row.names[0]) for row in GPU_MODELS]
        raise unknown_name("GPU", name, known, "`castwise list devices` shows those known.")
    return found


# What the driver says a GPU has. Source: benchmarks/records.
_TOTAL_BYTES = {"NVIDIA H100 80GB HBM3": 85_017_493_504, "NVIDIA H200": 150_109_880_320}
# Elsewhere it is this share of the vendor's figure, less where the error correction of GDDR takes a part. Source:
# "total capacity" in PyTorch's messages: 23.65 GiB of an RTX 4090, 79.15 of an A100 80GB, 15.78 of a V100, 10.75 of an
# RTX 2080 Ti; 22.05 of an L4, 14.75 of a T4, 44.4 of an L40S.
_TOTAL_SHARE, _TOTAL_SHARE_WITH_ECC = 0.98, 0.92
_WITH_ECC = (
    "NVIDIA A10",
    "NVIDIA A10G",
    "NVIDIA A40",
    "NVIDIA L4",
    "NVIDIA L40",
    "NVIDIA L40S",
    "Tesla T4",
    "Tesla K80",
)


# What a process takes outside of PyTorch's allocator: the CUDA context and libraries. Source: the records of
# benchmarks/records/fit on an H100 and an H200 with no other process.
CONTEXT_BYTES = 767 * 2**20


def total_bytes(row: GpuModel) -> tuple[int, bool]:
    """Return the memory that the driver says a GPU has, and whether that was measured or is assumed."""
    name = row.names[0]
    if name in _TOTAL_BYTES:
        return _TOTAL_BYTES[name], True
    share = _TOTAL_SHARE_WITH_ECC if name in _WITH_ECC else _TOTAL_SHARE
    return int(share * row.memory_gigabytes * 2**30), False


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\s_-]+", name.lower()) if word and word not in _LEFT_OUT]


def _has(name: str, wanted: list[str]) -> bool:
    """Return whether a name has all words that are wanted, of which one may be two of its words: "2080ti"."""
    words = _words(name)
    return {*wanted} <= {*words, *(first + second for first, second in itertools.pairwise(words))}


def peak(device: GpuModel | None, dtype: str) -> float | None:
    """Return a GPU's dense peak in FLOP/s; None if it is unknown, or `dtype` is not one of PEAK_DTYPES."""
    return device.peaks.get(dtype) if device is not None else None
