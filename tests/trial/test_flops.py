"""FLOPs of training steps against closed forms, on tensors without memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_step import cpu_spec, user_spec
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from castwise.records.schema import StepFlops
from castwise.registry.workloads import WORKLOADS, find_workload
from castwise.spec.trial import FIT
from castwise.trial.flops import _FORMULAS, ProductCounter, _count_without_memory, _is_causal
from castwise.trial.models import build_task
from castwise.trial.steady_run import SteadyRun

MNIST_MACS = 11_992_448
FIRST_MACS = 32 * 26 * 26 * 9  # of its first layer, whose input needs no gradient

CPU, META = torch.device("cpu"), torch.device("meta")


def counted(work: Callable[[], Tensor]) -> ProductCounter:
    """Return what a forward and backward pass multiplies."""
    with ProductCounter(CPU) as counter:
        work().backward()
    return counter


def products(work: Callable[[], Tensor]) -> dict[str, int]:
    return {kind: sum(formats.values()) for kind, formats in counted(work).products.items()}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=META, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("groups", [1, 4, 64])
def test_convolution_backward_costs_twice_its_forward_whatever_the_groups(groups: int) -> None:
    with META:
        layer = nn.Conv2d(64, 128, 3, stride=2, padding=1, groups=groups)
    forward = 2 * 5 * 128 * 8 * 8 * (64 // groups) * 9
    kind = "convolution" if groups == 1 else "grouped_convolution"
    assert products(lambda: layer(meta(5, 64, 16, 16)).sum()) == {kind: 3 * forward}
    layer.weight.requires_grad_(False)
    assert products(lambda: layer(meta(5, 64, 16, 16)).sum()) == {kind: 2 * forward}
    layer.weight.requires_grad_(True)
    assert products(lambda: layer(meta(5, 64, 16, 16).detach()).sum()) == {kind: 2 * forward}


@pytest.mark.parametrize("groups", [1, 8])
def test_a_transposed_convolution_counts_its_input(groups: int) -> None:
    with META:
        layer = nn.ConvTranspose1d(16, 32, 4, stride=2, groups=groups)
    forward = 2 * 3 * 16 * 10 * (32 // groups) * 4
    assert sum(products(lambda: layer(meta(3, 16, 10)).sum()).values()) == 3 * forward


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers(kind: Any, gates: int, bidirectional: bool) -> None:
    steps, batch, inputs, width = 7, 3, 10, 12
    directions = 1 + bidirectional
    matrices = gates * width * (inputs + width) + gates * width * (directions * width + width)
    forward = 2 * steps * batch * directions * matrices
    layer = kind(inputs, width, num_layers=2, bidirectional=bidirectional)
    data = torch.randn(steps, batch, inputs, requires_grad=True)
    found = products(lambda: torch.sum(layer(data)[0]))
    # Layers without a kernel of their own need no gradient of the state that they start from.
    unneeded = 2 * batch * directions * 2 * gates * width * width
    assert sum(found.values()) in (3 * forward, 3 * forward - unneeded)


@pytest.mark.parametrize("needs_data", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_cudnn_s_recurrent_layers(bidirectional: bool, needs_data: bool) -> None:
    """The operator's own arguments; its CUDA kernel does not run."""
    steps, batch, inputs, width, directions = 7, 3, 10, 12, 1 + bidirectional
    shapes = [(4 * width, inputs), (4 * width, width), (4 * width,), (4 * width,)] * directions
    weights = [torch.empty(shape, device=META) for shape in shapes]
    data, state = torch.empty(steps, batch, inputs, device=META), torch.empty(directions, batch, width, device=META)
    common = (2, width, 0, 1, False, 0.0, True, bidirectional, [], None)
    packets = torch.ops.aten._cudnn_rnn, torch.ops.aten._cudnn_rnn_backward
    forward_args = (data, weights, 4, None, state, state, *common)
    output, reserve, mask = state, state, [needs_data, False, False, True]
    backward_args = (data, weights, 4, state, state, state, output, None, None, None, *common, reserve, mask)
    for packet, args in zip(packets, (forward_args, backward_args), strict=True):
        assert len(args) == len(packet.default._schema.arguments)
    forward = 2 * steps * batch * directions * 4 * width * (inputs + width)
    saved = 0 if needs_data else 2 * steps * batch * directions * 4 * width * inputs
    assert _FORMULAS[packets[0]](forward_args, None)[:2] == ("recurrent", forward)
    assert _FORMULAS[packets[1]](backward_args, None)[:2] == ("recurrent", 2 * forward - saved)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_attention_counts_the_full_matrix_in_every_back_end(backend: str, causal: bool) -> None:
    batch, heads, queries, keys, width = 2, 3, 8, 8, 16
    query, key, value = (torch.randn(batch, heads, n, width, requires_grad=True) for n in (queries, keys, keys))
    with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, backend)):
        found = products(lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=causal).sum())
    assert found == {"batched" if backend == "MATH" else "attention": 3 * 4 * batch * heads * queries * keys * width}


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_attention_on_a_gpu_has_the_same_formulas(name: str) -> None:
    query, key, value = (torch.empty(2, 4, n, d, device=META) for n, d in ((8, 16), (32, 16), (32, 24)))
    forward = 2 * 2 * 4 * 8 * 32 * (16 + 24)
    packets = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}{end}") for end in ("", "_backward")]
    assert _FORMULAS[packets[0]]((query, key, value, None), None)[:2] == ("attention", forward)
    assert _FORMULAS[packets[1]]((query, query, key, value), None)[:2] == ("attention", 2 * forward)


