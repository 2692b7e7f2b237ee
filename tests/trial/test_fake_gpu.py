"""Steps on a GPU that is not there, beside what can be counted by hand and what torch's own engine does."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import fake_spec
from small_step import user_spec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from castwise.records.schema import MemoryParts, TracedMemory
from castwise.registry.precisions import find_precision
from castwise.trial.allocator import Event
from castwise.trial.fake_gpu import Saved, fake_gpu
from castwise.trial.memory_breakdown import trace_steps
from castwise.trial.memory_trace import trace_batches

BATCH, WIDTH, HIDDEN = 256, 32, 128
WEIGHTS = 4 * (WIDTH * HIDDEN + HIDDEN * HIDDEN + HIDDEN * HIDDEN)

MODEL = f"""\
import torch
from torch import nn

def build():
    layers = nn.Linear({WIDTH}, {HIDDEN}, bias=False), nn.ReLU(), nn.Linear({HIDDEN}, {HIDDEN}, bias=False), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear({HIDDEN}, {HIDDEN}, bias=False))
    batch = (torch.randn({BATCH}, {WIDTH}), torch.randn({BATCH}, {HIDDEN}))
    optimizer = lambda parameters: torch.optim.Adam(parameters, lr=1e-3)
    return {{"model": model, "batch": batch, "loss": nn.MSELoss(), "optimizer": optimizer}}
