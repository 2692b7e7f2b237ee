"""A step compared with float32: planted faults are found, and the next step is as it would have been."""

import copy
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from loops import setup_of, spec_of
from small_step import MOMENTUM_SGD, cpu_spec, cross_entropy, make_batch, make_net, make_step, make_task
from torch import Tensor, nn

from castwise.analysis.numerics import findings_of, first_loss, underflow_share
from castwise.apply.precision import numeric_state
from castwise.records.schema import ModuleNumerics, StepNumerics
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import OptimizerSpec
from castwise.trial.numerics import compare_script, measure_numerics


def measured(
    precision: str, model: nn.Module | None = None, lr: float = 0.125, loss_scale: str = "none", factor: float = 1.0
) -> StepNumerics:
    row = find_precision(precision)

    def loss(net: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return cross_entropy(net, batch) * factor

    with numeric_state(row):
        optimizer = OptimizerSpec("SGD", (("lr", lr),))
        step = make_step(row, make_task(model or make_net(), loss), optimizer, loss_scale=loss_scale)
        return measure_numerics(cpu_spec(precision, loss_scale=loss_scale), step, None, make_batch())


def by_name(numerics: StepNumerics) -> dict[str, ModuleNumerics]:
    assert numerics.missing == ""
    return {each.name: each for each in numerics.modules}


def test_float32_compared_with_itself_loses_nothing() -> None:
    for row in by_name(measured("fp32")).values():
        assert (row.output_sqnr_db, row.gradient_sqnr_db) == (200.0, 200.0)
        assert row.overflow_share == 0.0
    assert measured("fp32").falls == ()


def test_a_model_that_draws_numbers_draws_the_same_in_both_steps() -> None:
    net = make_net()
    forward = net.forward
    net.forward = lambda images: forward(images * (1 + random.random() + np.random.random() + torch.rand(1).item()))
    for row in by_name(measured("fp32", net)).values():
        assert (row.output_sqnr_db, row.gradient_sqnr_db) == (200.0, 200.0)


def test_fewer_bits_have_a_lower_ratio_of_signal_to_noise() -> None:
    ratios = {name: by_name(measured(name))["linear"].output_sqnr_db or 0.0 for name in ("bf16-mixed", "bf16-true")}
    assert all(25 < ratio < 70 for ratio in ratios.values()), "8 bits are 48 dB"
    assert set(by_name(measured("bf16-mixed"))) == {"conv", "norm", "linear"}


def test_gradients_that_are_too_small_for_float16_are_counted_where_they_are() -> None:
    factor = 2.0**-28
    rows = by_name(measured("bf16-mixed", factor=factor))
    shares = {name: underflow_share(row.weights, "float16") for name, row in rows.items()}
    assert min(shares.values()) > 0.99, "2^-28 times a gradient below 1 is below 2^-25"
    plain = by_name(measured("bf16-mixed"))
    for name, row in rows.items():  # the exponents are those of the same gradients, 28 lower
        moved = {exponent + 28: count for exponent, count in row.weights.by_exponent.items()}
        assert moved == plain[name].weights.by_exponent
    found = findings_of(measured("fp16-true", factor=factor), find_precision("fp16-true"), "none")
    assert any("float16 without scaling loses 100 %" in each.sentence for each in found)


@pytest.mark.parametrize(("lr", "least", "most"), [(1e-7, 0.95, 1.0), (10.0, 0.0, 0.1)])
def test_updates_that_are_too_small_for_bfloat16_are_lost(lr: float, least: float, most: float) -> None:
    rows = by_name(measured("bf16-true", lr=lr))
    share = rows["linear"].lost_update_share
    assert share is not None
    assert least <= share <= most
    assert by_name(measured("bf16-master", lr=lr))["linear"].lost_update_share is None


def test_fewer_bits_lose_small_updates_and_stochastic_rounding_keeps_their_mean() -> None:
    """Updates of Adam are about as large as the learning rate; half of a step of bfloat16 is 2 ** -9 of a weight."""
    lost: dict[str, list[float]] = {}
    for precision in ("fp32", "bf16-true", "bf16-sr"):
        row = find_precision(precision)
        for lr in (1e-3, 1e-4, 1e-5, 1e-6):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Flatten(), nn.Linear(192, 512), nn.Tanh(), nn.Linear(512, 10))
            with numeric_state(row):
                step = make_step(row, make_task(model), OptimizerSpec("Adam", (("lr", lr),)))
                before = copy.deepcopy(step.state_dict()["model"])
                found = measure_numerics(cpu_spec(precision), step, None, make_batch())
                assert all(torch.equal(each, before[name]) for name, each in step.state_dict()["model"].items())
            lost.setdefault(precision, []).append(by_name(found)["1"].lost_update_share or 0.0)
            if precision == "bf16-true":
                assert (found.kept_update_share or 0.0) < {1e-3: 1.1, 1e-4: 0.9, 1e-5: 0.2, 1e-6: 0.1}[lr]
            else:  # a standard error at 1e-6 is about 0.03
                assert found.kept_update_share == pytest.approx(1.0, abs=0.02 if lr > 1e-6 else 0.15)
    assert max(lost["fp32"]) < 0.05
    assert lost["bf16-true"] == sorted(lost["bf16-true"])
    assert lost["bf16-true"][0] < 0.5
    assert lost["bf16-true"][-1] > 0.95
    assert lost["bf16-sr"][-1] > 0.9, "most weights wait for their turn"
    (found,) = [each for each in findings_of(found, row, "none") if each.name == "lost-updates"]
    assert "% of an update is kept." in found.sentence


