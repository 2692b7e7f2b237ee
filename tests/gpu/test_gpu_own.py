"""Users' own models on a real GPU: six of full size, TF32 set behind castwise's back, and two GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import six_models
import torch
from own_steps import as_dict, halving, in_groups, losses_of, step_of, train_on_dict
from real_gpu import on_gpus
from small_step import make_batch

import castwise
from castwise.apply.precision import numeric_state
from castwise.registry.precisions import PRECISIONS, find_precision, why_unsupported

pytestmark = on_gpus()

SIX = Path(six_models.__file__)
BATCH_SIZE = 8
# Half-precision weights without masters may well diverge; that is a result, and they are timed all the same.
MAY_DIVERGE = ("fp16-true", "bf16-true")


@pytest.mark.parametrize("model", six_models.FULL, ids=lambda model: model.__name__)
def test_six_models_of_full_size_are_measured_in_every_precision(model: Callable[[], object]) -> None:
    trials = castwise.run(f"{SIX}:{model.__name__}", batch_size=BATCH_SIZE, seconds=1.0, device="cuda:0")
    hardware = trials[0].environment.hardware
    assert [trial.spec.precision for trial in trials] == [
        row.name for row in PRECISIONS if why_unsupported(row, hardware) is None
    ]
    for trial in trials:
        allowed = ("ok", "diverged") if trial.spec.precision in MAY_DIVERGE else ("ok",)
        assert trial.status in allowed, f"{trial.spec.precision}: {trial.message}\n{trial.log}"
        assert trial.facts is not None
        assert trial.facts.num_parameters > 3_000_000
        assert trial.ranks[0].peak_allocated_bytes is not None
        # Weights, gradients and the default optimizer's two moments are held at the least.
        weight_bytes = min(2 if "true" in trial.spec.precision else 4, 4)
        assert trial.ranks[0].peak_allocated_bytes > 2 * weight_bytes * trial.facts.num_parameters


def test_memory_is_the_same_as_without_the_precisions_own_masters_but_for_them() -> None:
    """Masters cost four bytes a weight on top of half weights, whoever has made the optimizer."""
    reference = f"{SIX}:lightning_module_full"
    trials = castwise.run(reference, batch_size=2, seconds=0.5, precision="fp16-master,fp16-true", device="cuda:0")
    held = {trial.spec.precision: trial.ranks[0].peak_allocated_bytes or 0 for trial in trials}
    assert trials[0].facts is not None
    assert held["fp16-master"] - held["fp16-true"] > 4 * trials[0].facts.num_parameters


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ("fused-optimizer",),
        ("cuda-graph",),
        ("fused-optimizer", "cuda-graph-8"),
        ("channels-last", "fused-optimizer", "compile", "cuda-graph"),
        ("compiled-update", "cuda-graph"),
    ],
    ids="+".join,
)
def test_a_loop_of_one_s_own_computes_the_same_with_techniques(names: tuple[str, ...], dynamic: bool) -> None:
    device = torch.device("cuda:0")
    images, labels = make_batch(device)
    batches = [as_dict((images + number, labels)) for number in range(3)]
    parts = {"optimizer": in_groups, "training_step": train_on_dict, "clip_grad_norm": 1.0}
    with numeric_state(find_precision("fp32")):
        found, expected = (
            losses_of(step_of("fp32", *each, dynamic=dynamic, device=device, **parts), batches) for each in (names, ())
        )
    assert torch.allclose(found, expected, rtol=2000 * torch.finfo(torch.float32).eps)


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (in_groups, ("cuda-graph",)),  # which SGD's rates do not go with
        *(
            (optimizer, names)
            for optimizer in (in_groups, sgd)
            for names in (
                ("fused-optimizer", "cuda-graph"),
                ("compiled-update",),
                ("compiled-update", "compile", "cuda-graph"),
            )
        ),
    ],
)
def test_a_loop_with_a_scheduler_of_one_s_own_computes_the_same_with_techniques(
    optimizer: Callable[..., torch.optim.Optimizer], names: tuple[str, ...], dynamic: bool
) -> None:
    device = torch.device("cuda:0")
    parts = {"optimizer": optimizer, "scheduler": halving}
    with numeric_state(find_precision("fp32")):
        step, plain = (step_of("fp32", *each, dynamic=dynamic, device=device, **parts) for each in (names, ()))
        found, expected = (losses_of(each, [make_batch(device)]) for each in (step, plain))
    assert torch.allclose(found, expected, rtol=2000 * torch.finfo(torch.float32).eps)
    for group, wanted in zip(step.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert float(group["lr"]) == pytest.approx(wanted["lr"], rel=1e-6)


SETS_TF32 = """\
import torch
from torch import nn

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True

class Product(nn.Module):
    '''Its loss is the error of a float32 product against the float64 one, relative to it.'''
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def forward(self, x):
        exact = x.double() @ self.weight.double()
        error = (x @ self.weight - exact).norm() / exact.norm()
        return error.float()

def build():
    return {"model": Product(), "batch": torch.randn(512, 512), "optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
"""


def test_a_file_that_sets_tf32_does_not_change_what_fp32_is(tmp_path: Path) -> None:
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        pytest.skip("needs TF32")
    file = tmp_path / "sets_tf32.py"
    file.write_text(SETS_TF32)
    trials = castwise.run(f"{file}:build", precision="fp32,tf32", seconds=0.2, device="cuda:0")
    errors = {trial.spec.precision: trial.ranks[0].blocks[-1].loss for trial in trials}
    assert errors["fp32"] < 5e-6
    assert 1e-4 < errors["tf32"] < 2e-3
    for trial in trials:
        assert trial.facts is not None
        assert any("each trial's own precision was restored" in note for note in trial.facts.notes)


LEAKS = """\
import torch
from torch import nn

kept = []

class Net(nn.Linear):
    def forward(self, x):
        kept.append(torch.empty(2**14, device=x.device))
        return super().forward(x)

def build():
    return Net(64, 64), torch.randn(32, 64)
"""


def test_a_leak_is_said(tmp_path: Path) -> None:
    file = tmp_path / "leaks.py"
    file.write_text(LEAKS)
    trials = castwise.run(f"{file}:build", precision="fp32,fp16-mixed", seconds=0.2, device="cuda:0")
    for trial in trials:
        assert any("memory grew by 0.062 MiB a step" in note for note in trial.ranks[0].notes), trial.ranks[0].notes


def test_objects_that_lie_on_the_gpu_travel() -> None:
    model = torch.nn.Linear(64, 64).cuda()
    batch = torch.randn(32, 64, device="cuda")
    found = castwise.compare(model, batch, precision="fp32,fp16-mixed", seconds=0.2, device="cuda:0", progress=False)
    assert {trial.status for trial in found.trials} == {"ok"}, [trial.message for trial in found.trials]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["lightning_module_full", "transformers_gpt2_full"])
def test_two_gpus_share_a_users_step(name: str) -> None:
    trials = castwise.run(
        f"{SIX}:{name}", batch_size=BATCH_SIZE, gpus=2, precision="fp32,bf16-mixed,fp16-master", seconds=1.0
    )
    assert [trial.status for trial in trials] == ["ok"] * 3, [trial.message for trial in trials]
    assert all(len(trial.ranks) == 2 for trial in trials)
