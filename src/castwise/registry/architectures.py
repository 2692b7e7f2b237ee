"""What each generation of GPUs trains in, and which PyTorch has kernels for it: the one table that decides about both.

Sources: Transformer Engine 2.20 (transformer_engine/pytorch/quantization.py) and torchao 0.18 for formats below 16
bits; of these a generation has what neither refuses. CUDA's release notes and PyTorch's list of builds for the kernels.
Speeds: github.com/zzc0721/torch-performance-test-data, products in PyTorch 2.2 to 2.10.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

Format = Literal["tf32", "fp16", "bf16", "fp8", "fp8-rowwise", "fp8-blocks", "mxfp8", "nvfp4"]
FORMATS: tuple[Format, ...] = get_args(Format)
_LAST_WITHOUT_CUDA_13 = "2.14"


@dataclass(frozen=True)
class Architecture:
    """A generation of GPUs, and how PyTorch trains on it in each format of products."""

    code: str  # the first CUDA compute capability, or torch's name of an architecture without CUDA
    name: str
    native: str  # formats, separated by spaces
    slow: str = ""  # formats with hardware that brings no time, or none that PyTorch uses
    emulated: str = ""
    needs: str = ""  # the CUDA that torch must at least be built for, or another build; empty if any will do
    note: str = ""

    @property
    def has_cuda_13(self) -> bool:
        """Return whether CUDA 13 has kernels for it: CUDA 12.6 is the last for what is older than Turing."""
        return not self.code[0].isdigit() or capability_of(self.code) >= (7, 5)

    @property
    def build(self) -> str:
        """Return which PyTorch runs on it."""
        if not self.code[0].isdigit():
            return self.needs
        if not self.has_cuda_13:
            return f"up to {_LAST_WITHOUT_CUDA_13}, for CUDA 12.6"
        return f"for CUDA {self.needs} or newer" if self.needs else "any"

    def support(self, name: str) -> Literal["native", "slow", "emulated", ""]:
        """Return how it trains in a format, empty if it does not."""
        if name in self.native.split():
            return "native"
        return "slow" if name in self.slow.split() else "emulated" if name in self.emulated.split() else ""


_BF16 = "fp16 bf16"
_TF32 = f"tf32 {_BF16}"
_HOPPER = f"{_TF32} fp8 fp8-rowwise"
_TC = "without Tensor Cores: "

# CUDA by capability, each until the next. Then AMD (PyTorch for ROCm), Intel and Apple, of which nothing was tried.
ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("5.0", "Maxwell", "", emulated=_BF16, note=_TC + "float16 products are slower than float32's"),
    Architecture("6.0", "Pascal P100", "", slow="fp16", emulated="bf16", note="PyTorch does not use its float16 sums"),
    Architecture(
        "6.1", "Pascal", "", slow="fp16", emulated="bf16", note=_TC + "float16 arithmetic is a 64th of float32's"
    ),
    Architecture("7.0", "Volta", "fp16", emulated="bf16"),
    Architecture(
        "7.5", "Turing", "fp16", emulated="bf16", note="GTX 16 is " + _TC + "float16 is a tenth of float32 there"
    ),
    Architecture("8.0", "Ampere", _TF32),
    Architecture("8.9", "Ada", f"{_TF32} fp8"),
    Architecture("9.0", "Hopper", f"{_HOPPER} fp8-blocks", note="blocks need CUDA 12.9"),
    Architecture("10.0", "Blackwell", f"{_HOPPER} fp8-blocks mxfp8 nvfp4", needs="12.8"),
    Architecture("10.3", "Blackwell Ultra", f"{_HOPPER} fp8-blocks mxfp8 nvfp4", needs="12.8"),
    Architecture("11.0", "Jetson Thor", _HOPPER, needs="13.0"),
    Architecture("12.0", "RTX Blackwell", _HOPPER, needs="12.8", note="Transformer Engine refuses MXFP8 there"),
    Architecture("12.1", "GB10", _HOPPER, needs="12.8", note="no MXFP8, as 12.0; CUDA 13 is faster (autoresearch#207)"),
    Architecture("gfx906", "AMD MI50, MI60", "fp16", emulated="bf16", needs="for ROCm"),
    Architecture("gfx908", "AMD MI100", _BF16, needs="for ROCm"),
    Architecture("gfx90a", "AMD MI200", _BF16, needs="for ROCm"),
    Architecture("gfx942", "AMD MI300", f"{_TF32} fp8", needs="for ROCm"),
    Architecture("gfx950", "AMD MI350", f"{_BF16} fp8", emulated="tf32", needs="for ROCm"),
    Architecture("gfx11", "AMD Radeon RX 7000", _BF16, needs="for ROCm"),
    Architecture("gfx12", "AMD Radeon RX 9000", _BF16, needs="for ROCm"),
    Architecture("gfx", "another AMD", "", slow="fp16", emulated="bf16", needs="for ROCm"),
    Architecture("xpu", "Intel", _BF16, needs="for XPU"),
    Architecture(
        "mps", "Apple", "", slow=_BF16, needs="for macOS", note="M4 Max: float16 1.07 times as fast as float32"
    ),
)


def capability_of(code: str) -> tuple[int, int]:
    """Return a CUDA compute capability from "8.9"."""
    major, minor = code.split(".")
    return int(major), int(minor)


def dotted(capability: tuple[int, int]) -> str:
    """Return a CUDA compute capability as "8.9"."""
    return f"{capability[0]}.{capability[1]}"


_CUDA = tuple((capability_of(row.code), row) for row in ARCHITECTURES if row.code[0].isdigit())


def find_architecture(capability: tuple[int, int] | None, code: str = "") -> Architecture | None:
    """Return the generation of a GPU, by torch's name of it or by its CUDA capability; None if it is not listed."""
    if code:
        found = [row for row in ARCHITECTURES if code.startswith(row.code)]
        return max(found, key=lambda row: len(row.code), default=None)
    older = [row for since, row in _CUDA if capability is not None and since <= capability]
    return older[-1] if older else None


def needed_capabilities(name: str) -> tuple[tuple[int, int], tuple[int, int] | None] | None:
    """Return the CUDA capabilities from which on hardware has a format, and no longer has it; None if none has it."""
    have = [place for place, (_, row) in enumerate(_CUDA) if row.support(name) in ("native", "slow")]
    if not have:
        return None
    after = have[-1] + 1
    return _CUDA[have[0]][0], _CUDA[after][0] if after < len(_CUDA) else None


def why_no_kernels(row: Architecture, torch_version: str, cuda: str | None) -> str | None:
    """Return why a build of PyTorch has no kernels for a GPU and what to install; None as far as castwise knows."""
    if row.needs.startswith("for") or (found := re.match(r"(\d+)\.(\d+)", cuda or "")) is None:
        return None
    built = (int(found[1]), int(found[2]))
    if (not row.has_cuda_13 and built >= (13, 0)) or (row.needs and built < capability_of(row.needs)):
        return f"torch {torch_version} for CUDA {cuda} has no kernels for {row.name}: install PyTorch {row.build}"
    return None