class _Coarse(nn.Linear):
    """A planted fault: in 16 bits the output has three bits."""

    def forward(self, data: Tensor) -> Tensor:
        output = super().forward(data)
        if output.dtype == torch.float32:
            return output
        mantissa, exponent = torch.frexp(output)
        return torch.ldexp((mantissa * 8).round() / 8, exponent)


def test_a_layer_that_rounds_too_much_has_the_lowest_ratio() -> None:
    model = make_net()
    linear = _Coarse(model.linear.in_features, model.linear.out_features)
    linear.load_state_dict(model.linear.state_dict())
    model.linear = linear
    rows = by_name(measured("bf16-mixed", model))
    sqnr = {name: row.output_sqnr_db or 0.0 for name, row in rows.items()}
    assert min(sqnr, key=lambda name: sqnr[name]) == "linear"
    assert sqnr["linear"] < 30 < sqnr["conv"]


@pytest.mark.parametrize(("precision", "is_rounded"), [("bf16-mixed", False), ("bf16-master", True)])
def test_a_rounded_buffer_is_noted(precision: str, is_rounded: bool) -> None:
    net = make_net()
    net.register_buffer("frequencies", torch.full((2,), 0.1))
    assert ("frequencies" in measured(precision, net).note) == is_rounded


def test_an_overflow_is_counted() -> None:
    rows = by_name(measured("fp16-true", loss_scale=str(2**24)))
    assert max(row.overflow_share for row in rows.values()) > 0
    assert any(row.gradient_sqnr_db is None for row in rows.values())