def test_flash_attention_s_own_operators_count_no_score_twice() -> None:
    data = torch.empty(2, 32, 4, 16, device=META)  # batch, tokens, heads, width
    forward = 2 * 2 * 2 * 4 * 32 * 32 * 16
    no_lengths = (None, None, 32, 32)
    forwards, backwards = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
    assert _FORMULAS[forwards]((data, data, data, *no_lengths, 0.0, True, False), None)[:2] == ("attention", forward)
    assert _FORMULAS[backwards]((*[data] * 6, *no_lengths), None)[:2] == ("attention", 2 * forward)


def test_products_of_matrices() -> None:
    a, b, c = meta(5, 6), meta(6, 7), meta(4, 5, 6)
    assert products(lambda: torch.sum(a @ b)) == {"linear": 3 * 2 * 5 * 6 * 7}
    assert products(lambda: torch.addmm(meta(7), a, b).sum()) == {"linear": 3 * 2 * 5 * 6 * 7}
    assert products(lambda: torch.baddbmm(meta(4, 5, 5), c, meta(4, 6, 5)).sum()) == {"batched": 3 * 2 * 4 * 5 * 6 * 5}
    assert products(lambda: torch.einsum("bij,bkj->bik", c, meta(4, 9, 6)).sum()) == {"batched": 3 * 2 * 4 * 5 * 9 * 6}
    assert products(lambda: torch.einsum("bij,jk->bik", c, b).sum()) == {"linear": 3 * 2 * 4 * 5 * 6 * 7}
    assert products(lambda: functional.embedding(torch.zeros(9, dtype=torch.int64, device=META), a).sum()) == {}


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "is_large"),
    [(1280, 1280, 1280, True), (2048, 1279, 2048, False), (1279, 1280, 2048, False), (2048, 2048, 1000, False)],
)
def test_products_that_are_large_enough_for_fp8_are_told_apart(
    rows: int, inputs: int, outputs: int, is_large: bool
) -> None:
    layer, data = nn.Linear(inputs, outputs, device=META), meta(1, rows, inputs)
    with ProductCounter(CPU) as counter:
        layer(data).sum().backward()
    assert counter.products["linear"]["fp32"] == 3 * 2 * rows * inputs * outputs
    assert counter.large_linear_flops == is_large * counter.products["linear"]["fp32"]


def test_an_fp8_product_is_counted_in_its_format() -> None:
    a, b = (torch.empty(shape, device=META, dtype=torch.float8_e4m3fn) for shape in ((32, 16), (48, 16)))
    scale = torch.empty((), device=META)
    with ProductCounter(CPU) as counter:
        torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16)
    assert counter.products == {"linear": {"fp8": 2 * 32 * 16 * 48}}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_apart(use_reentrant: bool) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid())
    data = torch.randn(4, 8, requires_grad=True)
    found = counted(lambda: checkpoint(layers, data, use_reentrant=use_reentrant).sum())
    assert found.recomputed_flops == 2 * 2 * 4 * 8 * 8
    assert found.recomputed_bytes == 4 * 4 * 4 * 8, "the outputs of four layers; views are none"
    assert found.products == {"linear": {"fp32": 2 * 3 * 2 * 4 * 8 * 8}}


def test_a_gradient_of_a_gradient_is_not_taken_for_a_checkpoint() -> None:
    layer, data = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def penalty() -> Tensor:
        (gradient,) = torch.autograd.grad(layer(data).sigmoid().sum(), data, create_graph=True)
        return gradient.square().sum()

    assert (counted(penalty).recomputed_flops, counted(penalty).recomputed_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("mask", "is_causal"),
    [
        (torch.full((2, 1, 8, 8), -torch.inf).triu(1), True),
        (torch.full((8, 8), torch.finfo(torch.float32).min).triu(1).expand(2, 3, 8, 8), True),
        (torch.zeros(8, 8), False),
        (torch.full((2, 1, 8, 8), -torch.inf).triu(1).index_fill(0, torch.tensor(1), -torch.inf), False),  # padded
        (torch.full((8, 9), -torch.inf).triu(1), False),
    ],
)
def test_a_mask_is_causal_if_it_leaves_the_keys_up_to_each_query_s(mask: Tensor, is_causal: bool) -> None:
    assert _is_causal(mask) == is_causal


