"""What GPUs train in: one table, and what libraries refuse."""

from collections.abc import Callable

import pytest
import torch

from castwise.registry.architectures import (
    ARCHITECTURES,
    FORMATS,
    Architecture,
    capability_of,
    find_architecture,
    why_no_kernels,
)
from castwise.registry.gpus import GPU_MODELS, PEAK_DTYPES
from castwise.registry.precisions import Hardware, find_precision, is_same_as_fp32, why_emulated, why_unsupported

OF_CUDA = [row for row in ARCHITECTURES if row.code[0].isdigit()]

# What Transformer Engine 2.20 refuses (transformer_engine/pytorch/quantization.py: _compute_fp8_support,
# _compute_mxfp8_support, _compute_nvfp4_support, _compute_fp8_block_scaling_support), by the CUDA capability.
TRANSFORMER_ENGINE_REFUSES: dict[str, Callable[[tuple[int, int]], bool]] = {
    "fp8": lambda capability: capability < (8, 9),
    "fp8-blocks": lambda capability: capability < (9, 0),
    "mxfp8": lambda capability: capability < (10, 0) or capability >= (12, 0),
    "nvfp4": lambda capability: capability < (10, 0),
}


@pytest.mark.parametrize("row", OF_CUDA, ids=lambda row: row.code)
def test_no_row_promises_what_transformer_engine_refuses(row: Architecture) -> None:
    for name, refuses in TRANSFORMER_ENGINE_REFUSES.items():
        assert not (row.support(name) and refuses(capability_of(row.code))), name


@pytest.mark.parametrize("row", OF_CUDA, ids=lambda row: row.code)
def test_no_row_promises_what_torchao_refuses(row: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    from torchao import utils
    from torchao.prototype.moe_training.kernels.mxfp8 import quant

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability_of(row.code))
    accepts = {
        "fp8": utils.is_sm_at_least_89(),
        "fp8-rowwise": utils.is_sm_at_least_90(),
        "mxfp8": quant._is_sm_10x(),
        "nvfp4": utils.is_sm_at_least_100(),
    }
    assert [name for name, accepted in accepts.items() if row.support(name) and not accepted] == []


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.code)
def test_a_row_names_formats_once(row: Architecture) -> None:
    words = [*row.native.split(), *row.slow.split(), *row.emulated.split()]
    assert len(set(words)) == len(words)
    assert set(words) <= set(FORMATS)
    assert find_architecture(*((capability_of(row.code), "") if row in OF_CUDA else (None, row.code))) is row


@pytest.mark.parametrize("gpu", GPU_MODELS, ids=lambda gpu: gpu.names[0])
def test_a_gpu_has_peaks_in_no_format_that_its_generation_lacks(gpu) -> None:
    row = find_architecture(gpu.capability, gpu.architecture)
    assert row is not None or gpu.capability == (3, 7), "PyTorch has no build for a Tesla K80"
    if row is not None and gpu.architecture != "gfx1201":  # whose FP8 nobody has trained in
        for dtype in PEAK_DTYPES[1:]:
            assert gpu.peaks[dtype] is None or row.support(dtype) in ("native", "slow"), dtype


@pytest.mark.parametrize(
    ("capability", "code", "name"),
    [
        ((3, 7), "", None),
        ((5, 2), "", "Maxwell"),
        ((6, 1), "", "Pascal"),
        ((7, 2), "", "Volta"),
        ((8, 6), "", "Ampere"),
        ((13, 0), "", "GB10"),
        ((9, 4), "gfx942", "AMD MI300"),
        ((11, 0), "gfx1100", "AMD Radeon RX 7000"),
        ((10, 3), "gfx1030", "another AMD"),
        (None, "mps", "Apple"),
        (None, "", None),
    ],
)
def test_a_gpu_s_generation(capability: tuple[int, int] | None, code: str, name: str | None) -> None:
    found = find_architecture(capability, code)
    assert (found and found.name) == name


def test_amd_s_capability_is_not_cuda_s() -> None:
    mi210, radeon = Hardware("MI210", (9, 0), code="gfx90a"), Hardware("RX 7900 XTX", (11, 0), code="gfx1100")
    for gpu in (mi210, radeon):
        assert why_unsupported(find_precision("bf16-mixed"), gpu) is None
        assert is_same_as_fp32(find_precision("default"), gpu)
        assert (why_unsupported(find_precision("fp8-tensorwise"), gpu) or "").endswith(f"{gpu.name} has {gpu.code}")
    mi50 = Hardware("MI50", (9, 0), code="gfx906")
    assert why_emulated(find_precision("bf16-mixed"), mi50) == "MI50 is gfx906, without hardware for bf16"


@pytest.mark.parametrize(
    ("capability", "cuda", "why"),
    [
        ((7, 0), "13.2", "CUDA 13.2 has no kernels for Volta: install PyTorch up to 2.14, for CUDA 12.6"),
        ((7, 0), "12.6", None),
        ((7, 5), "13.2", None),
        ((12, 0), "12.6", "install PyTorch for CUDA 12.8 or newer"),
        ((12, 1), "12.8", None),
        ((7, 0), None, None),
    ],
)
def test_which_torch_has_kernels(capability: tuple[int, int], cuda: str | None, why: str | None) -> None:
    row = find_architecture(capability)
    assert row is not None
    found = why_no_kernels(row, "2.15.0", cuda)
    assert found == why or (found or "").endswith(why or "?")


@pytest.mark.parametrize("cuda", ["13.0", "12.8", "12.6"])
def test_this_torch_has_kernels_of_the_table(cuda: str) -> None:
    has_13 = torch.cuda.get_arch_list() and (torch.version.cuda or "").startswith("13.")
    if has_13 and cuda == "13.0":
        oldest = min(int(name.removeprefix("sm_").rstrip("af")) for name in torch.cuda.get_arch_list() if "sm_" in name)
        assert oldest == min(10 * a + b for row in OF_CUDA if row.has_cuda_13 for a, b in [capability_of(row.code)])
