"""`castwise.apply`: a loop of the user's trains as the loop that castwise measures."""

from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import spec_of
from torch import nn

import castwise
from castwise.apply.precision import numeric_state
from castwise.errors import UsageError
from castwise.registry.precisions import find_precision
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel
from castwise.trial.build import build_trial
from castwise.trial.distributed import Peers

STEPS = 20

FILE = """
import torch
from torch import nn


def build():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(72, 10),
    )
    return {
        "model": model,
        "batch": (torch.randn(16, 3, 9, 9), torch.randint(10, (16,))),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
        "clip_grad_norm": 1.0,
    }
"""


def measured(spec: TrialSpec) -> list[float]:
    with ExitStack() as stack:
        setup = build_trial(spec, stack, Peers())
        (batch,) = setup.task.make_batches(1, spec.batch_size, torch.device("cpu"), torch.Generator())
        if setup.prepare is not None:
            batch = setup.prepare(batch)
        return [setup.step(batch).item() for _ in range(STEPS)]


def by_hand(parts: dict[str, Any], precision: str, techniques: str | tuple[str, ...]) -> list[float]:
    loss_fn, (x, y), losses = parts["loss"], parts["batch"], []
    model = parts["model"]
    applied = castwise.apply(model, parts["optimizer"], precision=precision, techniques=techniques)
    for _ in range(STEPS):
        with applied.autocast():
            loss = loss_fn(model(x), y)
        applied.backward(loss)
        applied.step(clip_grad_norm=parts["clip_grad_norm"])
        losses.append(loss.item())
    return losses


def built(folder: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(FILE, names)
    (folder / "train_me.py").write_text(FILE)
    made: dict[str, Any] = names["build"]()
    return made


@pytest.fixture(autouse=True)
def _switches_restored() -> Iterator[None]:
    with numeric_state(find_precision("fp32")):
        yield


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("precision", "techniques"),
    [
        ("fp32", ()),
        ("fp32", "fused-optimizer"),
        ("default", "channels-last"),
        ("bf16-mixed", ()),
        ("bf16-true", "channels-last"),
        ("bf16-master", "channels-last"),
        ("bf16-mixed", ("channels-last", "compile")),
        ("bf16-master", ("compile",)),
        ("fp16-mixed", "no-step-sync"),
        ("fp16-master", ()),
        ("fp16-true", ()),
    ],
)
def test_a_loop_trains_as_the_measured_one(precision: str, techniques: str | tuple[str, ...], tmp_path: Path) -> None:
    own = UserModel(kind="file", path=str(tmp_path / "train_me.py"), name="build")
    names = (techniques,) if isinstance(techniques, str) else techniques
    scale = find_precision(precision).loss_scale
    spec = spec_of("train_me.py:build", precision, names, user_model=own, batch_size=16, loss_scale=scale)
    losses = by_hand(built(tmp_path), precision, techniques)
    # The loop compiles its model alone, the measured one its loss, too: torch 2.11 then rounds to 16 bits elsewhere.
    allowed = 0.05 if "compile" in names and torch.__version__ < "2.12" else 1e-5
    assert losses == pytest.approx(measured(spec), rel=allowed, abs=1e-6, nan_ok=precision == "fp16-true")
    assert losses[-1] < losses[0] or precision == "fp16-true"


def test_a_step_whose_gradients_overflow_is_skipped() -> None:
    model = nn.Linear(2, 1)
    applied = castwise.apply(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="fp16-mixed")
    before = model.weight.detach().clone()
    applied.backward(model(torch.full((1, 2), torch.inf)).sum())
    applied.step()
    assert applied.skipped_steps == 1
    assert torch.equal(model.weight, before)


def test_a_checkpoint_has_masters_and_scale(tmp_path: Path) -> None:
    first, second = (built(tmp_path) for _ in range(2))
    trained = castwise.apply(first["model"], first["optimizer"], precision="fp16-master")
    other = castwise.apply(second["model"], second["optimizer"], precision="fp16-master")
    x, y = first["batch"]
    for _ in range(3):
        trained.backward(first["loss"](trained.model(x), y))
        trained.step()
    other.load_state_dict(deepcopy(trained.state_dict()))
    for applied in (trained, other):
        applied.backward(first["loss"](applied.model(x), y))
        applied.step()
    for one, two in zip(trained.state_dict()["stepped"], other.state_dict()["stepped"], strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ("channels-last+cuda-graph", "cuda-graph needs a loop of its own.*castwise tune FILE.py:FUNCTION --emit"),
        ("compiled-update", "needs a loop of its own"),
        ("batch-norm-kernel", "needs a loop of its own"),
        ("tuned", "short for"),
        ("cudnn-search", "cudnn-search needs a CUDA device"),
        ("fused-optimizer+foreach-optimizer", "exclude each other"),
        ("no-such", "No technique named 'no-such'"),
    ],
)
def test_what_cannot_be_applied_is_refused_before_anything_changes(techniques: str, words: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match=words):
        castwise.apply(model, optimizer, precision="bf16-true", techniques=techniques)
    assert model.weight.dtype == torch.float32
    with pytest.raises(UsageError, match="steps no weight of its model"):
        castwise.apply(nn.Linear(2, 1), optimizer, precision="bf16-true")


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(
        UsageError, match=r"^tf32 needs CUDA compute capability 8.0 or newer; .* is a CPU\. `castwise doctor`"
    ):
        castwise.apply(model, torch.optim.SGD(model.parameters()), precision="tf32")


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    assert repr(castwise.apply(model, optimizer, precision="fp32")) == "Applied(fp32 to Linear and AdamW)"
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match="has stepped already"):
        castwise.apply(model, optimizer, precision="bf16-mixed")


def test_a_state_from_the_start_is_no_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adagrad(model.parameters())
    applied = castwise.apply(model, optimizer, precision="bf16-master")
    applied.backward(model(torch.ones(1, 2)).sum())
    applied.step()
    assert all(values["sum"].dtype is torch.float32 and values["sum"].any() for values in optimizer.state.values())


def test_what_one_optimizer_cannot_do_is_refused_in_words() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=r"LBFGS, the optimizer of castwise\.apply, computes the loss in its step"):
        castwise.apply(model, torch.optim.LBFGS(model.parameters()), precision="bf16-mixed")
    optimizer: Any = [torch.optim.SGD(model.parameters())]
    with pytest.raises(UsageError, match="takes one optimizer of torch"):
        castwise.apply(model, optimizer, precision="bf16-mixed")
    castwise.apply(model, optimizer[0], precision="bf16-master")
    with pytest.raises(UsageError, match="have no float32 copies, which bf16-master steps"):
        optimizer[0].add_param_group({"params": nn.Linear(2, 1).parameters()})
