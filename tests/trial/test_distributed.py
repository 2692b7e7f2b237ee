"""Steps shared by two processes: that they equal one process's on the joint batch, and that all decide alike."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import fake_environment
from ranks import answers_of
from small_step import MOMENTUM_SGD, cpu_spec, make_step, make_task, stepped_tensors
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from castwise.errors import TechniqueError
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.runner import NullListener, TrialRunner
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import find_workload
from castwise.spec.recipe import Loader, Optimizer, Recipe
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.trial import training_run
from castwise.trial.data.sharding import rank_batches, rank_columns
from castwise.trial.data.training_data import SyntheticSamples, load_batches, make_loader
from castwise.trial.distributed import Peers, spread
from castwise.trial.kernel_profile import _annotated, _largest_weight
from castwise.trial.models import build_task
from castwise.trial.models.task import UserLoop
from castwise.trial.trace_summary import UNUSED_RANGE
from castwise.trial.training_run import TrainingRun

pytestmark = pytest.mark.xdist_group("distributed")  # one process sets `ranks` up
TINY = MeasurementProtocol(
    warm_up_steps=1, warm_up_seconds=0.05, block_seconds=0.01, num_blocks=2, min_blocks=1, max_seconds=1.0
)
SPEC = cpu_spec(batch_size=8, world_size=2, parallelism="ddp", protocol=TINY)
EXACT = ("fp32", "bf16-mixed", "fp16-master")
NUM_STEPS = 3
STATIC = "ddp-static-graph"
WRAPPINGS = ("ddp-bucket-view", "ddp-buckets-100", STATIC, "bf16-all-reduce")
_WITHOUT_STATIC = tuple(name for name in WRAPPINGS if name != STATIC)
# By the batches of a step; without techniques first.
WRAPPED: dict[int, list[tuple[str, ...]]] = {
    1: [(), *((name,) for name in WRAPPINGS), WRAPPINGS],
    2: [(), *((name,) for name in _WITHOUT_STATIC), _WITHOUT_STATIC],
}


def training_spec(**recipe: Any) -> TrialSpec:
    fields = {"epochs": 2, "samples_per_epoch": 64, "loader": Loader(resident=True, num_workers=0)} | recipe
    return SPEC.model_copy(update={"kind": "training", "recipe": Recipe(**fields)})


# What runs in each rank


def small_net() -> nn.Module:
    """Return a network without dropout and batch norm, whose first bias is frozen."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))
    net[0].bias.requires_grad_(False)
    return net


def joint_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 3, 8, 8, generator=generator), torch.randint(10, (16,), generator=generator))
        for _ in range(NUM_STEPS)
    ]


def train(precision: str, loss_scale: str, peers: Peers, *names: str, accumulate: int = 1) -> list[Tensor]:
    """Return the weights after a few steps on this rank's half of each batch, or on all of it where it is alone."""
    task = make_task(small_net())
    if accumulate > 1:
        sgd = partial(torch.optim.SGD, lr=0.1)
        task.user_loop = UserLoop(lambda weights: sgd(weights.stepped), lambda _: lambda: None, accumulate=accumulate)
    step = make_step(find_precision(precision), task, MOMENTUM_SGD, loss_scale=loss_scale)
    if peers.world_size > 1:
        step.spread(lambda model: spread(model, SPEC.model_copy(update={"techniques": names})))
    for images, labels in joint_batches():
        batch = images.chunk(peers.world_size)[peers.rank], labels.chunk(peers.world_size)[peers.rank]
        step(batch if accumulate == 1 else [batch] * accumulate)  # type: ignore[arg-type]
    return [tensor.detach().clone() for tensor in stepped_tensors(step)]


def refused(peers: Peers) -> str:
    with pytest.raises(TechniqueError) as caught:
        train("fp32", "none", peers, STATIC, accumulate=2)
    return str(caught.value)


def looked_for_unused(*, finds: bool) -> bool:
    """Return whether a profile of a wrapped model's step has the range in which it looks for unused parameters."""
    wrapper = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=finds)
    step = SimpleNamespace(model=wrapper, within_ranges=nullcontext)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler, _annotated(step, {}, has_modules=False):
        wrapper(torch.ones(1, 2)).sum().backward()
    return UNUSED_RANGE in {event.key for event in profiler.key_averages()}


