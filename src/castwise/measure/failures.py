"""Tell what an exception means for a trial: its status, and one line for the record."""

import errno

import torch

from castwise.errors import CastwiseError
from castwise.record import Status

# PyTorch has no exception class for a missing kernel: these are its wordings.
_MISSING_KERNEL = (
    "not implemented for",
    "is not currently supported on",
    "not supported for",
    "no kernel image",
    "could not create a primitive descriptor",  # oneDNN's, for an LSTM in float16
)
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "_alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, and cuFFT's, cuSOLVER's and cuSPARSE's
    "_allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "failed to allocate",
)

# From here on torch's message for memory is advice on its settings; the whole is in the log.
_ADVICE = " Including non-PyTorch memory"


def classify(error: BaseException) -> tuple[Status, str]:
    """Return the status and a one-line message for what a trial raised.

    Args:
        error: What was raised.

    Returns:
        `oom` for memory on the device or the host; `unsupported` for a kernel PyTorch lacks or a request that
        castwise itself refuses; else `crashed`.
    """
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, Exception):  # torch._dynamo's and torch._inductor's, round what a compiler raised
        status, what = classify(inner)
        return status, f"torch.compile failed: {what}"
    text = _first_line(error)
    if isinstance(error, CastwiseError):
        return "unsupported", text
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _says(error, _OUT_OF_MEMORY):
        return "oom", text.partition(_ADVICE)[0] or "the host's memory is exhausted"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "oom", text
    if isinstance(error, NotImplementedError) or _says(error, _MISSING_KERNEL):
        return "unsupported", text
    return "crashed", f"{type(error).__name__}: {text}" if text else type(error).__name__


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in phrases)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else ""
