"""Every row of the precision registry does to switches, weights and data what its columns say."""

from collections.abc import Iterator
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from small_step import compute_dtype, cross_entropy, make_batch, make_net
from torch import Tensor, nn

from castwise.apply.precision import (
    MasterWeights,
    autocast_maker,
    convert_weights,
    make_weights,
    numeric_state,
    read_fp32_precision,
    rounded_buffers,
)
from castwise.registry.precisions import PRECISIONS, Precision, find_precision
from castwise.registry.techniques import step_config_of

FP32, TF32 = find_precision("fp32"), find_precision("tf32")
BACKENDS: Any = torch.backends
CUDA_PRODUCTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
CPU_PRODUCTS = ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")

every_row = pytest.mark.parametrize("row", PRECISIONS, ids=lambda row: row.name)
every_row_with_products = pytest.mark.parametrize(
    "row", [row for row in PRECISIONS if row.float32_matmul is not None], ids=lambda row: row.name
)
every_row_of_a_cpu = pytest.mark.parametrize("row", [row for row in PRECISIONS if row.on_cpu], ids=lambda row: row.name)


def write_switches(all_: str, matmul: str = "none", conv: str = "none", rnn: str = "none") -> None:
    torch.set_float32_matmul_precision("highest")  # writes some of the others
    BACKENDS.fp32_precision = all_
    BACKENDS.cudnn.fp32_precision = "none"
    BACKENDS.cuda.matmul.fp32_precision = matmul
    BACKENDS.cudnn.conv.fp32_precision = conv
    BACKENDS.cudnn.rnn.fp32_precision = rnn
    for part in (BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv, BACKENDS.mkldnn.rnn):
        part.fp32_precision = "none"


@pytest.fixture
def switches() -> Iterator[None]:
    """Give the float32 switches back as torch has them by default, whatever the test leaves."""
    yield
    write_switches("none", conv="tf32", rnn="tf32")


# The global switches


def test_sums_in_float16_are_switched_on_and_off_again() -> None:
    assert not BACKENDS.cuda.matmul.allow_fp16_accumulation
    with numeric_state(find_precision("fp16-mixed"), step_config_of(["fp16-accumulation"])):
        assert BACKENDS.cuda.matmul.allow_fp16_accumulation
    assert not BACKENDS.cuda.matmul.allow_fp16_accumulation


@every_row_with_products
@pytest.mark.parametrize("conv", ["ieee", "tf32", "none"])
@pytest.mark.parametrize("matmul", ["ieee", "tf32", "none"])
def test_numeric_state_is_set_and_restored(row: Precision, matmul: str, conv: str, switches: None) -> None:
    write_switches("none", matmul=matmul, conv=conv, rnn="tf32")
    before, inside = read_fp32_precision(), {}
    with suppress(ZeroDivisionError), numeric_state(row):
        inside.update(read_fp32_precision())
        BACKENDS.cudnn.rnn.fp32_precision = "ieee"  # whatever the body leaves, and even if it raises
        raise ZeroDivisionError
    assert {inside[path] for path in CUDA_PRODUCTS} == {row.float32_matmul}
    assert {inside[path] for path in CPU_PRODUCTS} == {"ieee"}
    assert inside["all"] == inside["cudnn"] == row.float32_matmul
    assert read_fp32_precision() == before
    assert (before["cuda.matmul"], before["cudnn.conv"], before["cudnn.rnn"]) == (matmul, conv, "tf32")


@pytest.mark.parametrize("row", [FP32, TF32], ids=lambda row: row.name)
def test_switches_follow_their_parent_after_numeric_state(row: Precision, switches: None) -> None:
    """A switch that was never written follows `torch.backends.fp32_precision`; it must not stop doing so."""
    write_switches("tf32")
    with numeric_state(row):
        pass
    assert set(read_fp32_precision().values()) == {"tf32"}
    BACKENDS.fp32_precision = "ieee"
    assert set(read_fp32_precision().values()) == {"ieee"}


@every_row_with_products
@pytest.mark.parametrize("older", ["highest", "high", "medium"])
def test_older_matmul_switch_agrees(row: Precision, older: str, switches: None) -> None:
    """Inductor's max-autotune of torch 2.11 asks it, and torch raises where it contradicts the others."""
    torch.set_float32_matmul_precision(older)
    before = read_fp32_precision()
    with numeric_state(row):
        assert torch.get_float32_matmul_precision() == ("high" if row.float32_matmul == "tf32" else "highest")
        assert BACKENDS.cuda.matmul.allow_tf32 == (row.float32_matmul == "tf32")
        assert BACKENDS.cuda.matmul.fp32_precision == row.float32_matmul
        assert BACKENDS.mkldnn.matmul.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == older
    assert read_fp32_precision() == before


@pytest.mark.parametrize(
    ("older", "path", "value"),
    [("highest", "cuda.matmul", "tf32"), ("high", "mkldnn.matmul", "bf16"), ("medium", "mkldnn.matmul", "tf32")],
)
def test_contradictory_older_matmul_switch(older: str, path: str, value: str, switches: None) -> None:
    torch.set_float32_matmul_precision(older)
    switch = resolve_name(f"torch.backends:{path}")
    switch.fp32_precision = value
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    for row in (FP32, TF32):
        with numeric_state(row):
            assert BACKENDS.cuda.matmul.allow_tf32 == (row is TF32)
    assert switch.fp32_precision == value


