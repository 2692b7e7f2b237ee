"""What trials find imported in the process they are forked from."""

import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from programs import PATIENCE_SECONDS

from castwise.orchestrator.processes import _PRELOAD
from castwise.trial import preload


def tell(connection: Connection) -> None:
    few_young = gc.get_count()[0] < gc.get_threshold()[0] * 10
    connection.send((gc.isenabled(), gc.get_freeze_count() == 0 and few_young, "torch._dynamo" in sys.modules))


def test_trials_start_with_imports_and_garbage_collector() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=tell, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(PATIENCE_SECONDS)
    assert ours.recv() == (True, True, True)
    process.join(PATIENCE_SECONDS)


def test_what_a_users_model_needs_is_imported_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_one.py").write_text("raise RuntimeError('no such library')")
    (tmp_path / "slow_one.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CASTWISE_IMPORTS", "missing_one broken_one slow_one")
    importlib.reload(preload)
    assert sys.modules.pop("slow_one", None)
    assert "CASTWISE_IMPORTS" not in os.environ, "a trial's process sees the user's own environment"


_COMPILES = """
import sys, torch, torch._dynamo
import castwise.trial.preload_compiler
known = set(sys.modules)
from castwise.apply.techniques.compile import CompiledLoss
CompiledLoss(lambda model, batch: model(batch).sum(), "default")
new = [name for name in sys.modules if name not in known and name.startswith("torch.")]
print(torch.cuda.is_initialized(), __import__("threading").active_count(), len(new) < 9)
"""


def test_a_compiled_loop_finds_its_compiler_imported_and_no_thread_started() -> None:
    command = [sys.executable, "-c", _COMPILES]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS)
    assert done.stdout.strip() == "False 1 True"


_FORKS = """
import multiprocessing, os, sys
from castwise.orchestrator.processes import _PRELOAD
def tell(connection):
    names = [name for name in ("quiet_one", "loud_one") if name in sys.modules]
    connection.send((names, [name for name in ("WANDB_MODE", "PYTORCH_NVML_BASED_CUDA_CHECK") if name in os.environ]))
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ours, theirs = context.Pipe()
    context.Process(target=tell, args=(theirs,)).start()
    print(*ours.recv())
"""


@pytest.mark.parametrize(("imports", "found"), [("quiet_one", "['quiet_one'] []"), ("quiet_one loud_one", "[] []")])
def test_trials_are_forked_from_one_thread_alone(tmp_path: Path, imports: str, found: str) -> None:
    (tmp_path / "quiet_one.py").write_text("import os; assert os.environ['WANDB_MODE'] == 'disabled'")
    (tmp_path / "loud_one.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=[99]).start()"
    )
    (tmp_path / "forks.py").write_text(_FORKS)
    noted = ("WANDB_MODE", "PYTORCH_NVML_BASED_CUDA_CHECK")  # the latter Lightning sets, if a test imports it
    environment = {name: value for name, value in os.environ.items() if name not in noted}
    environment |= {"CASTWISE_IMPORTS": imports, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, str(tmp_path / "forks.py")]
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
    )
    assert done.stdout.strip() == found


def test_functions_are_replaced_in_what_was_imported_before(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("from torch.autograd import grad\nfrom torch.nn.functional import mse_loss")
    program = (
        "import library, torch\n"
        "from castwise.trial.script.replacing import replace_copies_in_libraries, replaces\n"
        "for _ in range(2): replaces(torch.autograd, 'grad')(lambda grad: 'new')\n"
        "replace_copies_in_libraries()\n"
        "assert library.grad() == 'new' and library.mse_loss is torch.nn.functional.mse_loss\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=PATIENCE_SECONDS)


@pytest.mark.slow
def test_torchao_is_not_imported_before_the_fork_nor_for_other_precisions() -> None:
    """It opens the GPU."""
    pytest.importorskip("transformers")
    pytest.importorskip("torchao")
    program = (
        "import sys, castwise.trial.preload, castwise.trial.server, torch, transformers.utils as utils\n"
        "from castwise.registry.precisions import find_precision\n"
        "from castwise.apply.precision import convert_weights\n"
        "convert_weights(torch.nn.Linear(16, 16), find_precision('bf16-mixed'))\n"
        "assert 'transformers.modeling_utils' in sys.modules and 'torchao' not in sys.modules\n"
        "assert utils.is_torchao_available(), 'a trial may use it'\n"
        "assert utils.quantization_config.is_torchao_available(), 'a copy that was made before'\n"
    )
    environment = os.environ | {"CASTWISE_IMPORTS": "transformers.modeling_utils"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=PATIENCE_SECONDS)
