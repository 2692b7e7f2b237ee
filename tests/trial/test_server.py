"""the server in a trial's process: every call is answered by one event, whatever happens, and nothing is raised."""

import gc
import inspect
import json
import re
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import PATIENCE_SECONDS, wait_until
from small_step import cpu_spec, user_spec

from castwise.apply.precision import read_fp32_precision, restore_fp32_precision
from castwise.errors import TechniqueError, UsageError
from castwise.orchestrator.session import Session
from castwise.records.schema import Block, Environment, Epoch, Facts, RankSamples, Resumed, StepProfile
from castwise.spec.plan import MeasurementProtocol, TrialSpec
from castwise.spec.recipe import Loader, Recipe
from castwise.spec.user_model import UserModel
from castwise.trial import server, training_run
from castwise.trial.script.ranks import start_of

TINY = MeasurementProtocol(warm_up_steps=1, warm_up_seconds=0.05, block_seconds=0.01, num_blocks=2, min_blocks=1)
SPEC = cpu_spec(protocol=TINY, seed=1)
TRAINING = cpu_spec(recipe=Recipe(epochs=2, samples_per_epoch=12, loader=Loader(resident=True, num_workers=0)))


class Parent:
    """The parent's end of a pipe at whose other end a trial is answered."""

    def __init__(self) -> None:
        self.connection, self._theirs = Pipe()
        self.raised: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            server.serve(self._theirs)
        except BaseException as error:  # noqa: BLE001  a thread's exceptions reach nobody by themselves
            self.raised.append(error)
        finally:
            self._theirs.close()

    def events(self, message: bytes) -> list[dict[str, Any]]:
        """Return the events that answer a message."""
        self.connection.send_bytes(message)
        events: list[dict[str, Any]] = [{"event": "progress"}]
        while events[-1]["event"] == "progress":
            assert self.connection.poll(PATIENCE_SECONDS), "no answer"
            events.append(json.loads(self.connection.recv_bytes()))
        return events[1:]

    def call(self, method: str, **arguments: object) -> dict[str, Any]:
        """Return the event that ends a call."""
        return self.events(message(method, **arguments))[-1]

    def result(self, method: str, **arguments: object) -> Any:
        """Return what a method returns."""
        event = self.call(method, **arguments)
        assert (event["event"], event.get("method")) == ("returned", method), event
        return event["result"]

    def set_up(self, spec: TrialSpec | dict[str, Any] = SPEC) -> dict[str, Any]:
        document = spec if isinstance(spec, dict) else spec.model_dump(mode="json")
        return self.call("set_up", spec=document, checkpoint=None, data_dir=None, rank=0, rendezvous=None)

    @property
    def is_over(self) -> bool:
        self._thread.join(PATIENCE_SECONDS)
        return not self._thread.is_alive() and not self.raised


def message(method: str, **arguments: object) -> bytes:
    return json.dumps({"method": method, "arguments": arguments}).encode()


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Let each test's collection of garbage look through its own objects, not through all modules'."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Restore the float32 switches: a trial that fails leaves them as its trial had them, and ends."""
    before = read_fp32_precision()
    yield
    gc.collect()  # the server's own restoring comes first
    restore_fp32_precision(before)


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent()
    yield made
    made.connection.close()
    assert made.is_over, made.raised


METHODS = [name for name in vars(Session) if not name.startswith("_") and name not in ("close", "ready_seconds")]


@pytest.mark.parametrize("name", METHODS)
def test_server_has_the_methods_of_a_session(name: str) -> None:
    asked = inspect.signature(getattr(Session, name))
    offered = inspect.signature(getattr(server.TrialServer, name))
    added = {"open": {"commit"}, "set_up": {"data_dir", "rank", "rendezvous"}}.get(name, set())
    assert offered.parameters.keys() == asked.parameters.keys() - {"on_progress", "on_note"} | added
    if name != "finish":  # a session returns the samples of all ranks
        assert offered.return_annotation == asked.return_annotation


def test_steady_trial(parent: Parent) -> None:
    environment = Environment.model_validate(parent.result("open", device="cpu", commit="0123456789ab"))
    assert (environment.torch, environment.commit) == (torch.__version__, "0123456789ab")
    leading = SPEC.model_copy(update={"protocol": TINY.model_copy(update={"lead_in_seconds": 0.01})})
    assert parent.set_up(leading)["event"] == "returned"
    assert Facts.model_validate(parent.result("warm_up")).param_dtypes == {"float32": 1_199_882}
    blocks = []
    for _ in range(2):
        assert parent.result("lead_in") is None
        blocks.append(Block.model_validate(parent.result("run_block")))
    assert RankSamples.model_validate(parent.result("finish")).blocks == tuple(blocks)
    assert all(block.lead_in_steps for block in blocks)
    assert parent.is_over


