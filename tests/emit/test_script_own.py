"""Scripts of loops over a user's own model: run beside castwise's own step, they compute the same."""

from pathlib import Path

import pytest
import six_models
from scripts import check_whole, files_of, measured_losses, run_script, spec_of

from castwise.emit.script import check_script, script_of
from castwise.errors import UsageError
from castwise.registry.precisions import PRECISIONS
from castwise.registry.technique_fit import why_unsupported
from castwise.registry.techniques import TECHNIQUES
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel, UserParts
from castwise.trial.user_model.load import inspect_model

SIX = Path(six_models.__file__)

OWN_LOOP = """
import torch
from torch import nn


def build():
    torch.backends.fp32_precision = "tf32"
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return {
        "model": model,
        "batch": lambda size: (torch.randn(size, 3, 8, 8), torch.randint(10, (size,))),
        "loss": nn.CrossEntropyLoss(label_smoothing=0.1),
        "optimizer": torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others}], lr=1e-2),
        "clip_grad_norm": 0.5,
        "accumulate": 2,
        "unit": "images",
        "units_per_sample": 3,
        SCHEDULER
    }
"""
SCHEDULER = '"scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),'


def own_spec(
    file: Path, function: str = "build", precision: str = "fp32", techniques: tuple[str, ...] = (), **changes: object
) -> TrialSpec:
    own = UserModel(kind="file", path=str(file), name=function)
    return spec_of(f"{file.name}:{function}", precision, techniques, user_model=own, **{"batch_size": 4} | changes)


