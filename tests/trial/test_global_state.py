"""Global settings that the user's code changes: reported, and restored if the precision decides them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from castwise.apply.precision import numeric_state, read_fp32_precision
from castwise.registry.precisions import find_precision
from castwise.trial.user_model import global_state
from castwise.trial.user_model.global_state import changes_while_training, read_process_state, user_code

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(autouse=True)
def all_as_it_was() -> Iterator[None]:
    before = read_process_state()
    yield
    for setting, value in zip(global_state.SETTINGS, before.values, strict=True):
        if setting.read() != value:
            setting.write(value)
    assert read_fp32_precision() == before.fp32_precision
    os.chdir(before.folder)


def notes_on(code: Callable[[], Any]) -> list[str]:
    notes: list[str] = []
    with user_code(notes):
        code()
    return notes


def test_unchanged_settings_have_no_note() -> None:
    assert notes_on(lambda: torch.nn.Linear(3, 3)) == []


@pytest.mark.parametrize(
    "code",
    [
        lambda: setattr(MATMUL, "allow_tf32", True),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(CUDNN, "allow_tf32", False),
        lambda: setattr(CUDNN.conv, "fp32_precision", "ieee"),
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    ],
)
def test_tf32_is_noted_and_restored(code: Callable[[], None]) -> None:
    before = read_fp32_precision()
    (note,) = notes_on(code)
    assert note.startswith("your code sets what float32 products compute in (")
    assert note.endswith("each trial's own precision was restored")
    assert read_fp32_precision() == before
    for name in ("fp32", "tf32"):  # a trial still sets its own
        with numeric_state(find_precision(name)):
            assert read_fp32_precision()["cuda.matmul"] == ("tf32" if name == "tf32" else "ieee")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "set_default_dtype to torch.float64: torch.float32"),
        (lambda: torch.set_default_device("meta"), "set_default_device to meta: cpu"),
        (lambda: torch.set_grad_enabled(False), "set_grad_enabled to False: True"),
        (lambda: torch.set_autocast_enabled("cpu", True), "set_autocast_enabled('cpu') to True: False"),
    ],
)
def test_settings_of_the_precision_are_restored(code: Callable[[], object], name: str) -> None:
    before = read_process_state()
    num_modes = torch._C._len_torch_function_stack()
    (note,) = notes_on(code)
    assert note == f"your code sets torch.{name} was restored for this trial"
    assert read_process_state().values == before.values
    assert torch._C._len_torch_function_stack() == num_modes, "each call of torch would take longer, compiled or not"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (lambda: setattr(CUDNN, "benchmark", True), "backends.cudnn.benchmark to True"),
        (lambda: setattr(CUDNN, "deterministic", True), "backends.cudnn.deterministic to True"),
        (lambda: torch.use_deterministic_algorithms(True), "use_deterministic_algorithms to True"),
        (lambda: torch.autograd.set_detect_anomaly(True), "autograd.set_detect_anomaly to True"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "set_num_threads to"),
        (lambda: torch.backends.cuda.enable_flash_sdp(False), "backends.cuda.enable_flash_sdp to False"),
    ],
)
def test_settings_of_the_users_training_are_kept(code: Callable[[], object], name: str) -> None:
    before = read_process_state()
    (note,) = notes_on(code)
    assert note.startswith(f"your code sets torch.{name}")
    assert note.endswith("kept, as your own training has it")
    assert read_process_state().values != before.values


def test_variables_are_noted_and_those_of_precision_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    notes = notes_on(lambda: os.environ.update(NVIDIA_TF32_OVERRIDE="1", CUDA_LAUNCH_BLOCKING="1", MY_OWN="1"))
    assert notes == [
        "your code sets NVIDIA_TF32_OVERRIDE=1 in the environment: restored, the precision decides that",
        "your code sets CUDA_LAUNCH_BLOCKING=1 in the environment: kept",
    ]
    assert "NVIDIA_TF32_OVERRIDE" not in os.environ
    assert os.environ.pop("CUDA_LAUNCH_BLOCKING") == os.environ.pop("MY_OWN") == "1"


def test_seed_is_noted() -> None:
    torch.manual_seed(0)
    assert notes_on(lambda: torch.manual_seed(1234)) == [
        "your code seeds torch with 1234: the weights are those of that seed"
    ]


def test_folder_is_restored(tmp_path: Path) -> None:
    before = Path.cwd()
    notes_on(lambda: os.chdir(tmp_path))
    assert Path.cwd() == before


def test_settings_are_restored_after_an_error() -> None:
    def fail() -> None:
        MATMUL.allow_tf32 = True
        raise RuntimeError("broken")

    before = read_fp32_precision()
    with pytest.raises(RuntimeError, match="broken"):
        notes_on(fail)
    assert read_fp32_precision() == before


def test_changes_while_training() -> None:
    with numeric_state(find_precision("fp32")):
        before = read_process_state()
        assert changes_while_training(before) == []
        MATMUL.fp32_precision = "tf32"
        torch.set_default_dtype(torch.float64)
        notes = changes_while_training(before)
    assert notes == [
        "your code sets torch.set_default_dtype (torch.float32 → torch.float64) while it trains: this trial is not "
        "what its precision says",
        "your code sets float32 products of cuda.matmul: tf32 while it trains: this trial is not what its precision "
        "says",
    ]
