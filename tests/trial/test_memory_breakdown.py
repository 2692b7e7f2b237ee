"""A training step taken apart on the CPU, against what can be counted by hand."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
from fake_engine import fake_spec
from small_step import user_spec

from castwise.records.schema import MemoryParts
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import TECHNIQUES, Technique
from castwise.spec.trial import FIT
from castwise.trial import memory_breakdown
from castwise.trial.steady_run import SteadyRun

BATCH, WIDTH, HIDDEN = 256, 32, 128
WEIGHTS = 4 * (WIDTH * HIDDEN + HIDDEN + HIDDEN * HIDDEN + HIDDEN + HIDDEN + 1)

MODEL = f"""\
import torch
from torch import nn

def build():
    hidden = nn.Linear({WIDTH}, {HIDDEN}), nn.Sigmoid(), nn.Linear({HIDDEN}, {HIDDEN}), nn.Sigmoid()
    model = nn.Sequential(*hidden, nn.Linear({HIDDEN}, 1))
    batch = (torch.randn({BATCH}, {WIDTH}), torch.randn({BATCH}, 1))
    loss = nn.MSELoss()
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    return {{"model": model, "batch": batch, "loss": loss, "optimizer": optimizer}}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "small.py"
    file.write_text(MODEL)
    return file


def parts_of(own: Path, precision: str, batch_size: int = BATCH, **changes: object) -> MemoryParts:
    scale = {"loss_scale": find_precision(precision).loss_scale, **changes}
    run = SteadyRun(user_spec(own, precision, protocol=FIT, batch_size=batch_size, **scale), None)
    run.warm_up()
    run.run_block()
    samples = run.finish()
    assert samples.memory_parts is not None
    assert samples.memory_parts.missing == ""
    return samples.memory_parts


def test_float32_is_counted_to_the_byte(own: Path) -> None:
    parts = parts_of(own, "fp32")
    assert parts.weights_bytes == WEIGHTS
    assert parts.optimizer_bytes == WEIGHTS, "momentum"
    assert parts.batches_bytes == 4 * BATCH * (WIDTH + 1)
    # A sigmoid saves its output, which the layer after it saves too: one storage. The peak is in the last sigmoid's
    # backward, when what the loss saved is gone.
    assert parts.saved_bytes == 4 * BATCH * 2 * HIDDEN
    assert parts.masters_bytes == parts.weight_casts_bytes == 0
    assert parts.workspace_bytes is None
    assert parts.peak_bytes == parts.tensors_bytes


def test_saved_bytes_grow_with_batch_size(own: Path) -> None:
    one, four = parts_of(own, "fp32"), parts_of(own, "fp32", 4 * BATCH)
    assert four.saved_bytes == 4 * one.saved_bytes
    assert (four.weights_bytes, four.optimizer_bytes) == (one.weights_bytes, one.optimizer_bytes)


def test_only_one_set_of_gradients_is_alive(own: Path) -> None:
    """With few activations the peak is at the end of backward, when the last step's gradients are gone."""
    assert 0 < parts_of(own, "fp32", batch_size=1).gradients_bytes <= WEIGHTS


def test_autocast_adds_weight_casts(own: Path) -> None:
    parts = parts_of(own, "bf16-mixed")
    assert (parts.weights_bytes, parts.optimizer_bytes) == (WEIGHTS, WEIGHTS)
    assert 2 * HIDDEN * HIDDEN <= parts.weight_casts_bytes <= WEIGHTS // 2
    assert parts.saved_bytes >= 2 * BATCH * 2 * HIDDEN


def test_masters_are_counted_separately(own: Path) -> None:
    true, master = parts_of(own, "bf16-true"), parts_of(own, "fp16-master", loss_scale="128")
    assert (true.weights_bytes, true.optimizer_bytes, true.masters_bytes) == (WEIGHTS // 2, WEIGHTS // 2, 0)
    assert (master.weights_bytes, master.optimizer_bytes, master.masters_bytes) == (WEIGHTS // 2, WEIGHTS, WEIGHTS)
    assert master.gradients_bytes >= WEIGHTS


def test_waits_for_a_step_that_is_not_skipped(own: Path) -> None:
    """The optimizer has no state before its first step; a scale that starts at 2^32 skips many."""
    parts = parts_of(own, "fp16-master", loss_scale="dynamic-apex")
    assert parts.optimizer_bytes == WEIGHTS


@pytest.mark.parametrize("row", TECHNIQUES, ids=lambda row: row.name)
def test_compiled_and_captured_steps_are_not_observed(row: Technique) -> None:
    hides = "compile" in row.name or "cuda-graph" in row.name
    spec, nothing = fake_spec("fp32", techniques=(row.name,)), cast("Any", None)
    try:
        parts = memory_breakdown.profile_memory(spec, nothing, [], nothing)
    except AttributeError:  # it went on to the step, of which there is none here
        parts = None
    assert (parts is not None) == hides


@pytest.mark.skipif(not find_spec("torchao"), reason="pip install 'castwise[fp8]'")
@pytest.mark.parametrize(("kind", "least"), [("8-bit", 2.0), ("4-bit", 1.0), ("bf16", 4.0)])
def test_adam_s_state_in_fewer_bits_is_counted(tmp_path: Path, kind: str, least: float) -> None:
    file = tmp_path / "small.py"
    file.write_text(MODEL.replace("SGD(parameters, lr=1e-3, momentum=0.9)", "Adam(parameters)"))
    parts = parts_of(file, "fp32", techniques=(f"adam-state-{kind}",))
    large = WIDTH * HIDDEN + HIDDEN * HIDDEN
    small = WEIGHTS / 4 - large
    assert parts.optimizer_bytes == pytest.approx(large * least + 8 * small, rel=0.15), (
        "scales, and small weights' state"
    )


def test_storages_that_are_resized_count_as_they_are() -> None:
    """The float32 copies of bf16-sr last for the update of their part."""
    import torch

    storages = memory_breakdown.Storages("cpu")
    with memory_breakdown.PeakMode(storages, torch.device("cpu")) as mode:
        copies = [torch.empty(1000), torch.empty(1000)]
        for copy in copies:
            copy.untyped_storage().resize_(0)
        for copy in copies:
            copy.untyped_storage().resize_(4000)
            copy.fill_(1)
            copy.untyped_storage().resize_(0)
        mode.most = 0
        copies[0].untyped_storage().resize_(4000)
        copies[0].fill_(1)
    assert mode.most == 4000
    assert storages.totals["temporaries"] == 4000
    assert "followed" not in torch.UntypedStorage.resize_.__qualname__


@pytest.mark.parametrize("function", ["mse_loss", "smooth_l1_loss", "l1_loss", "huber_loss"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_on_a_gpu_that_is_not_there_holds_what_torch_s_does(function: str, reduction: str) -> None:
    import torch

    from castwise.trial.fake_gpu import fake_gpu

    def held_on(device: str) -> tuple[int, int]:
        storages = memory_breakdown.Storages(device)
        inputs = torch.ones(1000, device=device), torch.zeros(1000, device=device)
        with memory_breakdown.PeakMode(storages, None) as mode:
            loss = getattr(torch.nn.functional, function)(*inputs, reduction=reduction)
        assert loss.dim() == (reduction == "none")
        return storages.totals["temporaries"], mode.most

    real, _ = held_on("cpu")
    with fake_gpu({}):
        held, most = held_on("cuda")
    assert held == real
    keeps_all = function in ("mse_loss", "smooth_l1_loss") and reduction != "none"
    assert (real, most) == (4000, 8000) if keeps_all else most >= real