def _tensors(nested: object) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, dict):
        for value in nested.values():
            yield from _tensors(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from _tensors(value)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true", "bf16-master", "fp16-true"])
def test_nothing_changes_for_the_next_step(precision: str) -> None:
    row, spec = find_precision(precision), cpu_spec(precision)
    losses, states = [], []
    for examines in (False, True):
        with numeric_state(row):
            step = make_step(row, make_task(make_net()), MOMENTUM_SGD)
            torch.manual_seed(3)
            step(make_batch())
            if examines:
                before = [each.clone() for each in _tensors(copy.deepcopy(step.state_dict()))]
                assert measure_numerics(spec, step, None, make_batch()).modules
                after = list(_tensors(step.state_dict()))
                assert all(map(torch.equal, before, after))
            losses.append([step(make_batch()).item() for _ in range(3)])
            states.append(torch.rand(1).item())
    assert losses[0] == losses[1]
    assert states[0] == states[1], "the random numbers go on as before"


@pytest.mark.parametrize("workload", ["lstm-lm", "gpt2", "wrn-28-10"])
def test_other_families_are_compared_too(workload: str) -> None:
    spec = spec_of(workload, "bf16-mixed")
    with setup_of(spec) as (setup, batches):
        found = measure_numerics(spec, setup.step, setup.task.recurrent_state, batches[0])
    assert found.missing == ""
    assert 0 < len(found.modules) <= 32
    assert all((row.output_sqnr_db or 200.0) > 10 for row in found.modules)
    assert first_loss(found) is None


def test_what_cannot_be_compared_says_why() -> None:
    spec = cpu_spec("fp32", world_size=2, parallelism="ddp")
    with numeric_state(find_precision("fp32")):
        step = make_step(find_precision("fp32"), make_task(make_net()))
        assert "on one GPU only" in measure_numerics(spec, step, None, make_batch()).missing
        next(step.model.parameters()).data.fill_(float("nan"))
        found = measure_numerics(cpu_spec("fp32"), step, None, make_batch())
        assert (
            found.missing == "not compared with float32: weights or carried states are not finite after the timed steps"
        )


def test_a_script_of_several_ranks_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    found = compare_script(cpu_spec("bf16-mixed"), lambda *_: pytest.fail("it would wait for the others"), [make_net()])
    assert found.missing == "not compared with float32: that is done on one GPU only"


class _Stamps(nn.Module):
    """Computes large angles in the type of what it is given, or in one that it names itself."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, data: Tensor) -> Tensor:
        angles = torch.arange(data.shape[-1], dtype=self.dtype or data.dtype) * 37.3
        return angles.sin().to(data.dtype)


class _Mixed(nn.Module):
    """Time stamps by a module without weights, or by the model's own code."""

    def __init__(self, stamps: nn.Module, *, calls_it: bool = True) -> None:
        super().__init__()
        self.patch, self.stamps, self.mix, self.linear = (
            nn.Linear(192, 96),
            stamps,
            nn.Linear(96, 32),
            nn.Linear(32, 10),
        )
        self._compute = stamps if calls_it else stamps.forward

    def forward(self, images: Tensor) -> Tensor:
        data = self.patch(images.flatten(1))
        return self.linear(torch.tanh(self.mix(data * self._compute(data))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp16-true"])
def test_the_module_without_weights_that_loses_precision_first_is_named(precision: str) -> None:
    for stamps in (_Stamps(), _Stamps(torch.bfloat16)):
        numerics = measured(precision, _Mixed(stamps))
        fall = first_loss(numerics)
        assert fall is not None
        assert (fall.module, fall.before) == ("stamps", "")
        assert fall.before_db > 40
        assert fall.after_db < 20
        (found,) = [f for f in findings_of(numerics, find_precision(precision), "none") if f.name == "first-loss"]
        assert found.sentence.startswith(f"precision is lost first in `stamps`: {fall.before_db:.0f} dB before it")
        assert not any(each.name == "rounding" for each in findings_of(numerics, find_precision(precision), "none"))


def test_what_happens_between_modules_is_told_by_what_the_next_one_gets() -> None:
    fall = first_loss(measured("bf16-mixed", _Mixed(_Stamps(), calls_it=False)))
    assert fall is not None
    assert (fall.module, fall.before, fall.dtype) == ("", "mix", "bfloat16")


class _Noise(nn.Module):
    def forward(self, data: Tensor) -> Tensor:
        return data + torch.randn_like(data) + torch.rand(data.shape, dtype=data.dtype)


class _Masked(nn.Module):
    def forward(self, data: Tensor) -> Tensor:
        hidden = torch.where(torch.arange(data.shape[-1]) % 2 > 0, torch.finfo(data.dtype).min, data)
        return hidden.masked_fill(torch.arange(data.shape[-1]) % 3 > 1, -torch.inf)


@pytest.mark.parametrize("between", [_Noise(), nn.Sequential(_Masked(), nn.Softmax(1)), nn.Dropout(0.5)])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp16-true"])
def test_drawn_numbers_and_masks_are_no_loss(between: nn.Module, precision: str) -> None:
    assert all(fall.after_db > 40 for fall in measured(precision, _Mixed(_Changed(between))).falls)


class _Changed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, data: Tensor) -> Tensor:
        return self.inner(data)  # type: ignore[no-any-return]


def test_a_pass_of_many_calls_is_compared_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castwise.trial.numerics._MOST_CALLS", 2)
    assert first_loss(measured("bf16-mixed", _Mixed(_Stamps()))) is None, "the model's own call and that of `patch`"


_SCRIPT = """
from contextlib import nullcontext
import torch
from torch import nn
class Stamps(nn.Module):
    def forward(self, data):
        return (torch.arange(data.shape[-1], dtype=data.dtype) * 37.3).sin()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.stamps, self.norm, self.mix = nn.Linear(8, 64), Stamps(), nn.BatchNorm1d(64), nn.Linear(64, 9)
    def forward(self, data):
        if KIND == "weights in 16 bits":
            data = data.bfloat16()
        if KIND == "refuses" and not torch.is_grad_enabled():
            raise ValueError("without gradients")
        with torch.autocast("cpu", torch.bfloat16) if KIND == "autocast within" else nullcontext():
            data = self.patch(data)
            data = self.mix(nn.functional.dropout(self.norm(data * self.stamps(data))))
        return data.float()
net = Net().bfloat16() if KIND == "weights in 16 bits" else Net()
run = torch.compile(net, backend="eager") if KIND == "compiled" else net  # autocast is around it
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(60):
    for part in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=KIND == "compiled"):
            loss = run(torch.randn(4, 8)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.xdist_group("hooked scripts")
def test_the_outputs_of_a_script_are_compared_as_its_own_code_computes_them(tmp_path: Path) -> None:
    jobs = []
    for kind in ("autocast within", "compiled", "weights in 16 bits", "float32", "refuses"):
        file = tmp_path / f"{kind.replace(' ', '_')}.py"
        file.write_text(f"KIND = {kind!r}{_SCRIPT}")
        jobs.append((str(file), "numerics", "bf16-mixed" if kind == "float32" else "as-written"))
    command = [sys.executable, str(Path(__file__).parents[1] / "hooked_scripts.py"), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *mixed, refused = [StepNumerics.model_validate_json(each) for each in json.loads(done.stdout)]
    for found in mixed:
        fall = first_loss(found)
        assert fall is not None, found
        assert (fall.module, fall.dtype) == ("stamps", "bfloat16")
        assert {each.name for each in found.modules} == {"patch", "norm", "mix"}
    assert refused.missing == "not compared with float32: ValueError: without gradients"