def written(folder: Path, *, scheduled: bool) -> Path:
    file = folder / "train me.py"  # no name that could be imported by a statement
    file.write_text(OWN_LOOP.replace("SCHEDULER", SCHEDULER if scheduled else ""))
    return file


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("model", "precision", "techniques"),
    [
        (six_models.timm_convnext, "bf16-mixed", ("channels-last",)),
        (six_models.timm_vit, "bf16-master", ("fused-optimizer",)),
        (six_models.torchvision_segmentation, "fp32", ("foreach-optimizer",)),
        (six_models.transformers_bert, "fp16-mixed", ()),
        (six_models.transformers_gpt2, "bf16-true", ()),
        (six_models.transformers_gpt2, "bf16-mixed", ("fused-optimizer",)),
        (six_models.lightning_module, "bf16-mixed", ()),
        (six_models.lightning_module, "bf16-master", ()),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
@pytest.mark.slow
def test_scripts_of_models_that_nobody_here_wrote_compute_what_was_measured(
    model: object, precision: str, techniques: tuple[str, ...], tmp_path: Path
) -> None:
    spec = own_spec(SIX, model.__name__, precision, techniques)  # type: ignore[attr-defined]
    epochs = run_script(spec, tmp_path)
    assert [epoch.loss for epoch in epochs] == measured_losses(spec)
    assert {epoch.unit for epoch in epochs} == {"images" if model is six_models.torchvision_segmentation else "samples"}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("precision", "techniques", "scheduled"),
    [
        ("fp32", (), True),
        ("fp16-mixed", (), True),
        ("fp16-mixed", ("no-step-sync",), False),
        ("fp16-master", ("channels-last", "fused-optimizer"), True),
        ("bf16-master", ("matmul-stem", "compiled-update"), True),
    ],
)
def test_a_script_has_the_user_s_optimizer_schedule_clipping_and_parts_of_batches(
    precision: str, techniques: tuple[str, ...], scheduled: bool, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    spec = own_spec(written(tmp_path / "elsewhere", scheduled=scheduled), "build", precision, techniques)
    assert why_unsupported(spec) is None
    epochs = run_script(spec, tmp_path)
    assert [epoch.loss for epoch in epochs] == measured_losses(spec)
    assert epochs[0].unit == "images"


def test_a_module_s_function_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "elsewhere" / "bench"
    package.mkdir(parents=True)
    (package / "nets.py").write_text(OWN_LOOP.replace("SCHEDULER", ""))
    own = UserModel(kind="module", path=str(package.parent), name="bench.nets:build")
    spec = spec_of("bench.nets:build", user_model=own, batch_size=4)
    monkeypatch.syspath_prepend(str(package.parent))
    losses = [epoch.loss for epoch in run_script(spec, tmp_path, steps=3)]
    assert losses == measured_losses(spec, steps=3)


def test_a_script_names_no_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    text = files_of(own_spec(written(tmp_path / "elsewhere", scheduled=False)), tmp_path)[tmp_path / "train.py"]
    assert str(tmp_path) not in text
    assert 'Path(__file__).resolve().parent / "elsewhere"' in text


def test_a_script_of_gpt_2_is_short() -> None:
    pytest.importorskip("transformers")
    gpt2 = Path(__file__).parents[2] / "benchmarks" / "gpt2.py"
    parts = inspect_model(UserModel(kind="file", path=str(gpt2), name="build")).parts  # once: it takes seconds
    for precision in ("bf16-mixed", "fp16-mixed", "bf16-master"):
        for techniques in ((), ("fused-optimizer", "compile", "cuda-graph")):
            spec = own_spec(gpt2, "build", precision, techniques, device="cuda:0", batch_size=16)
            assert len(next(iter(script_of(spec, parts=parts).values())).splitlines()) <= 160


VIT = UserParts(
    form="tuple",
    names=("model", "batch", "loss"),
    batch="function",
    batch_form="tuple",
    optimizer_name="AdamW",
    has_loss_module=True,
)


def _combinations() -> list[TrialSpec]:
    on_gpu = {"device": "cuda:0"}
    made = [own_spec(SIX, "timm_vit", row.name, loss_scale=row.loss_scale, **on_gpu) for row in PRECISIONS]
    made.append(own_spec(SIX, "timm_vit", "bf16-sr", ("adam-state-8-bit",), **on_gpu))
    for row in TECHNIQUES:
        spec = own_spec(SIX, "timm_vit", "fp16-mixed", (row.name,), loss_scale="dynamic", **on_gpu)
        made += [spec] if why_unsupported(spec) is None else []
    kernels = ("channels-last", "max-pool-kernel", "batch-norm-kernel", "space-to-depth")
    made.append(own_spec(SIX, "timm_vit", "fp16-master", (*kernels, "compiled-update", "cuda-graph"), **on_gpu))
    made.append(own_spec(SIX, "timm_vit", "bf16-mixed", ("matmul-stem", "compile", "cuda-graph-8"), **on_gpu))
    return made


def test_every_script_is_whole_and_imports_no_castwise(tmp_path: Path) -> None:
    texts = [text for spec in _combinations() for text in script_of(spec, parts=VIT).values()]
    check_whole(texts, {"compute_loss", "train_step", "stepped"}, tmp_path)


@pytest.mark.parametrize(
    "own",
    [
        UserModel(kind="transformers", path="", name="bert"),
        UserModel(kind="pickle", path="/tmp/x.pkl", name="Net"),
    ],
    ids=lambda own: own.kind,
)
def test_what_no_function_makes_has_no_script(own: UserModel) -> None:
    spec = spec_of("timm_vit.py:build").model_copy(update={"user_model": own})
    with pytest.raises(UsageError, match="calls a function of yours"):
        script_of(spec)


@pytest.mark.parametrize("written_as", ["mine.py", "folder/../mine.py", "link.py"])
@pytest.mark.parametrize("workload", ["mine.py:build", "mine:build"])
def test_the_user_s_file_is_not_written_over(
    workload: str, written_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")
    Path("folder").mkdir()
    Path("link.py").symlink_to("mine.py")
    with pytest.raises(UsageError, match="the file your model is in"):
        check_script(workload, "synthetic", None, Path(written_as))
    check_script(workload, "synthetic", None, Path("folder", "mine.py"))
