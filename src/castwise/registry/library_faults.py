"""Versions of torch that are known to run operators slowly in a number format, one row each, with the public source."""

from typing import NamedTuple


class LibraryFault(NamedTuple):
    since: tuple[int, int]  # of torch
    operator: str  # a pattern of the operators
    kernel: str  # and of their kernels that tell the slow way
    what: str
    advice: str
    saved: float  # of the operators' time, at most
    source: str
    before: tuple[int, int] = (99, 0)  # the first version without it; not known yet
    autocasts_16_bit: bool = False  # it is what autocast does with weights in 16 bits


LIBRARY_FAULTS = (
    LibraryFault(
        since=(2, 9),
        before=(2, 10),
        operator=r"^aten::(_?slow_conv(_dilated)?3d|convolution_backward)",
        kernel=r"vol2col|col2vol|gemm",
        what="convolutions in 3 dimensions run in PyTorch's own kernels in 16 bits",
        advice="torch 2.10, or cuDNN 9.15 with torch 2.9.1",
        saved=0.75,  # a step took four times as long
        source="pytorch#166122",
    ),
    LibraryFault(
        since=(2, 12),
        operator=r"^aten::(_fused_)?rms_norm",
        kernel=r"<float\b",
        autocasts_16_bit=True,
        what="autocast runs rms_norm in float32 though weights have 16 bits",
        advice="these norms within autocast(enabled=False)",
        saved=0.5,  # twice the bytes
        source="pytorch#188955",
    ),
)