def test_a_steady_trial_that_is_to_be_profiled_goes_on_after_its_samples(parent: Parent, tmp_path: Path) -> None:
    parent.set_up(SPEC.model_copy(update={"protocol": TINY.model_copy(update={"profile_steps": 2})}))
    parent.result("warm_up")
    parent.result("run_block")
    samples = RankSamples.model_validate(parent.result("finish"))
    assert samples.peak_allocated_bytes is not None
    trace = tmp_path / "traces" / "steps.json"
    profile = StepProfile.model_validate(parent.result("profile", num_steps=2, trace=str(trace)))
    assert (profile.device_type, profile.num_steps, profile.missing) == ("cpu", 2, "")
    assert json.loads(trace.read_text())["traceEvents"]
    assert len(samples.blocks) == 1, "the profiled steps are no samples"
    assert parent.is_over


def test_training_trial_reports_progress_and_keeps_weights(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(training_run, "_REPORT_SECONDS", -1.0)
    parent.set_up(TRAINING)
    resumed = Resumed.model_validate(parent.result("resume"))
    assert (resumed.epochs, resumed.facts.num_parameters) == ((), 1_199_882)
    *progress, last = parent.events(message("run_epoch"))
    assert [event["done"] for event in progress] == [pytest.approx(step / 3) for step in (1, 2, 3)]
    first = Epoch.model_validate(last["result"])
    assert (first.num_steps, first.num_samples) == (3, 12)
    assert first.first_step_seconds is not None
    assert 0 < first.first_step_seconds <= first.seconds
    second = Epoch.model_validate(parent.result("run_epoch"))
    assert second.first_step_seconds is None, "the run has one first step"
    path = tmp_path / "kept" / "run.pt"
    assert RankSamples.model_validate(parent.result("finish", weights=str(path))).epochs == (first, second)
    assert sum(weight.numel() for weight in torch.load(path, weights_only=True).values()) == 1_199_882
    assert parent.is_over


def test_loss_that_is_not_finite_arrives(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(seconds=1.0, num_steps=1, loss=float("nan"), loss_scale=float("inf"))
    epoch = Epoch(
        seconds=1.0, data_seconds=0.0, num_steps=1, num_samples=1, counted_seconds=1.0, counted_samples=1,
        losses=((0, float("nan")),), learning_rate=0.1, validation_loss=float("inf"),
    )  # fmt: skip
    monkeypatch.setattr(server, "SteadyRun", lambda *_: SimpleNamespace(run_block=lambda _: block))
    monkeypatch.setattr(server, "TrainingRun", lambda *_: SimpleNamespace(run_epoch=lambda _: epoch))
    parent.set_up()
    assert repr(Block.model_validate(parent.result("run_block"))) == repr(block)
    parent.set_up(TRAINING)
    assert repr(Epoch.model_validate(parent.result("run_epoch"))) == repr(epoch)


@pytest.mark.parametrize(
    ("named", "has_gpu", "opened"),
    [("auto", False, "cpu"), ("auto", True, "cuda:0"), ("cuda", True, "cuda:0"), ("cuda:1", True, "cuda:1")],
)
def test_a_gpu_without_a_number_is_the_first(
    named: str, has_gpu: bool, opened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(server, "read_environment", lambda device, _: devices.append(device))
    server.TrialServer(lambda _: None).open(named, None)
    assert devices == [torch.device(opened)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_missing_device_is_refused(parent: Parent) -> None:
    answer = parent.call("open", device="tpu:0", commit=None)
    assert (answer["event"], answer["status"], answer["refused"]) == ("failed", "unsupported", True)
    assert "'tpu:0'" in answer["message"]
    assert parent.is_over


def test_fetch_ends_the_server(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[str, Path]] = []
    monkeypatch.setattr(server, "fetch", lambda name, folder: fetched.append((name, folder)))
    parent.result("fetch", data_set="mnist", data_dir="/somewhere")
    assert fetched == [("mnist", Path("/somewhere"))]
    assert parent.is_over


@pytest.mark.parametrize(
    ("where", "asked"), [("/w", ["resnet18", "resnet34", "resnet50"]), (None, ["resnet18", "resnet34"])]
)
def test_find_weights_tries_a_dead_network_once(
    where: str | None, asked: list[str], parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, Path | None]] = []

    def find(model: str, folder: Path | None) -> Path | None:
        seen.append((model, folder))
        return None if model == "resnet34" else Path(f"/files/{model}.pth")

    monkeypatch.setattr(server, "find_weights", find)
    last = None if where is None else "/files/resnet50.pth"
    files = {"resnet18": "/files/resnet18.pth", "resnet34": None, "resnet50": last}
    assert parent.result("find_weights", models=["resnet18", "resnet34", "resnet50"], where=where) == files
    assert seen == [(model, Path(where) if where else None) for model in asked]
    assert parent.is_over


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff",
        b'{"method": ["open"]}',
        message("_steady_run"),
        message("open"),
        message("run_block", length="long"),
        message("finish"),
    ],
)
def test_impossible_call_is_a_failure_and_the_end(sent: bytes, parent: Parent) -> None:
    (answer,) = parent.events(sent)
    assert (answer["event"], answer["status"], answer["refused"]) == ("failed", "crashed", False)
    assert len(answer["message"].splitlines()) == 1
    assert parent.is_over


@pytest.mark.parametrize(
    ("error", "status", "refused"),
    [
        (MemoryError(), "oom", False),
        (UsageError("No such thing."), "unsupported", True),
        (TechniqueError("Not this model."), "unsupported", False),
        (BrokenPipeError(32, "Broken pipe"), "crashed", False),
        (EOFError("a file of the user's"), "crashed", False),
    ],
)
def test_exception_is_a_failure_and_the_end(
    error: Exception, status: str, refused: bool, parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(server, "SteadyRun", fail)
    answer = parent.set_up()
    assert (answer["event"], answer["status"], answer["refused"]) == ("failed", status, refused)
    assert parent.is_over


def test_result_that_is_not_json_is_a_failure(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SteadyRun", lambda *_: SimpleNamespace(run_block=lambda _: object()))
    parent.set_up()
    answer = parent.call("run_block")
    assert (answer["event"], answer["status"]) == ("failed", "crashed")
    assert parent.is_over


def test_end_of_the_pipe_ends_the_server(parent: Parent) -> None:
    parent.connection.close()
    assert parent.is_over


def test_parent_that_leaves_without_reading(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, may_go_on = threading.Event(), threading.Event()

    def linger(row: object) -> None:
        reached.set()
        may_go_on.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(server, "check_workload", linger)
    for _ in range(2):  # the second is unread when the pipe is closed: a reset instead of an end
        parent.connection.send_bytes(message("check", workloads=["mnist-cnn"]))
    assert reached.wait(PATIENCE_SECONDS)
    parent.connection.close()
    may_go_on.set()
    assert parent.is_over


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"techniques": ("cuda-graph",)}, "cuda-graph"),
        ({"world_size": 2}, "World size 2"),
        ({"parallelism": "ddp"}, "World size 1"),
        ({"world_size": 2, "parallelism": "dp"}, "on a CPU take the parallelism ddp"),
        ({"world_size": 2, "parallelism": "dp", "device": "cuda:0", "workload": "lstm-lm"}, "which is time"),
        ({"workload": "train_me.py:build"}, "castwise.compare"),
    ],
)
def test_impossible_spec_is_refused(change: dict[str, Any], words: str, parent: Parent) -> None:
    answer = parent.set_up(cpu_spec(**change))
    assert (answer["event"], answer["status"], answer["refused"]) == ("failed", "unsupported", True)
    assert words in answer["message"]