def wrapped_with(names: tuple[str, ...]) -> dict[str, Any]:
    """Return what DistributedDataParallel knows of itself with some techniques."""
    wrapper = spread(nn.Linear(2, 2), SPEC.model_copy(update={"techniques": names}))
    assert isinstance(wrapper, nn.parallel.DistributedDataParallel)
    return wrapper._get_ddp_logging_data()


def overflow_in_one_rank(peers: Peers) -> tuple[int, float | None, list[Tensor]]:
    step = make_step(find_precision("fp16-mixed"), make_task(small_net()), loss_scale="dynamic", clip_grad_norm=1.0)
    step.spread(lambda model: spread(model, SPEC))
    images, labels = joint_batches()[0]
    step((images * (math.inf if peers.rank == 1 else 1), labels))
    step((images, labels))
    return step.scaling.skipped_steps, step.scaling.read_scale(), [t.detach().clone() for t in stepped_tensors(step)]


def run(spec: TrialSpec, peers: Peers, epochs: int, checkpoint: Path | None = None) -> list[Any]:
    run = TrainingRun(spec, None, checkpoint, peers)
    while len(run.epochs) < epochs:
        run.run_epoch()
    run.close()
    return [(epoch.num_steps, epoch.num_samples, epoch.losses, epoch.diverged) for epoch in run.epochs]


