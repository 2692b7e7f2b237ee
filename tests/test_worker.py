"""The protocol from the worker's side: every command has one answer, whatever happens, and nothing is raised."""

import gc
import json
import re
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from castwise.errors import MissingDataError, TechniqueError, UsageError
from castwise.records.schema import Block, Environment, Epoch, Facts, RankSamples, Resumed
from castwise.spec.recipe import Loader, Recipe
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.worker import epoch_stats, server
from castwise.worker.precision import _switch, read_fp32_precision
from castwise.worker.steady_run import SteadyRun
from castwise.worker.training_run import TrainingRun

PATIENCE_SECONDS = 60.0
TINY = MeasurementProtocol(warm_up_steps=1, warm_up_seconds=0.05, block_seconds=0.01, num_blocks=2, min_blocks=1)
SPEC = TrialSpec(
    workload="mnist-cnn", precision="fp32", loss_scale="none", batch_size=4, device="cpu", protocol=TINY, seed=1
)
SET_UP = {"command": "set_up", "spec": SPEC.model_dump(mode="json"), "data_dir": None}


class Conversation:
    """The parent's end of a pipe at whose other end a worker serves."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.raised: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        self._thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            server.serve(connection)
        except BaseException as error:  # noqa: BLE001  a thread's exceptions reach nobody by themselves
            self.raised.append(error)
        finally:
            connection.close()

    def ask(self, command: Any) -> dict[str, Any]:
        """Return the answer to a command, whatever signs of life come before it on a slow machine."""
        answer = self.ask_raw(json.dumps(command).encode())
        while answer["event"] == "progress":
            assert self.connection.poll(PATIENCE_SECONDS), "no answer"
            answer = json.loads(self.connection.recv_bytes())
        return answer

    def ask_raw(self, message: bytes) -> dict[str, Any]:
        self.connection.send_bytes(message)
        assert self.connection.poll(PATIENCE_SECONDS), "no answer"
        answer = json.loads(self.connection.recv_bytes())
        assert isinstance(answer, dict)
        return answer

    @property
    def is_over(self) -> bool:
        self._thread.join(PATIENCE_SECONDS)
        return not self._thread.is_alive() and not self.raised


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Give the float32 switches back: a worker that fails leaves them as its trial had them, and ends."""
    before = read_fp32_precision()
    yield
    if read_fp32_precision() != before:
        gc.collect()  # the worker's own restoring comes first
    for path, value in before.items():
        _switch("" if path == "all" else path).fp32_precision = value


@pytest.fixture
def talk() -> Iterator[Conversation]:
    conversation = Conversation()
    yield conversation
    conversation.connection.close()
    assert conversation.is_over, conversation.raised


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_trial_from_its_first_command_to_its_last(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SteadyRun, "_lead_of", lambda *_: 3)
    opened = talk.ask({"command": "open", "device": "cpu", "commit": "0123456789ab"})
    assert opened["event"] == "opened"
    assert Environment.model_validate(opened["environment"]).torch == torch.__version__
    assert talk.ask(SET_UP) == {"event": "ready"}
    warm = talk.ask({"command": "warm_up"})
    assert warm["event"] == "warm"
    assert Facts.model_validate(warm["facts"]).param_dtypes == {"float32": 1_199_882}
    blocks = []
    for _ in range(2):
        assert talk.ask({"command": "lead_in"}) == {"event": "led_in"}
        answer = talk.ask({"command": "run_block"})
        assert answer["event"] == "block"
        blocks.append(Block.model_validate(answer["block"]))
    finished = talk.ask({"command": "finish"})
    assert finished["event"] == "finished"
    assert RankSamples.model_validate(finished["samples"]).blocks == tuple(blocks)
    assert [block.lead_in_steps for block in blocks] == [3, 3]
    assert talk.is_over