# Users' models


def inspect_file(parent: Parent, file: Path) -> dict[str, Any]:
    model = user_spec(file).user_model
    assert model is not None
    return parent.call("inspect", model=model.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "import no_such_package",
            "ModuleNotFoundError: No module named 'no_such_package' (train_me.py:1, in <module>)",
        ),
        ("\ndef build()\n", "SyntaxError: expected ':' (train_me.py:2)"),
        ("def build():\n    return 3\n", "train_me.py:build returned an int."),
        ("\n\ndef build(size):\n    return 3\n", "train_me.py:build needs arguments (size)"),
    ],
)
def test_mistake_in_the_users_code_names_its_place(code: str, text: str, parent: Parent, tmp_path: Path) -> None:
    file = tmp_path / "train_me.py"
    file.write_text(code)
    answer = inspect_file(parent, file)
    assert (answer["event"], answer["refused"]) == ("failed", True)
    assert answer["message"].startswith(text)
    assert re.search(r" \(train_me\.py:[1-3](, in .+)?\)$", answer["message"]), "one place, at the end"


def test_inspect_finds_the_batch_size(parent: Parent, tmp_path: Path) -> None:
    file = tmp_path / "train_me.py"
    file.write_text("import torch\nbuild = (torch.nn.Linear(3, 2), torch.ones(6, 3))\n")
    workload = inspect_file(parent, file)["result"]
    assert workload["batch_size"] == 6
    assert len(workload["model"]["digest"]) == 12
    assert parent.is_over


