"""torch.compile: the same losses, one compilation for one shape, and the error without a compiler."""

from collections.abc import Callable, Iterator

import pytest
import torch
from loops import WORDS, losses_of, spec_of
from small_step import SmallNet, cross_entropy, make_batch, make_net
from torch import Tensor, nn
from torch._dynamo.utils import counters

from castwise.apply.pytree import Batch
from castwise.apply.techniques import compile as compile_technique
from castwise.apply.techniques.compile import CompiledLoss, check_compiler, compile_blocks, run_uncompiled
from castwise.errors import TechniqueError, UsageError
from castwise.trial.models.transformer import Architecture, Transformer, compute_loss

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.slow
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


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Let torch.compile trace, without making code; yield what says how many graphs were traced."""
    torch._dynamo.reset()
    counters["stats"].clear()
    limit = torch._dynamo.config.recompile_limit
    monkeypatch.setattr(torch, "compile", lambda run, **_: _compile(run, backend="eager", dynamic=False))
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()


_compile = torch.compile


def test_blocks_are_compiled_once_for_all_that_are_alike(counts: Callable[[], int]) -> None:
    torch.manual_seed(0)
    model = Transformer(Architecture("llama", width=16, depth=12, heads=2, length=8, vocabulary=32, hidden=24))
    batch = (tokens := torch.randint(32, (2, 8)), tokens)
    plain = compute_loss(model, batch)
    compile_blocks(model, "default")
    loss = CompiledLoss(compute_loss, None)
    for _ in range(2):
        found = loss(model, batch)
        found.backward()  # type: ignore[no-untyped-call]
    assert counts() == 1
    assert found.item() == pytest.approx(plain.item(), rel=1e-5)
    loss(model, (tokens[:1], tokens[:1]))
    with run_uncompiled(), torch.no_grad():
        compute_loss(model.eval(), batch)
    assert counts() == 1, "a last batch and validation run uncompiled"


class Numbered(nn.Module):
    """A block that knows its number, so that each has code of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of x's shape."""
        y: Tensor = self.linear(x) + self.number
        return y


def test_blocks_that_differ_are_all_compiled(counts: Callable[[], int]) -> None:
    model = nn.Sequential(*map(Numbered, range(10)))
    compile_blocks(model, "default")
    model(torch.ones(2, 4))
    assert counts() == 10, "torch alone would stop after 8"


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(TechniqueError, match="compile-blocks finds nothing to do"):
        compile_blocks(make_net(), "default")


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
