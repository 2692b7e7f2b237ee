"""Hostile files of users, and ranks that die, each from a seed: files of data sets, and files with a model.

Each function raises something if castwise did not hold.
"""

import contextlib
import functools
import gzip
import hashlib
import os
import random
import re
import tempfile
import threading
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import faulty_trial
from faults import hostile_inputs, processes_that_die
from faults.hostile_inputs import _damaged, _is_harmless

from castwise.errors import DataError, UsageError
from castwise.orchestrator.machine import Machine, inspect_user_model
from castwise.orchestrator.processes import ForkserverEngine, RpcSession
from castwise.orchestrator.runner import NullListener, TrialRunner
from castwise.records.store import ResumePolicy, Store, load_folder
from castwise.registry.datasets import DATA_SETS, read_verified, verify
from castwise.spec.trial import CPU_SHORT, TrialSpec
from castwise.spec.user_model import locate, shown_name, slow_imports
from castwise.trial.lifetime import _descendants


def data_file(rng: random.Random, folder: Path) -> None:
    """Read a data set of small files, some of them cut, overwritten or replaced: each is refused, or the right one."""
    own = Path(tempfile.mkdtemp(dir=folder))
    row = rng.choice([layout for row in DATA_SETS for layout in (row, row.other) if layout])
    files, paths, where = [], [], own / rng.choice(row.folders)
    where.mkdir(parents=True, exist_ok=True)
    contents = {file.part: rng.randbytes(rng.randint(100, 5000)) for file in row.files}
    for file in row.files:
        content, suffix = contents[file.part], rng.choice(("", ".gz"))
        files.append(replace(file, num_bytes=len(content), checksum=f"sha256:{hashlib.sha256(content).hexdigest()}"))
        paths.append(where / (rng.choice((file.name, *file.aliases)) + suffix))
        paths[-1].write_bytes(gzip.compress(content) if suffix else content)
    row = replace(row, files=tuple(files), other=None)
    for path in rng.sample(paths, rng.choice((0, 1, 1, 2))):
        _spoil(rng, path, rng.choice(paths))
    for file in row.files:
        with contextlib.suppress(DataError):
            assert read_verified(row, own, file.part) == contents[file.part]
    with contextlib.suppress(DataError):
        verify(row, own)