"""
BY_VALUE = MODEL.replace("return {", "model.register_forward_hook(keep)\n    return {").replace(
    "def build", "def keep(module, inputs, output):\n    return output * (output[output > 0].numel() > 0)\n\ndef build"
)


def traced(folder: Path, text: str, precision: str, *sizes: int, **changes: Any) -> TracedMemory:
    file = folder / "small.py"
    file.write_text(text)
    scale = find_precision(precision).loss_scale
    spec = user_spec(file, precision, loss_scale=scale, batch_size=sizes[0], **changes)
    return trace_batches(spec, sizes, ())


def parts_of(folder: Path, precision: str, **changes: Any) -> MemoryParts:
    return traced(folder, MODEL, precision, BATCH, **changes).batches[BATCH]


def test_a_step_in_float32_is_counted_to_the_byte(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, "fp32")
    assert parts.weights_bytes == WEIGHTS
    assert parts.optimizer_bytes == 2 * WEIGHTS, "the two moments; what counts Adam's steps is on the CPU"
    assert parts.batches_bytes == 4 * BATCH * (WIDTH + HIDDEN)
    # Each ReLU saves its output, which the layer after it saves, too.
    assert parts.saved_bytes == 4 * BATCH * 2 * HIDDEN
    assert parts.masters_bytes == parts.weight_casts_bytes == 0


@pytest.mark.parametrize(("precision", "masters"), [("bf16-true", 0), ("fp16-master", WEIGHTS)])
def test_weights_in_16_bits_have_half_the_bytes(tmp_path: Path, precision: str, masters: int) -> None:
    parts = parts_of(tmp_path, precision)
    assert (parts.weights_bytes, parts.masters_bytes) == (WEIGHTS // 2, masters)


def test_float32_copies_that_last_for_the_update_are_those_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = parts_of(tmp_path, "bf16-sr")
    assert 0 < whole.masters_bytes <= WEIGHTS
    monkeypatch.setattr(sys.modules["castwise.apply.precision"], "_MOST_COPIES", 1)
    assert parts_of(tmp_path, "bf16-sr").peak_bytes < whole.peak_bytes


def test_autocast_takes_the_types_of_a_gpu(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, "fp16-mixed")
    assert parts.weights_bytes == WEIGHTS
    assert 0 < parts.weight_casts_bytes <= WEIGHTS // 2


def test_saved_activations_grow_with_the_batch_and_nothing_else_does(tmp_path: Path) -> None:
    one, four = traced(tmp_path, MODEL, "fp32", BATCH, 4 * BATCH).batches.values()
    assert four.saved_bytes == 4 * one.saved_bytes
    assert (four.weights_bytes, four.optimizer_bytes) == (one.weights_bytes, one.optimizer_bytes)


def test_a_copy_of_a_model_and_its_statistics_is_traced(tmp_path: Path) -> None:
    text = MODEL.replace("import torch\n", "import copy, torch\n", 1).replace(
        "    batch =", "    model.append(copy.deepcopy(nn.BatchNorm1d(128)))\n    batch =", 1
    )
    found = traced(tmp_path, text, "fp32", BATCH)
    assert not found.needs_values
    assert found.batches[BATCH].weights_bytes == pytest.approx(WEIGHTS + 4 * 4 * HIDDEN, abs=1024)


def test_a_step_that_needs_values_is_computed_on_the_cpu(tmp_path: Path) -> None:
    found = traced(tmp_path, BY_VALUE, "fp32", BATCH)
    assert "aten.nonzero" in found.needs_values or "aten.index" in found.needs_values
    assert sorted(found.batches) == [BATCH // 2, BATCH], "in small batches the peak is the optimizer's"
    assert found.batches[BATCH].weights_bytes == WEIGHTS


def test_a_truth_value_that_the_code_reads_is_a_guess_with_its_line(tmp_path: Path) -> None:
    # Below this test all that runs is called by a line of the user's: this file's.
    assert not any("small.py" in line for line in traced(tmp_path, MODEL, "fp32", BATCH).guesses)
    branches = BY_VALUE.replace(
        "return output * (output[output > 0].numel() > 0)", "return 2 * output if output.sum() > 0 else output"
    )
    found = traced(tmp_path, branches, "fp32", BATCH)
    assert [line.rpartition("small.py:")[2] for line in found.guesses if "small.py" in line] == ["5"]
    assert not found.needs_values


def test_weights_without_a_gradient_have_no_state(tmp_path: Path) -> None:
    unused = MODEL.replace(
        "    batch =", "    model[0].register_parameter('unused', nn.Parameter(torch.zeros(1000, 1000)))\n    batch ="
    )
    found = traced(tmp_path, unused, "fp32", BATCH).batches[BATCH]
    assert found.weights_bytes == pytest.approx(WEIGHTS + 4_000_000, abs=512)
    assert found.optimizer_bytes == 2 * WEIGHTS


@pytest.fixture
def torchao_state() -> Iterator[None]:
    """Let torchao forget what it read of fake tensors, which it keeps for all later tests of the process."""
    subclass_8bit = pytest.importorskip("torchao.optim.subclass_8bit", reason="pip install 'castwise[fp8]'")
    yield
    for read_map in (subclass_8bit.get_qmap_signed, subclass_8bit.get_qmap_unsigned):
        read_map.cache_clear()


@pytest.mark.usefixtures("torchao_state")
def test_states_in_fewer_bits_are_traced() -> None:
    spec = fake_spec("bf16-mixed", workload="vit-b16", batch_size=2, techniques=("adam-state-8-bit",))
    found = trace_batches(spec, (2,), ())
    assert not found.needs_values
    plain = fake_spec("bf16-mixed", workload="vit-b16", batch_size=2)
    (whole,) = trace_batches(plain, (2,), ()).batches.values()
    assert found.batches[2].optimizer_bytes < 0.3 * whole.optimizer_bytes


@pytest.mark.usefixtures("torchao_state")
def test_a_state_in_fewer_bits_lies_where_the_first_update_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the backward pass has left is free by then: a state there keeps later tensors from it."""
    seen: list[Event] = []

    def kept(*arguments: Any) -> Any:
        parts, events = trace_steps(*arguments)
        seen.extend(events)
        return parts, events

    monkeypatch.setattr("castwise.trial.memory_trace.trace_steps", kept)
    adam = MODEL.replace("SGD(parameters, lr=1e-3, momentum=0.9)", "Adam(parameters)")
    traced(tmp_path, adam, "fp32", BATCH, techniques=("adam-state-8-bit",))
    made = [at for at, (_, num_bytes) in enumerate(seen) if num_bytes == WIDTH * HIDDEN]
    first_freed = next(at for at, (number, _) in enumerate(seen) if number < 0)
    assert len(made) == 2, "two moments of a byte each"
    assert first_freed < made[0] < len(seen) / 2