def test_saved_activations_count_once_and_weights_do_not() -> None:
    layer, data = nn.Linear(8, 8), torch.randn(4, 8)
    with ProductCounter(CPU, [*layer.parameters(), data]) as counter:
        hidden = layer(data).sigmoid()
        (layer(hidden).sum() + hidden.sum()).backward()
    assert counter.saved_bytes == hidden.nbytes


@torch.library.custom_op("castwise_test::half", mutates_args=())
def half(data: Tensor) -> Tensor:
    return data / 2


def test_an_operator_of_others_is_named() -> None:
    with ProductCounter(CPU) as counter:
        half(torch.ones(2))
    assert counter.uncounted == {"castwise_test.half"}


# Workloads


MACS = {
    "resnet18": 1.814e9,
    "resnet34": 3.664e9,
    "resnet50": 4.089e9,
    "resnet101": 7.801e9,
    "resnet152": 11.514e9,
    "inception_v3": 5.713e9,
    "efficientnet_b0": 0.386e9,
}


def workload_flops(name: str, batch_size: int = 2) -> int:
    with META:
        task = build_task(find_workload(name))
    batch = task.make_batches(1, batch_size, CPU, torch.Generator())[0]
    return sum(products(lambda: task.compute_loss(task.model, tuple(part.to(META) for part in batch))).values())


def first_layer_macs(name: str) -> int:
    """Return the multiply-accumulates of the first layer, whose input needs no gradient."""
    with META:
        task = build_task(find_workload(name))
    images = task.make_batches(1, 1, CPU, torch.Generator())[0][0].to(META)
    first = next(each for each in task.model.modules() if isinstance(each, nn.Conv2d | nn.Linear))
    out = first(images)
    return int(out[0].numel() * first.weight[0].numel())


IMAGES = [row.name for row in WORKLOADS if row.macs_per_sample or row.name in MACS]


@pytest.mark.parametrize("name", IMAGES)
def test_a_step_is_three_forward_passes_but_for_the_first_layer_s_input(name: str) -> None:
    macs = find_workload(name).macs_per_sample or MACS[name]
    expected = 2 * 2 * (3 * macs - first_layer_macs(name))
    assert workload_flops(name) == pytest.approx(expected, rel=2e-3 if name in MACS else 1e-12)


@pytest.mark.parametrize(
    ("name", "gates", "width"),
    [("lstm-lm", 4, 200), ("gru-lm", 3, 200), ("rnn-lm", 1, 200), ("lstm-lm-1500", 4, 1500)],
)
def test_a_language_model_is_its_gates_and_its_decoder(name: str, gates: int, width: int) -> None:
    recurrent = 2 * gates * 2 * width * width
    expected = 3 * 2 * 2 * 35 * (recurrent + 33_278 * width)
    # Without cuDNN the state that a batch starts from gets no gradient.
    assert workload_flops(name) == expected - 2 * 2 * 2 * gates * width * width


@pytest.mark.parametrize("name", [row.name for row in WORKLOADS if row.family == "fastai_resnet"])
def test_a_frozen_body_has_no_gradients_of_weights(name: str) -> None:
    macs = MACS[name.removeprefix("fastai-")]
    assert workload_flops(name) == pytest.approx(2 * 2 * 2 * macs, rel=0.05)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("gpt2", 12 * 768**2),
        ("gpt2-xl", 12 * 1600**2),
        ("gpt-d4096", 12 * 4096**2),
        ("llama-1b", 2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192),
        ("bert-base", 12 * 768**2),
    ],
)
def test_a_transformer_is_six_times_its_weights_and_attention(name: str, layer: int) -> None:
    sizes: dict[str, Any] = dict(find_workload(name).options)
    width, depth, length = sizes["width"], sizes["depth"], sizes["length"]
    weights = depth * layer + width * sizes["vocabulary"] + (width**2 if name == "bert-base" else 0)
    assert workload_flops(name) == 2 * length * (6 * weights + 12 * depth * width * length)


def test_a_vision_transformer_s_patches_have_no_gradient_and_its_head_has_one_token() -> None:
    layers = 197 * (6 * 12 * 12 * 768**2 + 12 * 12 * 768 * 197)
    assert workload_flops("vit-b16") == 2 * (layers + 2 * 2 * 196 * 768 * 768 + 6 * 768 * 1000)


# Trials


def flops_of(run: SteadyRun) -> StepFlops:
    run.warm_up()
    run.run_block()
    flops = run.finish().flops
    assert flops is not None
    return flops


