"""Versions of torch that are known to run operators slowly in a number format, one row each, with the public source."""

from typing import NamedTuple


class LibraryFault(NamedTuple):
    since: tuple[int, int]  # of torch
    before: tuple[int, int]  # the first version without it
    operator: str  # a pattern of the operators
    kernel: str  # and of their kernels that tell the slow way
    autocasts_16_bit: bool  # it is what autocast does with weights in 16 bits
    what: str
    advice: str
    saved: float  # of the operators' time, at most
    source: str


_UNKNOWN = (99, 0)
LIBRARY_FAULTS = (
    LibraryFault(
        *((2, 9), (2, 10), r"^aten::(_?slow_conv(_dilated)?3d|convolution_backward)", r"vol2col|col2vol|gemm", False),
        "convolutions in 3 dimensions run in PyTorch's own kernels in 16 bits",
        "torch 2.10, or cuDNN 9.15 with torch 2.9.1",
        *(0.75, "pytorch#166122"),  # where a step took four times as long
    ),
    LibraryFault(
        *((2, 12), _UNKNOWN, r"^aten::(_fused_)?rms_norm", r"<float\b", True),
        "autocast runs rms_norm in float32 though weights have 16 bits",
        "these norms within autocast(enabled=False)",
        *(0.5, "pytorch#188955"),  # twice the bytes
    ),
)
