"""A user's file, module, pickle or configuration, from its name to training steps, and errors on the way."""

import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import six_models
import torch
from torch import nn

from castwise.apply.precision import read_fp32_precision
from castwise.errors import UsageError
from castwise.registry.precisions import PRECISIONS, find_precision
from castwise.registry.technique_fit import resolve, why_unsupported
from castwise.registry.techniques import TECHNIQUES
from castwise.registry.workloads import find_workload
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.spec.user_model import UserModel, digest_of, locate, pickle_reference
from castwise.trial.build import TrialSetup, build_trial
from castwise.trial.data.sharding import rank_batches
from castwise.trial.distributed import Peers
from castwise.trial.steady_run import SteadyRun
from castwise.trial.user_model.load import build_user_model, inspect_model

HEAD = "import torch\nfrom torch import nn\n"
GOOD = HEAD + "def build():\n    return nn.Linear(3, 2), torch.ones(6, 3)\n"
SIX = Path(six_models.__file__)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what user code changes in this process, which otherwise would be a trial's own."""
    modules, folder = dict(sys.modules), os.getcwd()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    yield
    for name in set(sys.modules) - set(modules):
        if getattr(sys.modules[name], "__file__", None) and "pytest-of" in str(sys.modules[name].__file__):
            del sys.modules[name]
    os.chdir(folder)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write(code: str, name: str = "train_me.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        return f"{path}:build"

    return write


inspected = functools.cache(inspect_model)  # of files that stay as they are


def spec_of(reference: str, precision: str = "fp32", batch_size: int = 4) -> TrialSpec:
    row = find_precision(precision)
    return TrialSpec(
        workload=find_workload(reference).name,
        precision=precision,
        loss_scale=row.loss_scale,
        batch_size=batch_size,
        device="cpu",
        own=(inspected if reference.startswith(str(SIX)) else inspect_model)(locate(reference)).model,
    )


def train(spec: TrialSpec, steps: int = 2) -> tuple[TrialSetup, list[float]]:
    with ExitStack() as stack:
        setup = build_trial(spec, stack, Peers())
        batches = rank_batches(find_workload(spec.workload), setup.task, spec, 2, Peers())
        losses = [setup.step(batches[step % len(batches)]).item() for step in range(steps)]
    return setup, losses


@pytest.mark.parametrize(
    "precision",
    [
        row.name if row.name in ("fp32", "bf16-mixed") else pytest.param(row.name, marks=pytest.mark.slow)
        for row in PRECISIONS
        if row.on_cpu
    ],
)
@pytest.mark.parametrize("model", six_models.SMALL, ids=lambda model: model.__name__)
def test_six_models_train_in_every_precision(model: Callable[[], object], precision: str) -> None:
    spec = spec_of(f"{SIX}:{model.__name__}", precision)
    setup, losses = train(spec, steps=1)
    assert all(torch.isfinite(torch.tensor(losses)))
    row = find_precision(precision)
    assert set(setup.facts.param_dtypes) <= {row.param_dtype, row.batch_norm_dtype}
    assert setup.facts.param_dtypes[row.param_dtype] > 100


def test_six_models_own_settings_are_used() -> None:
    known = {model.__name__: inspect_model(locate(f"{SIX}:{model.__name__}")) for model in six_models.SMALL}
    assert known["transformers_gpt2"].batch_size == 8  # said
    assert known["lightning_module"].batch_size == 16  # its example's
    assert known["timm_vit"].batch_size is None
    bert, _ = train(spec_of(f"{SIX}:transformers_bert"))
    assert bert.facts.clip_grad_norm == 1.0
    gpt2, _ = train(spec_of(f"{SIX}:transformers_gpt2"))
    assert gpt2.facts.accumulate == 2
    module, _ = train(spec_of(f"{SIX}:lightning_module"))
    assert module.facts.optimizer.startswith("SGD(lr=")
    assert module.step.optimizer.param_groups[0]["lr"] != 0.01  # OneCycleLR has moved it
    segmentation, _ = train(spec_of(f"{SIX}:torchvision_segmentation"))
    assert segmentation.facts.unit == "images"


def test_module_in_the_current_folder(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("from .net import Net\nimport torch\ndef build():\n    return Net(), torch.ones(5, 3)\n", "mine/train.py")
    write(
        "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 2)\n",
        "mine/net.py",
    )
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    known = inspect_model(locate("mine.train:build"))
    assert known.batch_size == 5
    train(spec_of("mine.train:build"))


def test_edited_file_changes_the_digest(write: Callable[..., str]) -> None:
    reference = write(GOOD)
    before = inspect_model(locate(reference)).model
    assert inspect_model(locate(reference)).model == before
    write(GOOD + "# edited\n")
    assert inspect_model(locate(reference)).model.digest != before.digest
    with pytest.raises(UsageError, match=r"train_me\.py:build was changed while it was being measured"):
        build_user_model(before)


def test_edited_import_changes_the_digest(write: Callable[..., str]) -> None:
    reference = write("import beside_me\n" + GOOD)
    digests = set()
    for width in (3, 4):
        write(f"width = {width}", "beside_me.py")
        importlib.invalidate_caches()
        digests.add(inspect_model(locate(reference)).model.digest)
        del sys.modules["beside_me"]
    assert len(digests) == 2


def test_what_the_users_code_reads_is_noted(write: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "size.txt").write_text("6")
    (tmp_path / "data").mkdir()
    write("width = 3", "beside_me_too.py")
    reference = write(
        "import beside_me_too, os\n"
        f"os.listdir({str(tmp_path / 'data')!r})\n"
        f"SIZE = int(open({str(tmp_path / 'size.txt')!r}).read())\n" + GOOD
    )
    sources = inspect_model(locate(reference)).sources
    assert sources is not None
    read = {path for path in sources if path.startswith(str(tmp_path))}
    names = ("train_me.py", "beside_me_too.py", "size.txt", "data")
    assert read >= {str(tmp_path / name) for name in names}
    assert {path: digest_of(path) for path in read} == {path: sources[path] for path in read}
    (tmp_path / "size.txt").write_text("7")
    (tmp_path / "data" / "new").touch()
    changed = {path for path in read if digest_of(path) != sources[path]}
    assert changed == {str(tmp_path / "size.txt"), str(tmp_path / "data")}


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess\nsubprocess.run(['true'])\n",
        "import os\nos.system('true')\n",
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 9), 0.1)\nexcept OSError:\n    pass\n",
    ],
)
def test_code_that_asks_others_has_more_sources_than_files(write: Callable[..., str], code: str) -> None:
    assert inspect_model(locate(write(code + GOOD))).sources is None
    assert inspect_model(locate(write(GOOD))).sources is not None