def test_what_holds_memory_in_a_transformer_halves_with_checkpoints() -> None:
    spec = fake_spec("bf16-mixed", workload="vit-b16", batch_size=16)
    (plain,) = trace_batches(spec, (16,), ()).batches.values()
    checkpointed = spec.model_copy(update={"techniques": ("activation-checkpointing",)})
    (kept,) = trace_batches(checkpointed, (16,), ()).batches.values()
    assert kept.saved_bytes < plain.saved_bytes / 4
    assert kept.weights_bytes == plain.weights_bytes


@contextmanager
def held() -> Iterator[None]:
    with fake_gpu({}), torch.autograd.graph.saved_tensors_hooks(lambda t: Saved(t.detach()), Saved.read):
        yield


def test_backward_gives_each_weight_a_gradient_of_its_shape_and_dtype() -> None:
    with held():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        model.to("cuda")
        data = torch.randn(2, 3, 8, 8, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = checkpoint(model, data, use_reentrant=False).float().square().mean()
        loss.backward()
        for weight in model.parameters():
            assert weight.grad is not None
            assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
            assert weight.device.type == "cuda"


@pytest.mark.parametrize(
    ("dtype", "mask", "kernel"),
    [
        (torch.bfloat16, False, "ScaledDotProductFlashAttentionBackward0"),
        (torch.bfloat16, True, "ScaledDotProductEfficientAttentionBackward0"),
        (torch.float32, False, "ScaledDotProductEfficientAttentionBackward0"),
    ],
)
def test_attention_is_that_of_a_gpu(dtype: torch.dtype, mask: bool, kernel: str) -> None:
    with held():
        query = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
        given = torch.zeros(128, 128, device="cuda", dtype=dtype) if mask else None
        made = nn.functional.scaled_dot_product_attention(query, query, query, given)
        assert type(made.grad_fn).__name__ == kernel
        made.sum().backward()
        assert query.grad is not None


def test_attention_within_torchs_own_layers_is_that_of_a_gpu() -> None:
    with held():
        layer = nn.TransformerEncoderLayer(64, 4, batch_first=True, device="cuda")
        data = torch.randn(2, 32, 64, device="cuda", requires_grad=True)
        names, left = set[str](), [layer(data).grad_fn]
        while left:
            node = left.pop()
            names.add(node.name())
            left += [following for following, _ in node.next_functions if following is not None]
        assert "ScaledDotProductEfficientAttentionBackward0" in names


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_save_their_gates(make: Callable[..., nn.RNNBase]) -> None:
    with held():
        layer = make(16, 32, num_layers=2).to("cuda")
        output, _ = layer(torch.randn(5, 3, 16, device="cuda"))
        output.sum().backward()
        assert output.shape == (5, 3, 32)
        assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factor: int, data: Tensor) -> Tensor:
        ctx.factor = factor
        return data * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient * ctx.factor


def test_functions_of_ones_own_take_part_in_backward() -> None:
    with held():
        weight = torch.ones(4, device="cuda", requires_grad=True)
        made = _Doubled.apply(2, weight)
        (made.sum() + weight.sum()).backward()
        assert weight.grad is not None
        (again,) = torch.autograd.grad(_Doubled.apply(2, weight).sum(), [weight])
        assert again.shape == weight.shape


def test_what_was_replaced_is_torchs_again() -> None:
    before = torch.autograd.graph._engine_run_backward, torch.cuda.is_bf16_supported
    with held():
        assert torch.autograd.graph._engine_run_backward is not before[0]
    assert (torch.autograd.graph._engine_run_backward, torch.cuda.is_bf16_supported) == before
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