def test_a_loss_that_is_no_number_arrives_as_what_it_is(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(seconds=1.0, num_steps=1, loss=float("nan"), loss_scale=float("inf"))
    talk.ask(SET_UP)
    monkeypatch.setattr(SteadyRun, "run_block", lambda self, length: block)
    arrived = Block.model_validate(talk.ask({"command": "run_block"})["block"])
    assert repr(arrived) == repr(block)


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda:0"), (False, "cpu")])
def test_auto_is_the_first_gpu_or_else_the_cpu(
    has_gpu: bool, device: str, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name_it(opened: torch.device, _: object) -> None:
        raise RuntimeError(str(opened))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(server, "read_environment", name_it)
    answer = talk.ask({"command": "open", "device": "auto", "commit": None})
    assert answer["message"] == f"RuntimeError: {device}"


def test_a_fetch_ends_the_conversation(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[str, Path]] = []
    monkeypatch.setattr(server, "fetch", lambda name, folder: fetched.append((name, folder)))
    assert talk.ask({"command": "fetch", "data_set": "mnist", "data_dir": "/somewhere"}) == {"event": "fetched"}
    assert fetched == [("mnist", Path("/somewhere"))]
    assert talk.is_over


@pytest.mark.parametrize(
    ("where", "asked"),
    [("/w", ["resnet18", "resnet34", "resnet50"]), (None, ["resnet18", "resnet34"])],
)
def test_weights_are_found_by_model_and_a_dead_network_is_asked_once(
    where: str | None, asked: list[str], talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, Path | None]] = []

    def find(model: str, folder: Path | None) -> Path | None:
        seen.append((model, folder))
        return None if model == "resnet34" else Path(f"/files/{model}.pth")

    monkeypatch.setattr(server, "find_weights", find)
    answer = talk.ask({"command": "find_weights", "models": ["resnet18", "resnet34", "resnet50"], "where": where})
    last = None if where is None else "/files/resnet50.pth"
    files = {"resnet18": "/files/resnet18.pth", "resnet34": None, "resnet50": last}
    assert answer == {"event": "weights", "weights": {"files": files}}
    assert seen == [(model, Path(where) if where else None) for model in asked]
    assert talk.is_over


def test_weights_that_are_not_where_the_user_says_are_the_user_s_mistake(talk: Conversation, tmp_path: Path) -> None:
    answer = talk.ask({"command": "find_weights", "models": ["resnet18"], "where": str(tmp_path / "none")})
    assert (answer["event"], answer["usage"]) == ("failed", True)
    assert "resnet18" in answer["message"] or "none" in answer["message"]


TRAINING = SPEC.model_copy(
    update={
        "kind": "training",
        "workload": "mlp-4096",
        "recipe": Recipe(epochs=2, samples_per_epoch=12, loader=Loader(resident=True, num_workers=0)),
    }
)


def test_an_epoch_gives_signs_of_life_before_its_answer(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_stats, "_SECONDS_BETWEEN_SIGNS", -1.0)
    set_up = {"command": "set_up", "spec": TRAINING.model_dump(mode="json"), "data_dir": None, "checkpoint": None}
    assert talk.ask(set_up) == {"event": "ready"}
    resumed = Resumed.model_validate(talk.ask({"command": "resume"})["resumed"])
    assert resumed.epochs == ()
    assert resumed.facts.num_parameters == 50_343_936
    events = [talk.ask_raw(b'{"command": "run_epoch"}')]
    while events[-1]["event"] == "progress":
        events.append(json.loads(talk.connection.recv_bytes()))
    shares = [event["done"] for event in events[:-1]]
    assert shares == [pytest.approx(step / 3) for step in (1, 2, 3)]
    epoch = Epoch.model_validate(events[-1]["epoch"])
    assert (epoch.num_steps, epoch.num_samples) == (3, 12)
    assert epoch.first_step_seconds is not None
    assert 0 < epoch.first_step_seconds <= epoch.seconds
    monkeypatch.setattr(epoch_stats, "_SECONDS_BETWEEN_SIGNS", 1e9)
    answer = talk.ask({"command": "run_epoch"})
    second = Epoch.model_validate(answer["epoch"])
    assert second.first_step_seconds is None, "it is the run's first step, once"
    samples = RankSamples.model_validate(talk.ask({"command": "finish"})["samples"])
    assert samples.epochs == (epoch, second)
    assert talk.is_over


def test_weights_are_kept_where_finish_says(talk: Conversation, tmp_path: Path) -> None:
    spec = TRAINING.model_copy(update={"workload": "mnist-cnn"}).model_dump(mode="json")
    talk.ask({"command": "set_up", "spec": spec, "data_dir": None, "checkpoint": None})
    answer = talk.ask({"command": "finish", "weights": str(tmp_path / "kept" / "run.pt")})
    assert answer["event"] == "finished"
    kept = torch.load(tmp_path / "kept" / "run.pt", weights_only=True)
    assert sum(weight.numel() for weight in kept.values()) == 1_199_882


def test_an_epoch_s_loss_that_is_no_number_arrives(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up = {"command": "set_up", "spec": TRAINING.model_dump(mode="json"), "data_dir": None, "checkpoint": None}
    talk.ask(set_up)
    real = TrainingRun.run_epoch

    def broken(self: TrainingRun, on_progress: Any = None) -> Epoch:
        return real(self, on_progress).model_copy(
            update={"losses": ((0, float("nan")),), "validation_loss": float("inf")}
        )

    monkeypatch.setattr(TrainingRun, "run_epoch", broken)
    epoch = Epoch.model_validate(talk.ask({"command": "run_epoch"})["epoch"])
    assert repr(epoch.losses) == "((0, nan),)"
    assert epoch.validation_loss == float("inf")


def test_a_check_of_models_that_are_there(talk: Conversation) -> None:
    command = {"command": "check", "workloads": ["torchvision:resnet18", "mnist-cnn"]}
    assert talk.ask(command) == {"event": "checked"}
    assert talk.ask(command) == {"event": "checked"}, "the conversation goes on"


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b'{"command": "dance"}',
        b'{"command": ["open"]}',
        b'{"command": "open"}',
        b'{"command": "set_up", "spec": {}, "data_dir": null}',
        b'{"command": "warm_up"}',
        b'{"command": "lead_in"}',
        b'{"command": "run_block"}',
        b'{"command": "finish"}',
        b'{"command": "fetch", "data_set": "no such set", "data_dir": "."}',
    ],
)
def test_a_command_that_cannot_be_carried_out_is_a_failure_and_the_end(message: bytes, talk: Conversation) -> None:
    answer = talk.ask_raw(message)
    assert sorted(answer) == ["event", "message", "status", "usage"]
    assert (answer["event"], answer["status"], answer["usage"]) == ("failed", "crashed", False)
    assert len(answer["message"].splitlines()) == 1
    assert talk.is_over


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_a_device_that_is_not_there_is_refused_in_words(talk: Conversation) -> None:
    answer = talk.ask_raw(b'{"command": "open", "device": "tpu:0", "commit": null}')
    assert (answer["event"], answer["status"], answer["usage"]) == ("failed", "unsupported", True)
    assert answer["message"].startswith("There is no device 'tpu:0'")
    assert talk.is_over


