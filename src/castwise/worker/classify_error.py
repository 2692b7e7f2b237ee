"""Classify an exception: the trial's status, and one line for the record."""

import errno
import re

import torch

from castwise.errors import CastwiseError
from castwise.records.schema import Shortfall, Status
from castwise.spec.quantities import parse_memory
from castwise.worker.memory import MemoryLimitError

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

# The rest of torch's and oneDNN's messages is advice on settings; the log has all of it.
_ADVICE = " Including non-PyTorch memory"
_ONEDNN_ADVICE = " Run workload with environment variable"


def classify(error: BaseException) -> tuple[Status, str]:
    """Return the status and a one-line message for what a trial raised.

    Returns:
        `oom` for memory on the device or the host; `unsupported` for a kernel PyTorch lacks or a request that
        castwise itself refuses; else `crashed`.
    """
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, Exception):  # torch._dynamo and torch._inductor wrap what a compiler raised
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
        what, advice, _ = text.partition(_ONEDNN_ADVICE)
        return "unsupported", f"oneDNN has no kernel for it on this processor: {what}" if advice else text
    return "crashed", f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortfall_of(error: BaseException) -> Shortfall | None:
    """Return by how much memory was too small according to an exception; None if it does not say.

    Source: the wording of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.11), which has no fields.
    """
    if isinstance(error, MemoryLimitError):
        return error.shortfall
    text = str(error)
    found = [_size_before(text, words) for words in (" is allocated by PyTorch", " is free", " is reserved by PyTorch")]
    asked, (held, free, unused) = _ASKED.search(text), found
    if not isinstance(error, torch.OutOfMemoryError) or asked is None or held is None or free is None:
        return None
    allowed = _size_before(text, " allowed")
    reserved = held + (unused or 0)  # unused memory is fragmented, or it would have been used
    room = reserved + free if allowed is None else min(reserved + free, allowed)
    return Shortfall(needed_bytes=reserved + _segment(_bytes(asked[1])), free_bytes=room)


def _segment(size: int) -> int:
    """Return the bytes that the allocator requests from the device for a tensor.

    Source: c10/cuda/CUDACachingAllocator.cpp (get_allocation_size): 2 MiB up to 1 MiB, 20 MiB below 10 MiB, and
    whole 2 MiB from there.
    """
    mib = 2**20
    return 2 * mib if size <= mib else 20 * mib if size < 10 * mib else -(-size // (2 * mib)) * 2 * mib


_SIZE = r"([\d.]+ (?:bytes|[KMG]iB))"
_ASKED = re.compile(f"Tried to allocate {_SIZE}")


def _size_before(text: str, words: str) -> int | None:
    found = re.search(_SIZE + re.escape(words), text)
    return None if found is None else _bytes(found[1])


def _bytes(size: str) -> int:
    return round(parse_memory("size", size.replace("bytes", "B")))


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in phrases)


def _first_line(error: BaseException) -> str:
    # str() of a syntax error repeats its file and line, which castwise appends anyway.
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""
