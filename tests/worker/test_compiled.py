"""torch.compile: the same losses, one compilation for one shape, and the error without a compiler."""

import pytest
import torch
from loops import WORDS, losses_of, spec_of
from small_step import SmallNet, cross_entropy, make_batch, make_net
from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.worker.models.task import Batch
from castwise.worker.techniques import compile as compile_technique
from castwise.worker.techniques.compile import CompiledLoss, check_compiler

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_losses_of_20_compiled_steps() -> None:
    found = losses_of(spec_of(WORDS, "fp32", "foreach-optimizer", "compile"))
    expected = losses_of(spec_of(WORDS, "fp32"))
    assert ((found - expected) / expected).abs().max() < 500 * 2.0**-23


def test_only_the_first_shape_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def fake_compile(*_: object, **__: object) -> object:
        def run(model: nn.Module, batch: Batch) -> Tensor:
            seen.append(len(batch[0]))
            return cross_entropy(model, batch)

        return run

    monkeypatch.setattr(torch, "compile", fake_compile)
    loss = CompiledLoss(cross_entropy, "default")
    net: SmallNet = make_net()
    images, labels = make_batch()
    for size in (16, 16, 5, 16):
        assert loss(net, (images[:size], labels[:size])).isfinite()
    assert seen == [16, 16, 16]


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_technique.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UsageError, match=r"looked for g\+\+, clang\+\+, c\+\+\. Install one, or name it by CXX"):
        check_compiler(CPU)
    monkeypatch.setattr(compile_technique, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs Triton"):
        check_compiler(CUDA)


def test_named_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_technique.shutil, "which", lambda name: "/opt/c++" if name == "my-c++" else None)
    monkeypatch.setenv("CXX", "my-c++")
    check_compiler(CPU)