def all_of_it(peers: Peers, folder: Path) -> dict[str, Any]:
    """Return the results of a rank, all in one process so that torch is imported once."""
    results: dict[str, Any] = {
        "agreed": peers.broadcast_object(f"rank {peers.rank}'s"),
        "gathered": peers.gather_objects(peers.rank),
        "threads": torch.get_num_threads(),
        "overflow": overflow_in_one_rank(peers),
        "refused": refused(peers),
        "looked": [looked_for_unused(finds=finds) for finds in (True, False)],
        "wrapper": {name: wrapped_with((name,)) for name in WRAPPINGS} | {"all": wrapped_with(WRAPPINGS)},
        "wrapped": {
            (names, accumulate): train("bf16-mixed", "none", peers, *names, accumulate=accumulate)
            for accumulate in (1, 2)
            for names in WRAPPED[accumulate]
        },
        "weights": {name: train(name, "128" if name == "fp16-master" else "none", peers) for name in EXACT},
    }
    checkpoint = folder / "checkpoint.pt"
    results["whole"] = run(training_spec(), peers, epochs=2)
    results["first"] = run(training_spec(), peers, 1, checkpoint)
    results["resumed"] = run(training_spec(), peers, 2, checkpoint)
    training_run._COMPARE_EVERY = 5
    hopeless = {"read_loss_every_step": True, "optimizer": Optimizer(name="SGD", arguments={"lr": 1e30})}
    results["hopeless"] = run(training_spec(samples_per_epoch=16 * 60, **hopeless), peers, 1)
    # A run that only one rank finds to have failed.
    training_run.why_diverged = lambda losses, steps: f"found by rank {peers.rank}" if peers.rank == 0 else None
    results["diverged"] = run(training_spec(), peers, 1)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of two ranks."""
    return answers_of(all_of_it, SPEC, tmp_path_factory.mktemp("ranks"))


# Two ranks


def test_broadcast_and_gather_objects(ranks: list[dict[str, Any]]) -> None:
    assert [rank["agreed"] for rank in ranks] == ["rank 0's"] * 2
    assert [rank["gathered"] for rank in ranks] == [[0, 1]] * 2
    assert all(rank["threads"] <= max(1, torch.get_num_threads() // 2) for rank in ranks), "ranks share the cores"


@pytest.mark.parametrize("precision", EXACT)
def test_two_ranks_equal_one_process(precision: str, ranks: list[dict[str, Any]]) -> None:
    alone = train(precision, "128" if precision == "fp16-master" else "none", Peers())
    # Half the batches are rounded apart: to 8 bits of mantissa, 11, or float32's 24.
    tolerance = {"fp32": 1e-5, "bf16-mixed": 2e-2, "fp16-master": 2e-3}[precision]
    for first, second, whole in zip(ranks[0]["weights"][precision], ranks[1]["weights"][precision], alone, strict=True):
        assert torch.equal(first, second)
        assert float((first - whole).norm() / whole.norm()) < tolerance


@pytest.mark.parametrize("accumulate", [1, 2])
def test_techniques_of_the_wrapper_change_no_more_than_rounding(accumulate: int, ranks: list[dict[str, Any]]) -> None:
    plain = torch.cat([each.flatten() for each in ranks[0]["wrapped"][(), accumulate]])
    for names in WRAPPED[accumulate][1:]:
        first, second = (torch.cat([each.flatten() for each in r["wrapped"][names, accumulate]]) for r in ranks)
        assert torch.equal(first, second), "ranks agree"
        error = float((first - plain).norm() / plain.norm())
        if "bf16-all-reduce" in names:
            assert 0 < error < 2**-8, "gradients are rounded to 8 bits, and weights change by a part of them"
        else:
            assert error < 1e-6, names


def test_looking_for_unused_parameters_has_a_range(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["looked"] == [True, False]


def test_the_weight_that_most_gradients_are_of_is_named() -> None:
    table = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 4))
    found = {"largest_weight": "0.weight", "largest_weight_layer": "Embedding", "largest_weight_bytes": 3200}
    assert _largest_weight(table) == found
    assert _largest_weight(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) == {}


def test_a_static_graph_does_not_fit_accumulation(ranks: list[dict[str, Any]]) -> None:
    assert "does not fit no_sync()" in ranks[0]["refused"]


def test_techniques_of_the_wrapper_reach_it(ranks: list[dict[str, Any]]) -> None:
    wrapper = ranks[0]["wrapper"]
    settings = ("gradient_as_bucket_view", "bucket_cap_bytes", "static_graph", "comm_hook")
    found = {name: [data.get(setting) or 0 for setting in settings] for name, data in wrapper.items()}
    usual, large = 25 * 2**20, 100 * 2**20
    assert found["ddp-bucket-view"] == [1, usual, 0, 0]
    assert found["ddp-buckets-100"] == [0, large, 0, 0]
    assert found["ddp-static-graph"] == [0, usual, 1, 0]
    assert found["bf16-all-reduce"][:3] == [0, usual, 0]
    assert "bf16" in found["bf16-all-reduce"][3]
    assert found["all"][:3] == [1, large, 1]


def test_overflow_in_one_rank_is_skipped_by_all(ranks: list[dict[str, Any]]) -> None:
    (skipped, scale, weights), (others_skipped, others_scale, others) = (rank["overflow"] for rank in ranks)
    assert (skipped, scale) == (others_skipped, others_scale) == (1, 2.0**15)
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
    assert all(tensor.isfinite().all() for tensor in weights)


def test_each_rank_trains_on_its_share(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert [epoch[:2] for epoch in rank["whole"]] == [(4, 32)] * 2, "64 samples, two ranks, batches of 8"
    assert ranks[0]["whole"][0][2] != ranks[1]["whole"][0][2]


def test_ranks_resume_from_checkpoint(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["first"] == rank["whole"][:1]
        assert rank["resumed"] == rank["whole"]


def test_ranks_stop_together_when_diverged(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ((num_steps, _, _, diverged),) = rank["hopeless"]
        assert num_steps % 5 == 0
        assert 20 <= num_steps < 60
        assert diverged is not None
    assert ranks[0]["hopeless"][0][0] == ranks[1]["hopeless"][0][0]


def test_rank_0_decides_divergence(ranks: list[dict[str, Any]]) -> None:
    assert [rank["diverged"][-1][3] for rank in ranks] == ["found by rank 0"] * 2


# One rank's part, without the other


class Numbers(SyntheticSamples):
    """Samples whose labels are their numbers."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1), index


class Rank(Peers):
    """A rank that asks nobody."""

    def __init__(self, rank: int, world_size: int = 2) -> None:
        self.rank, self.world_size = rank, world_size


@pytest.mark.parametrize(("drop_last", "lengths"), [(False, [4, 1]), (True, [4])])
def test_loaders_of_two_ranks_share_the_samples(drop_last: bool, lengths: list[int]) -> None:
    seen = []
    for rank in range(2):
        loader = make_loader(Numbers(9, 1), Loader(num_workers=0, drop_last=drop_last), 4, 0, Rank(rank))
        batches = [labels.tolist() for _, labels in loader]
        assert [len(batch) for batch in batches] == lengths
        assert len(loader) == len(lengths), "as many steps in each rank"
        seen += [label for batch in batches for label in batch]
    assert set(seen) == set(range(9)) if not drop_last else len(set(seen)) == 8


