"""What an exception means for a trial."""

import errno
from typing import get_args

import pytest
import torch

from castwise.errors import CastwiseError, EngineError, MissingDataError, UsageError
from castwise.records.schema import Status
from castwise.worker.classify_error import classify

CUDA_OOM = "CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has a total capacity of 79.11 GiB"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        # castwise's own refusals, whatever their words
        (UsageError("No workload named 'x'."), "unsupported", "No workload named 'x'."),
        (MissingDataError("no MNIST here"), "unsupported", "no MNIST here"),
        (EngineError("out of memory"), "unsupported", "out of memory"),
        (CastwiseError("a\nb"), "unsupported", "a"),
        # memory of the device and of the host
        (torch.OutOfMemoryError(CUDA_OOM), "oom", "CUDA out of memory. Tried to allocate 20.00 GiB."),
        (torch.OutOfMemoryError("no word of it"), "oom", "no word of it"),
        (RuntimeError("CUDA error: out of memory"), "oom", "CUDA error: out of memory"),
        (MemoryError(), "oom", "the host's memory is exhausted"),
        (MemoryError("Unable to allocate 1 PiB"), "oom", "Unable to allocate 1 PiB"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom", "[Errno 12] Cannot allocate memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "oom",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            "oom",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        ),
        (RuntimeError("Failed to allocate a workspace"), "oom", "Failed to allocate a workspace"),
        # kernels that PyTorch lacks
        (
            RuntimeError("\"avg_pool2d\" not implemented for 'Half'"),
            "unsupported",
            "\"avg_pool2d\" not implemented for 'Half'",
        ),
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
        (RuntimeError("shape '[2]' is invalid"), "crashed", "RuntimeError: shape '[2]' is invalid"),
        (RuntimeError("\n  first\nsecond"), "crashed", "RuntimeError: first"),
        (RuntimeError(), "crashed", "RuntimeError"),
        (ValueError("out of memory"), "crashed", "ValueError: out of memory"),
        (ValueError("not implemented for 'Half'"), "crashed", "ValueError: not implemented for 'Half'"),
        (OSError(errno.ENOSPC, "No space left"), "crashed", "OSError: [Errno 28] No space left"),
        (KeyboardInterrupt(), "crashed", "KeyboardInterrupt"),
        (
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            "crashed",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_exception_has_a_status_and_one_line(error: BaseException, status: str, message: str) -> None:
    assert classify(error) == (status, message)
    assert status in get_args(Status)


def test_torch_s_own_words_for_a_missing_kernel_are_known() -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError) as caught:
        torch.nn.functional.ctc_loss(torch.ones(1, 1, 2, dtype=torch.float16), one[None], one, one)
    status, message = classify(caught.value)
    assert status == "unsupported"
    assert "'Half'" in message


def test_torch_s_own_words_for_exhausted_host_memory_are_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    status, message = classify(caught.value)
    assert status == "oom"
    assert "allocate" in message


def test_torch_s_own_words_for_wrong_shapes_are_a_crash() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert classify(caught.value)[0] == "crashed"


def test_of_torch_s_words_on_memory_the_figures_are_kept() -> None:
    figures = "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has 139.80 GiB of which 7.12 MiB is free."
    advice = " Including non-PyTorch memory, this process has 139.79 GiB memory in use. If reserved but unallocated ..."
    assert classify(torch.OutOfMemoryError(figures + advice)) == ("oom", figures)


class CompilerError(RuntimeError):
    """As torch._dynamo's: the cause is an attribute, and the first line says nothing."""

    def __init__(self, inner: Exception) -> None:
        super().__init__(f"backend='inductor' raised:\n{type(inner).__name__}: {inner}")
        self.inner_exception = inner


def test_a_failed_compilation_is_told_by_its_cause() -> None:
    broken = CompilerError(RuntimeError("C++ compile error\n\nCommand:\ng++ main.cpp"))
    assert classify(broken) == ("crashed", "torch.compile failed: RuntimeError: C++ compile error")
    status, message = classify(CompilerError(torch.OutOfMemoryError("CUDA out of memory.")))
    assert (status, message) == ("oom", "torch.compile failed: CUDA out of memory.")