def test_pickles(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    parts = {"model": model, "batch": torch.ones(4, 3), "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}
    file = tmp_path / "model.pickle"
    file.write_bytes(cloudpickle.dumps(parts))
    setup, _ = train(spec_of(pickle_reference(file, "Linear"), "fp16-master"), steps=3)
    assert setup.facts.optimizer.startswith("SGD(lr=0.5")

    file.write_bytes(cloudpickle.dumps({"model": lambda: (nn.Linear(3, 2), torch.ones(7, 3))}))
    assert inspect_model(locate(pickle_reference(file, "build"))).batch_size == 7


BAD = [
    ("x = 1", "No function of train_me.py named 'build'. It defines no function that could build."),
    (
        HEAD + "from math import sqrt\nclass Net(nn.Module): pass\ndef get_loader(): return 1\ndef main(): return 2",
        "named 'build'. It defines get_loader. castwise calls a function that only builds",
    ),
    ("def biuld():\n    pass", r"No function of train_me.py named 'build'. Did you mean biuld\?"),
    ("def build():\n    pass", "train_me.py:build is not called: it returns nothing"),
    (HEAD + "def build():\n    return nn.Linear(1, 1)", r"train_me.py:build gives no batch. Return \(model, batch\)"),
]


@pytest.mark.parametrize(("code", "words"), BAD)
def test_bad_file_is_refused(code: str, words: str, write: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match=words) as refusal:
        inspect_model(locate(write(code)))
    assert "\n" not in str(refusal.value)


def test_missing_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"No module named 'no_such_module' can be imported from '.*'"):
        inspect_model(locate("no_such_module.train:build"))


def test_half_precision_weights_become_float32(write: Callable[..., str]) -> None:
    setup, _ = train(spec_of(write(GOOD.replace("nn.Linear(3, 2)", "nn.Linear(3, 2).bfloat16()"))))
    assert setup.facts.param_dtypes == {"float32": 8}
    assert setup.facts.notes == ("your model came in bfloat16: every precision begins with float32 weights",)


def test_tf32_set_by_a_file_is_reported_and_restored(write: Callable[..., str]) -> None:
    before = read_fp32_precision()
    code = GOOD.replace("def build", "torch.backends.cuda.matmul.allow_tf32 = True\ndef build")
    setup, _ = train(spec_of(write(code)))
    assert setup.facts.fp32_precision["cuda.matmul"] == "ieee"
    (note,) = setup.facts.notes
    assert "your code sets what float32 products compute in (cuda.matmul: tf32" in note
    assert read_fp32_precision() == before


@pytest.mark.parametrize("drawn", ["torch.rand(())", "random.random()", "np.random.rand()"])
def test_whatever_the_users_function_draws_comes_from_the_seed(drawn: str, write: Callable[..., str]) -> None:
    code = GOOD.replace("nn.Linear(3, 2), torch.ones(6, 3)", f"nn.Linear(3, 2), {drawn} * torch.ones(6, 3)")
    spec = spec_of(write(f"import random\nimport numpy as np\n{code}"))
    assert train(spec)[1] == train(spec)[1]
    assert train(spec)[1] != train(spec.model_copy(update={"seed": 1}))[1]


@pytest.mark.parametrize(
    "code", ["import sys\nsys.exit('no data')\n", "import argparse\nargparse.ArgumentParser().parse_args(['--nope'])\n"]
)
def test_system_exit_is_refused(code: str, write: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match=r"train_me\.py:build ends the process .*\(train_me\.py:2.*SystemExit"):
        inspect_model(locate(write(code)))


def test_user_code_sees_no_arguments(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["castwise", "run", "--seconds", "3"])
    code = "import argparse\nargparse.ArgumentParser().parse_args()\n" + GOOD
    assert inspect_model(locate(write(code))).batch_size == 6


MISBEHAVING = (
    HEAD
    + """
kept = []

class Net(nn.Linear):
    def forward(self, x):
        {line}
        return super().forward(x)

def build():
    return Net(3, 2), torch.ones(4, 3)
"""
)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pass", None),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "float32 products of cuda.matmul: tf32 while it trains"),
        ("torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark (False → True) while it trains"),
        # 32 MiB: malloc maps such a block anew, while smaller ones may lie in memory that earlier tests freed.
        ("kept.append(torch.ones(2**23))", "something keeps tensors of past steps"),
    ],
)
def test_side_effects_of_steps_are_noted(line: str, words: str | None, write: Callable[..., str]) -> None:
    protocol = MeasurementProtocol(warm_up_steps=1, warm_up_seconds=0.01, block_seconds=0.001, num_blocks=6)
    spec = spec_of(write(MISBEHAVING.format(line=line))).model_copy(update={"protocol": protocol})
    before = read_fp32_precision()
    run = SteadyRun(spec, None)
    run.warm_up()
    run._steps_per_block = 5
    for _ in range(protocol.num_blocks):
        run.run_block()
    notes = run.finish().notes
    torch.backends.cudnn.benchmark = False
    assert read_fp32_precision() == before
    assert [words in note for note in notes] == ([] if words is None else [True]), notes


