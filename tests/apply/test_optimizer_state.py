"""Adam's state in fewer bits, and weights that are rounded stochastically, in plain loops on the CPU."""

import copy
import io
import json
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from castwise.apply import precision as precision_module
from castwise.apply.applied import Applied, apply
from castwise.apply.precision import RoundedWeights, numeric_state, round_stochastically
from castwise.apply.techniques.optimizer_state import keep_state_in, state_written
from castwise.errors import TechniqueError, UsageError
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import loops_with_states

_NEEDS_TORCHAO = pytest.mark.skipif(not find_spec("torchao"), reason="pip install 'castwise[fp8]'")
STATES = [pytest.param(state, marks=_NEEDS_TORCHAO) for state in ("bf16", "8-bit", "fp8", "4-bit")]


@pytest.fixture(autouse=True)
def _switches_restored() -> Iterator[None]:
    with numeric_state(find_precision("fp32")):
        yield


TENSORS = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def train(applied: Applied, num_steps: int, *, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(num_steps):
        with applied.autocast():
            loss = (applied.model(TENSORS) - TENSORS.roll(1, 1)).square().mean()
        applied.backward(loss)
        applied.step()
        losses.append(loss.item())
    return losses


def test_stochastic_rounding_is_unbiased_and_takes_the_two_numbers_next_to_a_value() -> None:
    torch.manual_seed(0)
    for value in (1.001, -3.3337, 1e-20, 0.1):
        rounded = round_stochastically(torch.full((10_000,), value))
        assert torch.equal(rounded, rounded.bfloat16().float())
        below, above = sorted(set(rounded.tolist()))
        assert below < value < above
        standard_error = rounded.double().std() / 100
        assert abs(rounded.double().mean() - value) < 4 * standard_error
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf])
    assert torch.equal(round_stochastically(exact), exact)
    assert round_stochastically(torch.tensor([torch.nan])).isnan().all()


def test_small_updates_move_weights_in_the_mean() -> None:
    """They are less than half of the distance between two numbers of bfloat16 at 1: 2 ** -8."""
    moved = {}
    for precision in ("bf16-true", "bf16-sr", "fp32"):
        model = nn.Linear(1, 4096, bias=False)
        nn.init.ones_(model.weight)
        applied = apply(model, SGD(model.parameters(), lr=2.0**-10), precision=precision)
        torch.manual_seed(0)
        for _ in range(64):
            applied.backward(applied.model(torch.ones(1, 1)).sum())
            applied.step()
        moved[precision] = 1 - model.weight.detach().float().mean().item()
    assert moved["bf16-true"] == 0
    assert moved["fp32"] == pytest.approx(2.0**-4)
    assert moved["bf16-sr"] == pytest.approx(2.0**-4, rel=0.02)