def test_loaders_of_two_ranks_draw_different_numbers() -> None:
    """Their processes do, which augment: a loader's generator lies on the CPU, on a GPU's machine too."""
    drawn = []
    for rank in range(2):
        loader = make_loader(SyntheticSamples(8, 4), Loader(num_workers=1), 4, 0, Rank(rank))
        drawn += [image for images, _ in loader for image in images]
    assert all(not one.equal(other) for one, other in combinations(drawn, 2))


def test_epoch_order_is_reproducible() -> None:
    source = load_batches(Numbers(32, 1), Loader(num_workers=0), 4, 0, torch.device("cpu"), Rank(0))
    first, second, again = ([labels.tolist() for _, labels in source.start(epoch)] for epoch in (0, 1, 0))
    assert source.num_batches == 4
    assert first == again != second


def test_ranks_read_other_columns_of_one_text() -> None:
    rows = torch.arange(12).view(2, 6)
    assert rank_columns(rows, Rank(0)).tolist() == [[0, 1, 2], [6, 7, 8]]
    assert rank_columns(rows, Rank(1)).tolist() == [[3, 4, 5], [9, 10, 11]]
    row = find_workload("lstm-lm")
    task = replace(build_task(row), make_batches=lambda count, size, *_: [(rows, rows.flatten() + 100)])
    spec = SPEC.model_copy(update={"workload": "lstm-lm", "batch_size": 3})
    ((tokens, targets),) = rank_batches(row, task, spec, 1, Rank(1))
    assert tokens.tolist() == [[3, 4, 5], [9, 10, 11]]
    assert targets.tolist() == [103, 104, 105, 109, 110, 111]


def test_images_are_each_rank_s_own() -> None:
    row = find_workload("mnist-cnn")
    (first, _), (second, _) = (rank_batches(row, build_task(row), SPEC, 1, Rank(rank))[0] for rank in range(2))
    assert first.shape == second.shape == (8, 1, 28, 28)
    assert not torch.equal(first, second)


# Processes of the orchestrator


@pytest.mark.parametrize("kind", ["steady", "training"])
def test_a_trial_of_two_gloo_ranks(kind: str) -> None:
    recipe = {"samples_per_epoch": 160, "max_steps": 3}
    spec = SPEC.model_copy(update={"protocol": TINY.model_copy(update={"profile_steps": 2})})
    if kind == "training":
        spec = training_spec(**recipe).model_copy(update={"protocol": TINY})
    (trial,) = TrialRunner(ForkserverEngine(), None, fake_environment(None), NullListener()).run([spec])
    assert trial.status == "ok", f"{trial.message}\n{trial.log}"
    first, second = trial.ranks
    assert trial.facts is not None
    assert trial.facts.num_parameters == 1_199_882
    if kind == "steady":
        assert [block.num_steps for block in first.blocks] == [block.num_steps for block in second.blocks]
        assert [block.loss for block in first.blocks] != [block.loss for block in second.blocks]
        assert trial.profile is not None
        found = trial.profile.communication
        assert found is not None
        assert (found.reduced_passes, len(found.rank_seconds), found.rank_seconds[0]) == (1, 2, found.seconds)
        assert all(each.compute_seconds > 0 and each.exposed_seconds for each in found.rank_steps)
        assert found.rank_steps[0].exposed_seconds == found.exposed_seconds
        assert trial.facts.join_seconds > 0
        assert (len(found.rank_steps), found.threads_per_rank) == (2, max(1, torch.get_num_threads() // 2))
        assert 0 < found.exposed_seconds <= found.seconds
        assert (found.collectives[0].kind, found.collectives[0].format) == ("all-reduce", "fp32")
        assert found.collectives[0].num_bytes == pytest.approx(4 * 1_199_882)
    else:
        assert [(e.num_steps, e.num_samples, e.shortened) for e in first.epochs + second.epochs] == [(3, 24, True)] * 4