def _spoil(rng: random.Random, path: Path, other: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    kind = rng.randrange(12)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind in (2, 3, 4):
        path.symlink_to(("/dev/zero", path, other)[kind - 2])
    elif kind == 5:
        path.write_bytes(gzip.compress(bytes(2**24), 1) if path.suffix == ".gz" else bytes(2**24))
    elif kind == 6:
        path.write_bytes(rng.choice((b"", b"<html>moved</html>", gzip.compress(b""), b"\x1f\x8b")))
    elif kind != 7:
        path.write_bytes(_damaged(rng, content))


_MODEL = """\
import atexit, json, os, pathlib, resource, signal, subprocess, sys, threading, time, warnings
import torch
from torch import nn
class Odd(Exception):
    def __str__(self): raise ValueError("no text")
    __repr__ = __len__ = __bool__ = __eq__ = __hash__ = __iter__ = __call__ = __str__
{top}
def build():
    model, example = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    {within}
    return {returned}
"""
_STATEMENTS = """\
sys.exit(3)|os._exit(0)|raise KeyboardInterrupt|raise Odd|raise ValueError('\\ud800\\x1b[2J')|raise Warning('x' * 10**6)
os.close(1)|os.closerange(0, 99)|sys.stdout = sys.stderr = None|print('\\x1b]0;x\\x07' * 9999)|os.kill(os.getpid(), 9)
os.kill(os.getpid(), 11)|os.chdir('/')|threading.Thread(target=time.sleep, args=(600,)).start()|os.fork()|os.setsid()
subprocess.Popen(['sleep', '600'], start_new_session=True)|del torch.nn.Linear|sys.modules.clear()|os.unlink(__file__)
open(__file__, 'a').write('#')|__builtins__.clear()|json.dumps = None|sys.setrecursionlimit(50)|time.sleep(600)|1 / 0
atexit.register(time.sleep, 600)|os.environ.clear()|import no_such_module|signal.signal(signal.SIGTERM, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))|torch.set_default_device('meta')|torch.empty(10**15)|from . import x
warnings.simplefilter('error')|pathlib.Path.read_bytes = open = None|os.write(2, b'\\xff\\x00' * 9999)|await x|x = [[]]
torch.set_default_dtype(torch.float16)|os.umask(0o777)|sys.path.clear()|sys.settrace(print)|del sys.stdout"""
_VALUES = """\
None|0|-1|True|10**400|float('nan')|'\\ud800'|'\\x1b]0;x\\x07'|[]|{}|Odd|Odd()|object()|lambda *x: x|lambda: 1 / 0|build
torch.ones(0)|example|(example, example)|[[]] * 999|nn.Linear(4, 4)|torch.optim.SGD(model.parameters(), 0.1)|torch|'x'
torch.optim.Adam|type|range(10**12)|iter(())|(x for x in ())|model|{'x': example}|nn.Sequential()|{Odd: 1}|8|'tokens'"""
_PARTS = "batch|loss|training_step|optimizer|scheduler|batch_size|accumulate|clip_grad_norm|unit|model|\x1b"
_FILES = ("train_me.py", "a b.py", "♥.py", "\x1b[2J.py", "-.py", "x:y.py", "a\nb.py", "\udcff.py", "%s{0}.py", "n.txt")


def _one_of(rng: random.Random, text: str) -> str:
    return rng.choice(re.split(r"[|\n]", text))


@functools.cache
def _machine() -> Machine:
    return Machine(ForkserverEngine(), faulty_trial.ENVIRONMENT, "cpu", Path("/no/such/data"))


def model_file(rng: random.Random, folder: Path) -> None:
    """Inspect a file that should hold a user's model: it is refused in words, or does; nothing is left running."""
    parts = {"batch": "example"} | {_one_of(rng, _PARTS): _one_of(rng, _VALUES) for _ in range(rng.randint(0, 3))}
    whole = "{'model': model, " + ", ".join(f"{name!r}: {value}" for name, value in parts.items()) + "}"
    returned = rng.choice((whole, whole, f"model, {_one_of(rng, _VALUES)}", _one_of(rng, _VALUES)))
    top, within = (_one_of(rng, _STATEMENTS) if rng.random() < 0.3 else "pass" for _ in range(2))
    content = _MODEL.format(top=top, within=within, returned=returned).encode()
    path = folder / rng.choice(_FILES)
    path.write_bytes(_damaged(rng, content) if rng.random() < 0.2 else content)
    machine, name = _machine(), f"{path}:{rng.choice(('build',) * 9 + ('main', 'Odd', 'torch', 'x.y', ''))}"
    before = _descendants(os.getpid(), ())
    details = ""
    try:
        slow_imports([name])
        shown_name(name)
        inspect_user_model(machine, locate(name), timeout_seconds=1.0)
    except UsageError as error:
        details = error.details
    assert _is_harmless(details), details
    _assert_none_left(before)


def _assert_none_left(before: list[int]) -> None:
    kept = {*before, forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    left = _descendants(os.getpid(), kept)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes()[-200:] for pid in left]


class _Killing(ForkserverEngine):
    rank, seconds = 0, 0.0

    def start(self, timeout_seconds: float, num_processes: int = 1) -> RpcSession:
        session = super().start(timeout_seconds, num_processes)
        threading.Timer(self.seconds, session.processes[self.rank].process.kill).start()
        return session


def kill_rank(rng: random.Random, folder: Path) -> None:
    """Kill one of two ranks on the CPU at a random time: the record names it, unless the trial is over by then."""
    own = {"workload": "mnist-cnn", "precision": "fp32", "loss_scale": "none", "batch_size": 2, "protocol": CPU_SHORT}
    spec = TrialSpec(**own, device="cpu", world_size=2, parallelism="ddp")  # type: ignore[arg-type]
    machine, engine = _machine(), _Killing()
    engine.rank, engine.seconds = rng.randrange(2), rng.uniform(0.0, 1.5)
    before = _descendants(os.getpid(), ())
    runner = TrialRunner(engine, Store(folder / "r"), machine.environment, NullListener())
    (trial,) = runner.run([spec])
    if trial.status != "ok":
        assert (trial.status, trial.message[:6]) == ("crashed", f"rank {engine.rank}"), trial.message
        assert "the process was ended by SIGKILL" in trial.message
    (again,) = replace(runner, engine=machine.engine, policy=ResumePolicy(retry=True)).run([spec])
    assert again.status == "ok", again.message
    runner.closer.wait()
    _assert_none_left(before)
    assert not load_folder(folder / "r")[1]


# All kinds, with those of the other modules.
FAULTS = {**processes_that_die.FAULTS, "one of two ranks is killed": kill_rank}
INPUTS = {**hostile_inputs.INPUTS, "files of data sets": data_file, "files with a model": model_file}
