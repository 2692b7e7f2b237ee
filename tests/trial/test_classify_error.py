"""What an exception means for a trial."""

import errno
from collections.abc import Callable
from typing import get_args

import pytest
import torch

from castwise.errors import CastwiseError, MissingDataError, UsageError
from castwise.records.schema import Status
from castwise.trial.classify_error import classify, shortfall_of

CUDA_OOM = "CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has a total capacity of 79.11 GiB"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        # castwise's own refusals, whatever their words
        (UsageError("No workload named 'x'."), "unsupported", "No workload named 'x'."),
        (MissingDataError("no MNIST here"), "unsupported", "no MNIST here"),
        (CastwiseError("a\nb"), "unsupported", "a"),
        # memory of the device and of the host
        (torch.OutOfMemoryError(CUDA_OOM), "oom", "CUDA out of memory. Tried to allocate 20.00 GiB."),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has 139.80 GiB of which 7.12 MiB is free."
                " Including non-PyTorch memory, this process has 139.79 GiB memory in use. If reserved but ..."
            ),
            "oom",
            "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has 139.80 GiB of which 7.12 MiB is free.",
        ),
        (RuntimeError("CUDA error: out of memory"), "oom", "CUDA error: out of memory"),
        (MemoryError(), "oom", "the host's memory is exhausted"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom", "[Errno 12] Cannot allocate memory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when"), "oom", "CUBLAS_STATUS_ALLOC_FAILED when"),
        (RuntimeError("DEVICE_ALLOCATION_FAILED"), "oom", "DEVICE_ALLOCATION_FAILED"),
        (RuntimeError("Failed to allocate a workspace"), "oom", "Failed to allocate a workspace"),
        # kernels that PyTorch lacks
        (RuntimeError("pool not implemented for 'Half'"), "unsupported", "pool not implemented for 'Half'"),
        (RuntimeError("Half is not supported for fold"), "unsupported", "Half is not supported for fold"),
        (RuntimeError("It is not currently supported on CPU"), "unsupported", "It is not currently supported on CPU"),
        (NotImplementedError("Low precision dtypes"), "unsupported", "Low precision dtypes"),
        (
            RuntimeError(
                "could not create a primitive descriptor for the LSTM forward propagation primitive. "
                "Run workload with environment variable ONEDNN_VERBOSE=all to get additional diagnostic information."
            ),
            "unsupported",
            "oneDNN has no kernel for it on this processor: "
            "could not create a primitive descriptor for the LSTM forward propagation primitive.",
        ),
        (
            RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with"),
            "unsupported",
            "CUDA error: no kernel image is available for execution on the device",
        ),
        # anything else
        (RuntimeError("\n  first\nsecond"), "crashed", "RuntimeError: first"),
        (RuntimeError(), "crashed", "RuntimeError"),
        (ValueError("out of memory"), "crashed", "ValueError: out of memory"),
        (OSError(errno.ENOSPC, "No space left"), "crashed", "OSError: [Errno 28] No space left"),
        (KeyboardInterrupt(), "crashed", "KeyboardInterrupt"),
        (RuntimeError("CUDA error: an illegal access"), "crashed", "RuntimeError: CUDA error: an illegal access"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_classify(error: BaseException, status: str, message: str) -> None:
    assert classify(error) == (status, message)
    assert status in get_args(Status)


def allocate_too_much() -> None:
    torch.empty(2**50)


def train_without_a_kernel() -> None:
    one = torch.ones(1, dtype=torch.int64)
    torch.nn.functional.ctc_loss(torch.ones(1, 1, 2, dtype=torch.float16), one[None], one, one)


def multiply_wrong_shapes() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


@pytest.mark.parametrize(
    ("work", "status", "words"),
    [
        (train_without_a_kernel, "unsupported", "'Half'"),
        (allocate_too_much, "oom", "allocate"),
        (multiply_wrong_shapes, "crashed", "RuntimeError"),
    ],
)
def test_classify_errors_raised_by_torch(work: Callable[[], None], status: str, words: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        work()
    found, message = classify(caught.value)
    assert found == status
    assert words in message


class CompilerError(RuntimeError):
    """As torch._dynamo's: the cause is an attribute, and the first line says nothing."""

    def __init__(self, inner: Exception) -> None:
        super().__init__(f"backend='inductor' raised:\n{type(inner).__name__}: {inner}")
        self.inner_exception = inner


def test_failed_compilation_is_classified_by_cause() -> None:
    broken = CompilerError(RuntimeError("C++ compile error\n\nCommand:\ng++ main.cpp"))
    assert classify(broken) == ("crashed", "torch.compile failed: RuntimeError: C++ compile error")
    status, message = classify(CompilerError(torch.OutOfMemoryError("CUDA out of memory.")))
    assert (status, message) == ("oom", "torch.compile failed: CUDA out of memory.")


MIB = 2**20


@pytest.mark.parametrize(
    ("text", "needed_mib", "free_mib"),
    [
        pytest.param(
            "CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which "
            "359.12 MiB is free. Of the allocated memory 127.97 GiB is allocated by PyTorch, and 10.72 GiB is reserved "
            "by PyTorch but unallocated.",
            (127.97 + 10.72) * 1024 + 448,
            (127.97 + 10.72) * 1024 + 359.12,
            id="a whole GPU",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 4.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 138.50 "
            "GiB is free. Process 7 has 1.30 GiB memory in use. 102.40 MiB allowed; Of the allocated memory 90.00 MiB "
            "is allocated by PyTorch, and 2.00 MiB is reserved by PyTorch but unallocated.",
            92 + 20,  # the segment in which so small a tensor would lie
            102.4,
            id="a limit",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity of 79.18 GiB of which 0 bytes "
            "is free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch "
            "but unallocated.",
            (20 * 1024 + 3144),  # whole segments of 2 MiB
            20 * 1024,
            id="nothing is free",
        ),
    ],
)
def test_shortfall_of_torch_message(text: str, needed_mib: float, free_mib: float) -> None:
    found = shortfall_of(torch.OutOfMemoryError(text))
    assert found is not None
    assert found.needed_bytes == pytest.approx(needed_mib * MIB, rel=1e-6)
    assert found.free_bytes == pytest.approx(free_mib * MIB, rel=1e-6)


def test_no_shortfall_in_other_messages() -> None:
    assert shortfall_of(torch.OutOfMemoryError("no memory")) is None
    assert shortfall_of(ValueError("Tried to allocate 1.00 GiB")) is None