STEP = """\
import torch
from torch import nn
class Net(nn.Linear):
    def forward(self, x):
        return {output}
def build():
    return Net(3, 2), (torch.ones(6, 3), {target}), {loss}
"""


@pytest.mark.parametrize(
    ("output", "target", "loss", "text", "place"),
    [
        ("x @ x", "torch.ones(6)", "nn.MSELoss()", "RuntimeError: ", "train_me.py:5, in forward"),
        (
            "super().forward(x)",
            "torch.ones(6, 2)",
            "nn.MSELoss(reduction='none')",
            "The loss of train_me.py:build has shape (4, 2): it must be a scalar.",
            "train_me.py:6, in build",
        ),
        # raised in torch's own code, because of the target's dtype
        (
            "super().forward(x)",
            "torch.ones(6)",
            "nn.CrossEntropyLoss()",
            "RuntimeError: ",
            "in the forward pass or the loss of train_me.py:build",
        ),
        # raised in backward, which runs no line of theirs
        (
            "super().forward(x).exp().add_(1)",
            "torch.ones(6, 2)",
            "nn.MSELoss()",
            "RuntimeError: ",
            "in backward, under autocast, of train_me.py:build",
        ),
    ],
    ids=["in their code", "in castwise", "in torch", "in backward"],
)
def test_error_in_a_step_names_the_place_in_the_users_code(  # noqa: PLR0917
    output: str, target: str, loss: str, text: str, place: str, parent: Parent, tmp_path: Path
) -> None:
    file = tmp_path / "train_me.py"
    file.write_text(STEP.format(output=output, target=target, loss=loss))
    answer = parent.set_up(user_spec(file, "bf16-mixed" if "autocast" in place else "fp32", protocol=TINY))
    if answer["event"] == "returned":
        answer = parent.call("warm_up")
    assert answer["message"].startswith(text)
    assert answer["message"].endswith(f" ({place})")


_FORKING = """
import os, runpy, sys, torch, torch._dynamo, castwise.trial.server
sys.argv[:2] = []
for rank in range(2):
    if not os.fork():
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        os._exit(0)
os.wait(), os.wait()
"""
_RANK = """
import os, sys, torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for index in range(100000):
    model(torch.ones(4 + int(os.environ["RANK"]), 3)).sum().backward()
    optimizer.step()
    if sys.argv[1:] == ["--fail"] and os.environ["RANK"] == "1":
        raise ValueError("no more")
"""