@pytest.mark.parametrize(
    ("error", "status", "message", "usage"),
    [
        (ValueError("first line\nsecond line"), "crashed", "ValueError: first line", False),
        (ZeroDivisionError(), "crashed", "ZeroDivisionError", False),
        (MemoryError(), "oom", "the host's memory is exhausted", False),
        (torch.OutOfMemoryError("CUDA out of memory."), "oom", "CUDA out of memory.", False),
        (NotImplementedError("no kernel"), "unsupported", "no kernel", False),
        (UsageError("No such thing."), "unsupported", "No such thing.", True),
        (TechniqueError("Not this model."), "unsupported", "Not this model.", False),
        (MissingDataError("mnist: not there"), "unsupported", "mnist: not there", True),
        (BrokenPipeError(32, "Broken pipe"), "crashed", "BrokenPipeError: [Errno 32] Broken pipe", False),
        (EOFError("a file of the user's"), "crashed", "EOFError: a file of the user's", False),
    ],
)
def test_what_a_model_raises_is_an_event(  # noqa: PLR0917
    error: Exception,
    status: str,
    message: str,
    usage: bool,
    talk: Conversation,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(server, "SteadyRun", failing(error))
    answer = talk.ask(SET_UP)
    assert answer == {"event": "failed", "status": status, "message": message, "usage": usage}
    assert talk.is_over
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["warm_up", "run_block", "finish"])
def test_a_failure_can_come_in_every_phase(command: str, talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    talk.ask(SET_UP)
    monkeypatch.setattr(SteadyRun, command, failing(RuntimeError("broken")))
    assert talk.ask({"command": command})["message"] == "RuntimeError: broken"


def test_an_answer_that_is_not_json_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server._Worker, "_check", lambda self, command: {"event": object()})
    talk = Conversation()
    answer = talk.ask({"command": "check", "workloads": []})
    assert talk.is_over
    assert answer["message"] == "TypeError: Object of type object is not JSON serializable"


def test_the_end_of_the_pipe_is_the_end(talk: Conversation) -> None:
    talk.connection.close()
    assert talk.is_over


def test_a_parent_that_leaves_without_reading_is_the_end_too(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, may_go_on = threading.Event(), threading.Event()

    def linger(row: object) -> None:
        reached.set()
        may_go_on.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(server, "check_workload", linger)
    command = json.dumps({"command": "check", "workloads": ["mnist-cnn"]}).encode()
    talk.connection.send_bytes(command)
    talk.connection.send_bytes(command)  # unread when the pipe is closed: a reset instead of an end
    assert reached.wait(PATIENCE_SECONDS)
    talk.connection.close()
    may_go_on.set()
    assert talk.is_over


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"techniques": ("cuda-graph",)}, "cuda-graph"),
        ({"world_size": 2}, "World size 2"),
        ({"parallelism": "ddp"}, "World size 1"),
        ({"world_size": 2, "parallelism": "dp"}, "on a CPU take the parallelism ddp"),
        ({"world_size": 2, "parallelism": "dp", "device": "cuda:0", "workload": "lstm-lm"}, "which is time"),
    ],
)
def test_a_spec_that_cannot_be_honoured_is_refused(change: dict[str, Any], words: str) -> None:
    fields = {"workload": "mlp-4096", "precision": "fp32", "loss_scale": "none", "batch_size": 1, "device": "cpu"}
    spec = TrialSpec.model_validate(fields | change)
    command = {"command": "set_up", "spec": spec.model_dump(mode="json"), "data_dir": None, "checkpoint": None}
    answer = json.loads(server._Worker(lambda event: None).answer(json.dumps(command).encode()))
    assert (answer["event"], answer["status"], answer["usage"]) == ("failed", "unsupported", True)
    assert words in answer["message"]