# What a row makes of the weights


@every_row
def test_weight_dtypes(row: Precision) -> None:
    net, original = make_net(), make_net()
    convert_weights(net, row)
    for tensor in (net.conv.weight, net.linear.weight, net.linear.bias):
        assert tensor.dtype == getattr(torch, row.param_dtype)
    for (name, weight), before in zip(net.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(weight, before.to(weight.dtype)), name
        assert weight.requires_grad, name


@every_row
def test_batch_norm_dtype(row: Precision) -> None:
    batch_norms = nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(2, affine=False)), nn.BatchNorm3d(2)
    net = nn.Sequential(nn.Sequential(*batch_norms), nn.LayerNorm(4), nn.GroupNorm(2, 4))
    convert_weights(net, row)
    floating = [tensor for tensor in net[0].state_dict().values() if tensor.is_floating_point()]
    assert len(floating) == 10
    assert {tensor.dtype for tensor in floating} == {getattr(torch, row.batch_norm_dtype)}
    assert {weight.dtype for weight in net[1:].parameters()} == {getattr(torch, row.param_dtype)}


@every_row
def test_complex_weights_stay_and_are_stepped_as_they_are(row: Precision) -> None:
    net = nn.Linear(2, 2)
    net.filter = nn.Parameter(torch.full((2,), 1 + 2j))
    convert_weights(net, row)
    weights = make_weights(net, row)
    assert torch.equal(net.filter, torch.full((2,), 1 + 2j))
    assert weights.stepped_for(net.filter) is net.filter


@every_row
def test_buffers_that_a_cast_rounds_are_named(row: Precision) -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(2, 2))
    net[0].running_mean.fill_(0.1)
    net[1].register_buffer("even", torch.ones(2))
    net[1].register_buffer("frequencies", 10000 ** (-torch.arange(4) / 4))
    found = rounded_buffers(net, row)
    assert found == (() if row.param_dtype == "float32" else (f"buffer 1.frequencies is rounded to {row.param_dtype}",))


# What a row makes of inputs, activations and outputs


@every_row_of_a_cpu
def test_activation_dtypes(row: Precision) -> None:
    net = make_net()
    convert_weights(net, row)
    seen: dict[str, torch.dtype] = {}
    for name in ("conv", "norm", "linear"):
        net.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: seen.__setitem__(name, output.dtype)
        )
    with autocast_maker(row, "cpu")():
        loss = cross_entropy(net, make_batch())
    assert seen == dict.fromkeys(("conv", "norm", "linear"), compute_dtype(row))
    assert loss.dtype == torch.float32


class Spy(nn.Module):
    """Remembers what its forward was given, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: tuple[Any, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return {"args": args, **kwargs}


def dtypes_of(nested: Any) -> Any:
    """Return the same nest with tensors' dtypes in place of the tensors."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.dtype, nested)


@every_row
def test_dtypes_of_inputs_and_outputs(row: Precision) -> None:
    model = Spy()
    convert_weights(model, row)
    tokens, floats = torch.tensor([2**24 + 1]), torch.ones(2)
    output = model(floats, (tokens, [floats, None]), hidden=floats, flag=True)
    dtype = getattr(torch, row.param_dtype)
    assert dtypes_of(model.seen) == ((dtype, (torch.int64, [dtype, None])), {"hidden": dtype, "flag": True})
    f32 = torch.float32
    assert dtypes_of(output) == {"args": (f32, (torch.int64, [f32, None])), "hidden": f32, "flag": True}
    assert int(output["args"][1][0]) == 2**24 + 1


# The tensors that the optimizer steps


def give_gradients(net: nn.Module, value: float) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_compiled_code_is_kept_apart_by_autocast_dtype() -> None:
    """torch 2.11 and 2.12 take the code of another dtype from their cache (pytorch/pytorch#181564)."""
    for own in ("", "mine "):
        tags = []
        with torch.compiler.config.patch(cache_key_tag=own):
            for name in ("fp16-mixed", "bf16-mixed", "fp16-mixed"):
                autocast_maker(find_precision(name), "cpu")
                tags.append(torch.compiler.config.cache_key_tag)
        assert tags == [f"{own}autocast float16", f"{own}autocast bfloat16", f"{own}autocast float16"]


def test_master_gradients_keep_their_memory() -> None:
    """No step allocates them anew, not even one after a step in which a weight took no part."""
    net = make_net()
    convert_weights(net, find_precision("fp16-master"))
    weights = MasterWeights(net)
    masters = [weights.stepped[index] for index in (0, 3, 4)]  # all but batch norm's
    addresses = []
    for unused in (False, True, False):
        give_gradients(net, 0.1)
        net.conv.weight.grad = None if unused else net.conv.weight.grad
        weights.collect_gradients()
        addresses.append([None if master.grad is None else master.grad.data_ptr() for master in masters])
    assert None not in addresses[0]
    assert addresses[1] == [None, *addresses[0][1:]]
    assert addresses[2] == addresses[0]