@pytest.mark.parametrize(
    ("launcher", "argument"),
    [
        pytest.param("torchrun --nproc-per-node 2", "--go-on", marks=pytest.mark.slow),
        ("python forking.py", "--fail"),  # starts two ranks as torchrun does, but imports torch once
    ],
)
def test_script_on_two_ranks(
    launcher: str, argument: str, parent: Parent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forking.py").write_text(_FORKING)
    (tmp_path / "train.py").write_text(_RANK)
    model = UserModel(kind="script", path="train.py", name="", launcher=launcher.split(), arguments=(argument,))
    if argument == "--fail":
        trial = SPEC.model_copy(update={"user_model": model, "precision": "bf16-mixed"})
        event = parent.set_up(trial)
        event = event if event["event"] == "failed" else parent.call("warm_up")
        while event["event"] != "failed":  # rank 0 may be ahead of the failure
            event = parent.call("run_stretch", lead_in_seconds=0.0, num_blocks=1, block_seconds=0.01)
        assert event["message"] == "rank 1: ValueError: no more (train.py:9, in <module>)"
    else:
        assert parent.result("inspect", model=model.model_dump(mode="json"))["batch_size"] == 4 + 5


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--master-port=29500", "--standalone", "--nnodes 1 --rdzv-backend c10d"])
def test_launchers_of_trials_that_run_side_by_side_take_a_port_each(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(_RANK)
    launcher = ("torchrun", "--nproc-per-node", "1", *options.split())
    model = UserModel(kind="script", path="train.py", name="", launcher=launcher)
    parents = [Parent(), Parent()]
    for parent in parents:  # which stay until all have begun
        event = parent.set_up(SPEC.model_copy(update={"user_model": model}))
        assert event["event"] == "returned", event
    for parent in parents:
        parent.connection.close()
        assert parent.is_over, parent.raised


@pytest.mark.parametrize(
    ("launcher", "options", "last"),
    [
        ("torchrun", "--nproc-per-node 2 --master_port=1", "--master-port 7"),
        ("python -m torch.distributed.run", "--standalone", "--master-port 7"),
        ("torchrun", "--rdzv-backend c10d", "--master-port 7 --rdzv-endpoint localhost:7"),
        ("torchrun", "--rdzv_endpoint=localhost:29400", "--master-port 7 --rdzv-endpoint localhost:7"),
        ("accelerate launch", "--cpu --main_process_port=1", "--main_process_port 7"),
        ("python -m accelerate.commands.launch", "", "--main_process_port 7"),
    ],
)
def test_a_launcher_takes_the_port_of_its_trial(launcher: str, options: str, last: str) -> None:
    module = "torch.distributed.run" if "torch" in launcher else "accelerate.commands.launch"
    started = start_of([*launcher.split(), *options.split()], "7")
    assert started == ["-m", module, *options.split(), *last.split()]


_DDP = """
import os, torch
import torch.distributed as dist
rank = os.environ["RANK"]
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=int(rank), world_size=2)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 2))
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), foreach=False)
images = torch.randn(4000, 3, 8, 8)
sampler = torch.utils.data.DistributedSampler(images)
loader = torch.utils.data.DataLoader(images, 4, sampler=sampler)
for batch in loader:
    ddp(batch).sum().backward()
    is_turned = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    with open(f"../notes/{rank}", "w") as file:
        file.write(f"{is_turned} {optimizer.defaults['foreach']} {loader.num_workers > 0} {sampler.rank}")
    optimizer.step()
    with open(f"../notes/hooks {rank}", "a") as file:
        print(len(torch.nn.modules.module._global_forward_pre_hooks), file=file)
"""


def test_a_launcher_may_start_one_process_without_the_variables_of_ranks(
    parent: Parent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    run = "runpy.run_module(sys.argv[0], alter_sys=True, run_name='__main__')"
    (tmp_path / "launch.py").write_text(f"import runpy, sys; del sys.argv[:2]; {run}")
    (tmp_path / "train.py").write_text(_RANK.replace('os.environ["RANK"]', '"0"'))
    model = UserModel(kind="script", path="train.py", name="", launcher=("python", "launch.py"))
    event = parent.set_up(SPEC.model_copy(update={"workload": "python launch.py train.py", "user_model": model}))
    assert event["event"] == "returned", event
    parent.result("warm_up")
    parent.result("run_stretch", lead_in_seconds=0.0, num_blocks=2, block_seconds=0.01)


def test_every_rank_of_a_script_gets_the_techniques(
    parent: Parent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a script writes beside itself, only it sees; temporary files are written as always.
    own, notes = tmp_path / "own", tmp_path / "notes"
    own.mkdir()
    notes.mkdir()
    monkeypatch.chdir(own)
    (own / "forking.py").write_text(_FORKING)
    (own / "train.py").write_text(_DDP)
    model = UserModel(kind="script", path="train.py", name="", launcher=("python", "forking.py"))
    techniques = ("loader-workers", "channels-last", "foreach-optimizer")
    script = {"workload": "torchrun train.py", "user_model": model, "techniques": techniques}
    event = parent.set_up(SPEC.model_copy(update=script))
    assert event["event"] == "returned", event
    wait_until(lambda: all((notes / rank).read_text() for rank in "01"), "the first step of each rank")
    assert [(notes / rank).read_text() for rank in "01"] == [f"True True True {rank}" for rank in "01"]
    parent.result("warm_up")
    for _ in range(2):  # the other rank stops looking for models at the next mark
        parent.result("run_stretch", lead_in_seconds=0.0, num_blocks=2, block_seconds=0.01)
    hooks = [notes / f"hooks {rank}" for rank in "01"]
    wait_until(lambda: all(each.read_text().endswith("\n0\n") for each in hooks), "the end of the hooks")