IMAGES = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, pixels, scale):
        return {"out": self.conv(pixels) * scale}

def build():
    return Net(), lambda size: {"pixels": torch.rand(size, 3, 8, 8), "scale": torch.ones(size, 1, 1, 1)}
"""
)


def test_channels_last_converts_images_in_a_dict(write: Callable[..., str]) -> None:
    spec = spec_of(write(IMAGES)).model_copy(update={"techniques": ("channels-last",)})
    assert why_unsupported(spec) is None
    with ExitStack() as stack:
        setup = build_trial(spec, stack, Peers())
        assert setup.prepare is not None
        (batch, *_) = rank_batches(find_workload(spec.workload), setup.task, spec, 1, Peers())
        prepared: Any = setup.prepare(batch)
        assert prepared["pixels"].is_contiguous(memory_format=torch.channels_last)
        assert setup.step.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.isfinite(setup.step(prepared))


def test_techniques_that_do_not_fit_user_models(write: Callable[..., str]) -> None:
    on_gpu = {"device": "cuda:0", "precision": "fp16-mixed", "loss_scale": "dynamic"}
    spec = spec_of(write(GOOD)).model_copy(update=on_gpu)
    rows = [row for row in TECHNIQUES if row.kinds != ("training",) and "cuda" in row.devices]
    fit = [row.name for row in rows if not row.only_on_several_gpus or row.name == "coalesced-reduce"]
    required = {"max-pool-kernel": ("channels-last",), "batch-norm-kernel": ("channels-last",)}
    asked = {name: spec.model_copy(update={"techniques": (*required.get(name, ()), name)}) for name in fit}
    reasons = {name: reason for name, each in asked.items() if (reason := why_unsupported(each)) is not None}
    assert set(reasons) == {
        "pad-hidden",
        "pad-channels-4",
        "pad-channels-8",
        "chunked-loss",
        "sparse-prediction",
        "coalesced-reduce",
        "fp8-large-layers",  # for precisions of FP8
        "fp8-without-decoder",
    }
    assert reasons["pad-hidden"] == "pad-hidden is for castwise's own workloads"
    on_two = {"world_size": 2, "parallelism": "ddp", "techniques": ("coalesced-reduce",)}
    assert why_unsupported(spec.model_copy(update=on_two)) is None
    assert resolve(("compiled",), spec).techniques == ("channels-last", "cudnn-search", "compile")


def test_cudnn_benchmark_is_the_users_setting(write: Callable[..., str]) -> None:
    for line, techniques, wanted in (
        ("torch.backends.cudnn.benchmark = True", (), True),
        ("pass", (), False),
        ("pass", ("cudnn-search",), True),
    ):
        torch.backends.cudnn.benchmark = False
        spec = spec_of(write(GOOD.replace("def build", f"{line}\ndef build")))
        torch.backends.cudnn.benchmark = False
        with ExitStack() as stack:
            build_trial(spec.model_copy(update={"techniques": techniques}), stack, Peers())
            assert torch.backends.cudnn.benchmark is wanted
    torch.backends.cudnn.benchmark = False


@pytest.fixture
def fork_server() -> Iterator[None]:
    """Set the start method of a trial's process, which is a fork server's child."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.skipif(multiprocessing.get_all_start_methods()[0] != "fork", reason="Python's own way is another here")
@pytest.mark.usefixtures("fork_server")
def test_data_loader_workers_fork(tmp_path: Path) -> None:
    file = tmp_path / "train_me.py"
    file.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Mine(Dataset):\n"
        "    def __len__(self):\n"
        "        return 8\n"
        "    def __getitem__(self, index):\n"
        "        return torch.ones(3)\n"
        "def build():\n"
        "    return torch.nn.Linear(3, 2), DataLoader(Mine(), batch_size=4, num_workers=1)\n"
    )
    model = UserModel(kind="file", path=str(file), name="build")
    assert inspect_model(model).batch_size == 4
    assert build_user_model(model).notes == (), "the workers are gone before steps begin"


@pytest.mark.parametrize("name", ["main", "train", "no_return"])
def test_a_function_that_trains_is_not_called(name: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "from pathlib import Path\n"
        f"def {name}():\n"
        f"    Path({str(tmp_path / 'checkpoint')!r}).write_text('overwritten')\n"
        + ("" if name == "no_return" else "    return 1\n")
    )
    with pytest.raises(UsageError, match="is not called"):
        inspect_model(UserModel(kind="file", name=name, path=str(file)))
    assert not (tmp_path / "checkpoint").exists()