def own_spec(tmp_path: Path, lines: str, **changes: object) -> Any:
    file = tmp_path / "own.py"
    file.write_text(f"import torch\nfrom torch import nn\n\n{lines}")
    return user_spec(file, **changes)


@pytest.mark.parametrize(
    ("precision", "name"), [("fp32", "fp32"), ("default", "fp32"), ("bf16-mixed", "bf16"), ("bf16-true", "bf16")]
)
def test_a_trial_counts_its_step_in_the_format_of_its_precision(precision: str, name: str) -> None:
    run = SteadyRun(cpu_spec(precision), None)
    flops = flops_of(run)
    assert flops.by_format == {name: 4 * 2 * (3 * MNIST_MACS - FIRST_MACS)}
    assert set(flops.products) == {"convolution", "linear"}
    without_memory = _count_without_memory(run._step, run._task, run._batches[:1], CPU)
    assert {kind: dict(formats) for kind, formats in without_memory.products.items()} == flops.products
    assert without_memory.saved_bytes == pytest.approx(flops.saved_bytes, rel=0.01)
    assert flops.weights_bytes == flops.gradients_bytes == 1_199_882 * (2 if precision == "bf16-true" else 4)


def test_state_of_a_task_is_as_before_a_count_without_memory() -> None:
    run = SteadyRun(cpu_spec(workload="lstm-lm", batch_size=2), None)
    before = run._task.recurrent_state.read()  # type: ignore[union-attr]
    found = _count_without_memory(run._step, run._task, run._batches[:1], CPU)
    assert sum(found.products["linear"].values()) == 3 * 2 * 2 * 35 * 200 * 33_278
    assert sum(found.products["recurrent"].values()) == 3 * 2 * 2 * 35 * 2 * 8 * 200 * 200
    after = run._task.recurrent_state.read()  # type: ignore[union-attr]
    assert all(now is then for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize("changes", [{"repeat": 1}, {"protocol": FIT}])
def test_only_the_first_trial_of_a_configuration_counts(changes: dict[str, Any]) -> None:
    run = SteadyRun(cpu_spec(**changes), None)
    run.warm_up()
    run.run_block()
    assert run.finish().flops is None


READS_VALUES = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, data):
        return self.layer(data[: int(torch.ones(()).item()) * len(data)])

def build():
    batch = torch.randn(8, 6), torch.randn(8, 5)
    return {"model": Model(), "batch": batch, "loss": nn.MSELoss(), "accumulate": 2}
"""


def test_a_user_s_model_that_reads_values_is_counted_with_its_accumulation(tmp_path: Path) -> None:
    flops = flops_of(SteadyRun(own_spec(tmp_path, READS_VALUES, batch_size=16), None))
    assert flops.missing == ""
    assert flops.products == {"linear": {"fp32": 2 * 2 * 2 * 8 * 6 * 5}}
    assert flops.saved_bytes == 2 * 4 * 8 * 5, "the loss saves the difference, in each part"
    assert flops.update_bytes >= 3 * 4 * 35, "the weights and two moments of AdamW"


OF_MANY_LENGTHS = """\
def build():
    lengths = iter(range(1, 100))

    def batch(size):
        data = torch.randn(size, next(lengths), 6)
        return data, torch.zeros(())

    return {"model": nn.Linear(6, 5), "batch": batch, "loss": lambda output, _: output.mean(), "batch_size": 8}
"""


def test_batches_of_several_shapes_count_with_their_mean(tmp_path: Path) -> None:
    run = SteadyRun(own_spec(tmp_path, OF_MANY_LENGTHS, batch_size=8), None)
    lengths = [batch[0].shape[1] for batch in run._batches]
    assert len(set(lengths)) == len(lengths) == 4
    flops = flops_of(run)
    assert flops.products == {"linear": {"fp32": 2 * 2 * 8 * 6 * 5 * sum(lengths) // 4}}
    without_memory = _count_without_memory(run._step, run._task, run._batches, CPU)
    assert without_memory.products == {"linear": {"fp32": 4 * flops.total}}


REFUSES = """\
from torch.utils._python_dispatch import _get_current_dispatch_mode

class Model(nn.Linear):
    def forward(self, data):
        if _get_current_dispatch_mode() is not None:
            raise ValueError("not here\\nand not there")
        return super().forward(data)

def build():
    return Model(6, 5), (torch.randn(8, 6), torch.randn(8, 5)), nn.MSELoss()
"""


def test_a_user_s_model_that_cannot_be_counted_does_not_fail_its_trial(tmp_path: Path) -> None:
    flops = flops_of(SteadyRun(own_spec(tmp_path, REFUSES, batch_size=8), None))
    assert flops == StepFlops(missing="its products could not be counted: ValueError: not here")
