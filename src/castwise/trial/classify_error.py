"""Classify an exception: the trial's status, and one line for the record."""

import errno
import re

import torch

from castwise.errors import CastwiseError
from castwise.records.schema import Shortfall, Status
from castwise.trial.memory import MemoryLimitError

# PyTorch has no exception class for a missing kernel; its messages contain one of these.
_MISSING_KERNEL = (
    "not implemented for",
    "is not currently supported on",
    "not supported for",
    "no kernel image",
    "could not create a primitive descriptor",  # oneDNN, for an LSTM in 16 bits on a processor without the instructions
)
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "_alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, and cuFFT's, cuSOLVER's and cuSPARSE's
    "_allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "failed to allocate",
)

_SIZE = r"([\d.]+) (bytes|[KMG]iB)"
_MIB = 2**20
_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": _MIB, "GiB": 2**30}


def classify(error: BaseException) -> tuple[Status, str]:
    """Return the status and a one-line message for what a trial raised.

    The status is `oom` for memory on the device or the host; `unsupported` for a kernel that PyTorch lacks or a request
    that castwise itself refuses; else `crashed`. The advice in torch's and oneDNN's messages is left to the log.
    """
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, Exception):  # torch._dynamo and torch._inductor wrap what a compiler raised
        status, what = classify(inner)
        return status, f"torch.compile failed: {what}"
    # str() of a syntax error repeats its file and line, which castwise appends anyway.
    whole = error.msg if isinstance(error, SyntaxError) else str(error)
    text = next(iter(whole.strip().splitlines()), "").strip()
    if isinstance(error, CastwiseError):
        return "unsupported", text
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _says(error, _OUT_OF_MEMORY):
        return "oom", text.partition(" Including non-PyTorch memory")[0] or "the host's memory is exhausted"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "oom", text
    if isinstance(error, NotImplementedError) or _says(error, _MISSING_KERNEL):
        what, advice, _ = text.partition(" Run workload with environment variable")
        return "unsupported", f"oneDNN has no kernel for it on this processor: {what}" if advice else text
    return "crashed", f"{type(error).__name__}: {text}" if text else type(error).__name__


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in phrases)


def shortfall_of(error: BaseException) -> Shortfall | None:
    """Return the memory that an exception says was needed and free; None if it does not say.

    Source: the wording of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.11), which has no fields. For a tensor it
    requests 2 MiB from the device up to 1 MiB, 20 MiB below 10 MiB, and whole 2 MiB from there (get_allocation_size).
    """
    if isinstance(error, MemoryLimitError):
        return error.shortfall
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    asked = _find_bytes(error, f"Tried to allocate {_SIZE}")
    held = _find_bytes(error, f"{_SIZE} is allocated by PyTorch")
    free = _find_bytes(error, f"{_SIZE} is free")
    if asked is None or held is None or free is None:
        return None
    # Unused memory is fragmented, or it would have been used.
    reserved = held + (_find_bytes(error, f"{_SIZE} is reserved by PyTorch") or 0)
    allowed = _find_bytes(error, f"{_SIZE} allowed")
    room = reserved + free if allowed is None else min(reserved + free, allowed)
    small = 2 * _MIB if asked <= _MIB else 20 * _MIB
    segment = small if asked < 10 * _MIB else -(-asked // (2 * _MIB)) * 2 * _MIB
    return Shortfall(needed_bytes=reserved + segment, free_bytes=room)


def _find_bytes(error: BaseException, pattern: str) -> int | None:
    found = re.search(pattern, str(error))
    return None if found is None else round(float(found[1]) * _BYTES[found[2]])
