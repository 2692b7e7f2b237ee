"""What a record says of its machine is what the machine says of itself."""

import os
import platform
from importlib import metadata
from pathlib import Path

import pytest
import torch

import castwise
from castwise.apply import float8
from castwise.apply.precision import read_fp32_precision
from castwise.registry import precisions
from castwise.trial.environment import read_environment

CPU = torch.device("cpu")

X86 = """\
processor\t: 0
model name\t: Fake CPU @ 3.00GHz
flags\t\t: fpu sse2 avx512_bf16 amx_bf16 avx512f

processor\t: 1
model name\t: Fake CPU @ 3.00GHz
flags\t\t: fpu sse2 avx512_bf16 amx_bf16 avx512f
"""
ARM = """\
processor\t: 0
Features\t: fp asimd asimdhp bf16
CPU implementer\t: 0x41
"""


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpuinfo: str | None) -> None:
    """Let /proc/cpuinfo have this content, or not be there."""
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    monkeypatch.setattr(precisions, "Path", lambda asked: path if asked == "/proc/cpuinfo" else Path(asked))


def test_a_cpu_s_environment() -> None:
    found = read_environment(CPU, "0123456789ab+")
    assert (found.castwise, found.commit) == (castwise.__version__, "0123456789ab+")
    assert (found.torch, found.torchvision) == (torch.__version__, metadata.version("torchvision"))
    assert found.fp32_precision == read_fp32_precision()
    assert found.device_name == found.cpu
    gpu_s = ("gpu", "gpu_uuid", "capability", "gpu_memory_bytes", "driver", "cuda", "cudnn")
    assert [getattr(found, name) for name in gpu_s] == [None] * len(gpu_s)
    assert (found.num_gpus, found.gpu_uuids) == (0, ())
    assert read_environment(CPU, None).fingerprint == found.fingerprint


@pytest.mark.parametrize(
    ("cpuinfo", "name", "features"),
    [
        (X86, "Fake CPU @ 3.00GHz", ("amx_bf16", "avx512_bf16")),
        (ARM, "fake processor", ("asimdhp", "bf16")),
        (None, "fake processor", ()),
    ],
    ids=["x86", "Arm", "missing"],
)
def test_the_processor(
    cpuinfo: str | None,
    name: str,
    features: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pretend(monkeypatch, tmp_path, cpuinfo)
    monkeypatch.setattr(platform, "processor", lambda: "fake processor")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    found = read_environment(CPU, None)
    assert found.cpu == f"{name} (2 cores)"
    assert found.cpu_features == features


def test_torchvision_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(float8, "version", find_none)
    found = read_environment(CPU, None)
    assert (found.torchvision, found.torchao) == (None, None)