def own_spec(file: Path) -> dict[str, Any]:
    own = {"kind": "file", "path": str(file), "name": "build"}
    return SPEC.model_dump(mode="json") | {"workload": f"{file.name}:build", "own": own}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import no_such_package",
            "ModuleNotFoundError: No module named 'no_such_package' (train_me.py:1, in <module>)",
        ),
        ("\ndef build()\n", "SyntaxError: expected ':' (train_me.py:2)"),
        ("def build():\n    return 1 / 0\n", "ZeroDivisionError: division by zero (train_me.py:2, in build)"),
        ("def build():\n    return 3\n", "train_me.py:build returned an int."),
        ("\n\ndef build(size):\n    return 3\n", "train_me.py:build needs arguments (size)"),
    ],
)
def test_what_is_wrong_with_the_users_code_is_theirs_and_says_where(
    code: str, message: str, talk: Conversation, tmp_path: Path
) -> None:
    file = tmp_path / "train_me.py"
    file.write_text(code)
    answer = talk.ask({"command": "inspect", "own": own_spec(file)["own"]})
    assert (answer["event"], answer["usage"]) == ("failed", True)
    assert answer["message"].startswith(message)
    assert re.search(r" \(train_me\.py:[1-3](, in .+)?\)$", answer["message"]), "one place, the last thing said"


def test_a_look_at_the_users_code_tells_its_batch_size(talk: Conversation, tmp_path: Path) -> None:
    file = tmp_path / "train_me.py"
    file.write_text("import torch\nbuild = (torch.nn.Linear(3, 2), torch.ones(6, 3))\n")
    answer = talk.ask({"command": "inspect", "own": own_spec(file)["own"]})
    assert answer["event"] == "inspected"
    assert answer["workload"]["batch_size"] == 6
    assert len(answer["workload"]["model"]["digest"]) == 12
    assert talk.is_over


def test_what_the_users_model_raises_in_a_step_says_where(talk: Conversation, tmp_path: Path) -> None:
    file = tmp_path / "train_me.py"
    lines = ["import torch", "class Net(torch.nn.Linear):", "    def forward(self, x):", "        return x @ x"]
    file.write_text("\n".join([*lines, "build = (Net(3, 2), torch.ones(6, 3))"]))
    answer = talk.ask(SET_UP | {"spec": own_spec(file)})
    assert (answer["status"], answer["usage"]) == ("crashed", False)
    assert answer["message"].endswith("(train_me.py:4, in forward)")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("nn.MSELoss(reduction='none')", "The loss of train_me.py:build has shape (4, 2): it must be a scalar."),
        ("nn.CrossEntropyLoss()", "RuntimeError: "),  # torch's own code alone: of the target's dtype
    ],
)
def test_what_no_code_of_the_users_raises_says_where_their_function_is(
    returned: str, message: str, talk: Conversation, tmp_path: Path
) -> None:
    file = tmp_path / "train_me.py"
    batch = "(torch.ones(6, 3), torch.ones(6, 2))" if "MSE" in returned else "(torch.ones(6, 3), torch.ones(6))"
    lines = ["import torch", "from torch import nn", "def build():"]
    file.write_text("\n".join([*lines, f"    return nn.Linear(3, 2), {batch}, {returned}"]))
    answer = talk.ask(SET_UP | {"spec": own_spec(file)})
    if answer["event"] == "ready":
        answer = talk.ask({"command": "warm_up"})
    assert answer["message"].startswith(message)
    assert answer["message"].endswith(" (train_me.py:3, in build)")


@pytest.mark.parametrize("missing", ["own", "recipe"])
def test_a_users_model_is_no_suites(missing: str, talk: Conversation, tmp_path: Path) -> None:
    spec = own_spec(tmp_path / "train_me.py")
    if missing == "own":
        spec["own"] = None
    else:
        spec |= {"kind": "training", "recipe": Recipe(epochs=1).model_dump(mode="json")}
    answer = talk.ask(SET_UP | {"spec": spec})
    assert (answer["status"], answer["usage"]) == ("unsupported", True)
    assert "is a model of the user's own" in answer["message"]