def test_copies_of_weights_last_for_the_update_of_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts change nothing: the same random numbers round the same weights, in float32 and without clipping."""
    trained = []
    for most in (1 << 26, 300):
        monkeypatch.setattr(precision_module, "_MOST_COPIES", most)
        model = net()
        applied = apply(model, AdamW(model.parameters()), precision="bf16-sr")
        weights = applied._weights
        assert isinstance(weights, RoundedWeights)
        copies, most_bytes = [*weights._masters, *weights._gradients], [0]
        applied.optimizer.register_step_pre_hook(lambda *_, c=copies, m=most_bytes: m.append(held(c)))  # type: ignore[misc]
        losses = train(applied, 3)
        assert held(copies) == 0
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert {int(state["step"]) for state in applied.optimizer.state.values()} == {3}
        trained.append((losses, max(most_bytes), [parameter.detach().clone() for parameter in model.parameters()]))
    (whole_losses, whole_bytes, whole), (losses, most_bytes_of_parts, parts) = trained
    assert losses == whole_losses
    assert all(map(torch.equal, whole, parts))
    num_weights, largest = sum(each.numel() for each in whole), max(each.numel() for each in whole)
    assert whole_bytes == 8 * num_weights
    assert most_bytes_of_parts == 8 * largest


def held(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("most", [1 << 26, 300])
def test_gradients_are_clipped_to_the_norm_of_all_parts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "_MOST_COPIES", most)
    model = net()
    applied = apply(model, SGD(model.parameters(), lr=1.0), precision="bf16-sr")
    before = [parameter.detach().float() for parameter in model.parameters()]
    applied.backward(1000 * applied.model(TENSORS).square().mean())
    applied.step(clip_grad_norm=64.0)
    moved = [parameter.detach().float() - old for parameter, old in zip(model.parameters(), before, strict=True)]
    norm = torch.stack([each.norm() for each in moved]).norm().item()
    assert norm == pytest.approx(64.0, rel=0.02)


@pytest.mark.parametrize("precision", ["bf16-sr", "fp32"])
@pytest.mark.parametrize("state", ["", *STATES])
def test_it_trains_like_float32_and_a_saved_run_goes_on_bit_for_bit(precision: str, state: str) -> None:
    techniques = (f"adam-state-{state}",) if state else ()
    model = net()
    applied = apply(model, AdamW(model.parameters(), lr=1e-3), precision=precision, techniques=techniques)
    losses = train(applied, 30)
    plain = train(apply(other := net(), AdamW(other.parameters(), lr=1e-3), precision="fp32"), 30)
    assert losses[-1] < 0.8 * losses[0]
    assert losses[-1] == pytest.approx(plain[-1], rel=0.6 if state == "4-bit" else 0.05)
    file = io.BytesIO()
    torch.save(applied.state_dict(), file)
    file.seek(0)
    going_on = train(applied, 5, seed=3)
    again = apply(fresh := net(), AdamW(fresh.parameters(), lr=1e-3), precision=precision, techniques=techniques)
    again.load_state_dict(torch.load(file, weights_only=False))
    assert train(again, 5, seed=3) == going_on


@_NEEDS_TORCHAO
def test_a_second_moment_in_bfloat16_falls_as_in_float32() -> None:
    """It loses 0.1 % in a step, of which the nearest bfloat16 keeps nothing."""
    weight = nn.Parameter(torch.ones(64, 256))
    optimizer = AdamW([weight], lr=1e-6)
    keep_state_in(optimizer, "bf16")
    for step in range(201):
        weight.grad = torch.full_like(weight, 0.0 if step else 1.0)
        optimizer.step()
    moment = optimizer.state[weight]["exp_avg_sq"]
    assert moment.dtype == torch.bfloat16
    assert moment.float().mean().item() == pytest.approx(0.001 * 0.999**200, rel=0.005)


@_NEEDS_TORCHAO
def test_schedules_hooks_and_groups_stay() -> None:
    model, seen = net(), []
    first, last = model[0].parameters(), model[2].parameters()
    optimizer = Adam([{"params": first}, {"params": last, "lr": 0.0, "weight_decay": 0.1}], lr=1e-2, betas=(0.8, 0.9))
    keep_state_in(optimizer, "8-bit")
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    before = copy.deepcopy(model.state_dict())
    model(TENSORS).sum().backward()
    optimizer.step()
    schedule.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.005)
    optimizer.param_groups[0]["lr"] = 0.25  # as loops by hand do
    optimizer.step()
    assert len(seen) == 2
    assert torch.equal(model[2].weight, before["2.weight"])
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)


@_NEEDS_TORCHAO
@pytest.mark.parametrize("state", STATES)
def test_numbers_that_change_each_step_do_not_compile_anew(state: str) -> None:
    """OneCycleLR changes a beta; self-supervised training, as of DINO, changes the decay of weights."""
    counts, losses = [], []
    for is_kept in (True, False):
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 10)
        if is_kept:
            keep_state_in(optimizer, state)
        for step in range(6):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (1 + step)
            loss = (model(TENSORS) - TENSORS.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            losses.append(loss.item())
    assert 0 < counts[1] == counts[5], "the second step is the first with another decay"
    assert losses[5] == pytest.approx(losses[11], rel=0.3 if state == "4-bit" else 0.02)


@pytest.mark.parametrize("state", STATES)
def test_it_goes_on_from_a_plain_state_and_can_be_copied_and_read(state: str) -> None:
    model = net()
    plain = AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    model(TENSORS).square().mean().backward()
    plain.step()
    optimizer = AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    keep_state_in(optimizer, state)
    assert isinstance(optimizer, AdamW)
    optimizer.load_state_dict(plain.state_dict())
    optimizer = copy.deepcopy(optimizer)
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = torch.ones_like(weight)
    for _ in range(2):
        optimizer.step()
    assert json.loads(json.dumps(optimizer.param_groups[0]["lr"])) == 1e-3
    moment = copy.deepcopy(optimizer.state_dict())["state"][0]["exp_avg"]
    made = optimizer._new_buffer(weight, True)  # type: ignore[attr-defined]
    assert (type(moment), moment.dtype) == (type(made), made.dtype)
    assert float((moment / 2).abs().mean()) > 0
    assert not float(moment.zero_().abs().max())


@_NEEDS_TORCHAO
def test_a_step_that_was_replaced_is_refused() -> None:
    optimizer = Adam(net().parameters())
    optimizer.step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(TechniqueError, match="its step was replaced"):
        keep_state_in(optimizer, "8-bit")


@_NEEDS_TORCHAO
def test_states_that_users_optimizers_have_are_recognised() -> None:
    """The classes are those of transformers' `optim`: "adamw_torch_8bit" and "adamw_torch_4bit", torchao's."""
    optim = pytest.importorskip("torchao.optim")
    for name, state in (("AdamW8bit", "8-bit"), ("Adam4bit", "4-bit"), ("AdamWFp8", "fp8"), ("_AdamW", "")):
        assert state_written(getattr(optim, name)(net().parameters())) == state


def test_states_of_bitsandbytes_are_recognised_by_name_and_by_what_they_hold() -> None:
    """Source: bitsandbytes 0.50, optim/adamw.py: `optim_bits=8` is a class of no such name, whose state is uint8."""
    of_bnb = {"__module__": "bitsandbytes.optim.adamw"}
    for name in ("Adam8bit", "AdamW8bit", "PagedAdamW8bit"):
        assert state_written(type(name, (Adam,), of_bnb)(net().parameters())) == "8-bit"
    model = net()
    for dtype, state in ((torch.uint8, "8-bit"), (torch.bfloat16, "bf16"), (torch.float32, "")):
        plain = Adam(model.parameters())
        plain.state[model[0].weight] = {"state1": torch.zeros(4, dtype=dtype), "step": torch.tensor(1)}
        assert state_written(plain) == state
    half = Adam(model.bfloat16().parameters())
    half.state[model[0].weight] = {"exp_avg": torch.zeros(4, dtype=torch.bfloat16)}
    assert state_written(half) == "", "it is that of its weights"


def test_what_has_no_such_state_is_refused() -> None:
    model = net()
    stepped = Adam(model.parameters())
    model(TENSORS).sum().backward()
    stepped.step()
    for optimizer, why in (
        (SGD(model.parameters()), "is for torch's Adam and AdamW; this is SGD"),
        (stepped, "it has stepped"),
        (Adam(model.parameters(), maximize=True), "it maximizes"),
        (Adam(nn.Linear(63, 65).parameters()), "none of its weights has 4,096 values"),
    ):
        with pytest.raises(TechniqueError, match=why):
            keep_state_in(optimizer, "8-bit")


def test_without_torchao_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for of_other_version in (None, types.SimpleNamespace(adam=types.SimpleNamespace())):
        monkeypatch.setitem(sys.modules, "torchao.optim", of_other_version)
        with pytest.raises(TechniqueError, match=r"adam-state-4-bit needs torchao 0.18: pip install 'castwise\[fp8\]'"):
            keep_state_in(Adam(net().parameters()), "4-bit")


def test_states_are_crossed_with_loops() -> None:
    assert loops_with_states(("none", "compile"), ("fp32", "8bit")) == (
        "none",
        "adam-state-8-bit",
        "compile",
        "compile+adam-state-8-bit",
    )
    with pytest.raises(UsageError, match="No optimizer state named '3bit'"):
        loops_with_states(("none",), ("3bit",))
