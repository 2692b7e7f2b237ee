"""The loops by hand of the speed goals: each trains, in the smallest form."""

import json
import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import goal_hand_run
import pytest
import torch
from goal_hand import HandTask, measure
from goal_hand_run import _Graphed, _Images
from hand_loops import make_step
from torch import nn

from castwise.registry.suite_filter import SuiteFilter
from castwise.registry.suites import find_suite, specs_of
from castwise.worker.data import preloaded

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    searches = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = searches


def task(**changes: Any) -> HandTask:
    fields: dict[str, Any] = {
        "workload": "mnist-cnn",
        "batch_size": 4,
        "precision": "bf16-mixed",
        "tuned": True,
        "compiled": False,
        "graph": False,
        "device": "cpu",
        "seconds": 0.02,
        "block_seconds": 0.005,
        "warm_up_seconds": 0.01,
    }
    return HandTask(**json.loads(json.dumps(fields | changes)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloaded, "_NUM_IMAGES", dict.fromkeys(preloaded._NUM_IMAGES, (22, 8)))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "tf32", "tuned": False},
        {"precision": "fp16-mixed"},
        {"precision": "bf16-mixed"},
        {"workload": "lstm-lm", "precision": "tf32", "batch_size": 1},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_steps_are_timed(changes: dict[str, Any]) -> None:
    found = measure(task(**changes))
    blocks = found["blocks"]
    assert isinstance(blocks, list)
    assert len(blocks) >= 3
    assert statistics.median(blocks) > 0
    assert torch.backends.cudnn.benchmark is changes.get("tuned", True)


@pytest.mark.slow
def test_two_processes_share_a_step() -> None:
    found = measure(task(world_size=2))
    assert len(found["blocks"]) >= 3  # type: ignore[arg-type]


def recipe(suite: str, workload: str, epochs: int, max_steps: int | None = None) -> dict[str, Any]:
    choice = SuiteFilter(epochs=epochs, max_steps=max_steps, workloads=(workload,), precisions=("fp32",))
    found = specs_of(find_suite(suite), device="cpu", choice=choice)[0].recipe
    assert found is not None
    document: dict[str, Any] = found.model_dump(mode="json")
    return document


@pytest.mark.usefixtures("quick")
def test_a_run_takes_every_sample_and_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def seen(*arguments: Any) -> Any:
        step = make_step(*arguments)

        def counted(batch: Any) -> Any:
            sizes.append(len(batch[1]))
            assert batch[0].is_contiguous(memory_format=torch.channels_last)
            return step(batch)

        return counted

    monkeypatch.setattr(goal_hand_run, "make_step", seen)
    run = task(recipe=recipe("tensorcore", "mnist-cnn", 2), data_set="synthetic:mnist", graph=True)
    found = measure(run)
    assert sizes == 2 * [4, 4, 4, 4, 4, 2]
    assert len(found["epochs"]) == 2  # type: ignore[arg-type]
    assert found["accuracy"] is None


@pytest.mark.usefixtures("quick")
def test_a_run_with_validation_on_cropped_images() -> None:
    own = recipe("wrn-cifar10", "wrn-28-10", 1, max_steps=1)
    run = task(recipe=own, data_set="synthetic:cifar10", workload="wrn-28-10", batch_size=2)
    accuracy = measure(run)["accuracy"]
    assert isinstance(accuracy, float)
    assert 0 <= accuracy <= 1


@pytest.mark.usefixtures("quick")
def test_crops_are_parts_of_the_padded_images_mirrored_or_not() -> None:
    images = _Images(task(data_set="synthetic:cifar10", tuned=False), "train", CPU)
    pixels, labels = preloaded.random_images("cifar10", "train")
    mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in goal_hand_run.STATISTICS["cifar10"])
    padded = nn.functional.pad(pixels, (4,) * 4)
    (batch,) = list(images.batches(22, drop_last=True))
    for image, label in zip(batch[0], batch[1], strict=True):
        crop = ((image * deviation + mean) * 255).round()
        places = [
            number
            for number in range(22)
            for top in range(9)
            for left in range(9)
            if int(labels[number]) == int(label)
            and any(
                torch.equal(crop, whole[:, top : top + 32, left : left + 32].float()) for whole in (padded[number],)
            )
        ]
        mirrored = [
            number
            for number in range(22)
            for top in range(9)
            for left in range(9)
            if torch.equal(crop.flip(2), padded[number][:, top : top + 32, left : left + 32].float())
        ]
        assert len(set(places + mirrored)) == 1


def test_a_graph_is_captured_at_the_fourth_step_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[float] = []
    trained: list[float] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())
    fake = SimpleNamespace(replay=lambda: replayed.append(float(graphed._places[0][0])))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: fake)

    def step(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        trained.append(float(batch[0][0]))
        return batch[0].sum()

    optimizer = torch.optim.Adadelta([nn.Parameter(torch.ones(2))], lr=0.001)
    graphed = _Graphed(step, optimizer, CPU)
    for number in range(6):
        graphed((torch.full((2,), float(number)),))
    assert trained[:3] == [0.0, 1.0, 2.0]
    assert len(trained) == 4  # captured once, which trains nothing on a device
    assert replayed == [3.0, 4.0, 5.0]
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.0005)


def test_the_process_says_what_it_measured_in_its_last_line(tmp_path: Path) -> None:
    from goal_turns import ChildFailedError, run_child

    script = tmp_path / "says.py"
    script.write_text("print('warning'); print('{\"blocks\": [1.0]}')")
    assert run_child([str(script)], 60.0) == {"blocks": [1.0]}
    script.write_text("raise SystemExit('no such device')")
    with pytest.raises(ChildFailedError, match="ended with 1: no such device"):
        run_child([str(script)], 60.0)
