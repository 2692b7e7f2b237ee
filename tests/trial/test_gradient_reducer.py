"""Gradients averaged at once after backward: two ranks compared with DistributedDataParallel, and one rank alone."""

import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import fake_environment
from fake_graphs import FakeCaptures
from loops import IMAGES, WORDS, losses_of, small, spec_of
from ranks import answers_of
from small_step import CPU, MOMENTUM_SGD, make_batch, make_net, make_step, make_task
from torch import Tensor, nn
from torch.optim import SGD
from traced import trace_only

from castwise.apply.techniques.cuda_graph import StepGraph
from castwise.errors import UsageError
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.runner import NullListener, TrialRunner
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import step_config_of
from castwise.spec.recipe import Loader, Recipe
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.trial import build
from castwise.trial.build import build_trial
from castwise.trial.data import datasets
from castwise.trial.distributed import Peers, spread
from castwise.trial.kernels.allreduce.gradient_reducer import CoalescedReduce
from castwise.trial.models.task import UserLoop
from castwise.trial.step import TrainingStep
from castwise.trial.training_run import TrainingRun

pytestmark = pytest.mark.xdist_group("gradient reducer")  # one process sets `ranks` up
REDUCE = "coalesced-reduce"
NUM_STEPS, SPOILT = 20, 7
# Precision, loss scale and techniques of the small network.
STEPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("fp32", "none", ()),
    ("fp32", "none", ("channels-last", "foreach-optimizer")),
    ("bf16-mixed", "none", ("channels-last",)),
    ("bf16-master", "none", ("channels-last",)),
    ("fp16-master", "128", ()),
    ("fp16-true", "128", ()),
    ("fp16-master", "dynamic", ()),
    ("fp16-mixed", "dynamic", ()),
    ("fp16-mixed", "dynamic", ("no-step-sync",)),
    ("fp16-mixed", "dynamic", ("fused-optimizer",)),
)


def on_two(workload: str, *names: str) -> TrialSpec:
    return spec_of(workload, "fp32", *names).model_copy(update={"world_size": 2, "parallelism": "ddp"})


SPEC = on_two(IMAGES)


# What runs in each rank


def joined(step: TrainingStep, peers: Peers, *, reduce: bool) -> TrainingStep:
    if reduce:
        step.average_gradients(peers)
    else:
        step.spread(lambda model: spread(model, SPEC))
    return step


def take_steps(peers: Peers, precision: str, loss_scale: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return losses and weights of steps on a rank's own batches; if the scale is dynamic, one of rank 1 overflows."""
    row, loop = find_precision(precision), step_config_of(names)
    torch.manual_seed(0)
    optimizer = type(MOMENTUM_SGD)("SGD", (*MOMENTUM_SGD.arguments, *loop.optimizer_arguments))
    step = make_step(row, make_task(make_net()), optimizer, loss_scale=loss_scale, clip_grad_norm=1.0, loop=loop)
    joined(step, peers, reduce=REDUCE in names)
    images, labels = (part.chunk(2)[peers.rank] for part in make_batch())
    losses = []
    for index in range(NUM_STEPS):
        spoilt = index == SPOILT and peers.rank == 1 and loss_scale == "dynamic"
        losses.append(float(step((images * (math.inf if spoilt else 1.0), labels))))
    return {
        "losses": losses,
        "weights": [parameter.detach() for parameter in step.model.parameters()],
        "skipped": step.scaling.skipped_steps,
        "scale": step.scaling.read_scale(),
    }


def accumulated(peers: Peers, *, reduce: bool) -> list[Tensor]:
    """Return the weights after steps of two batches each."""
    task = make_task(make_net())
    task.user_loop = UserLoop(lambda weights: SGD(weights.stepped, lr=0.1), lambda _: lambda: None, accumulate=2)
    row = find_precision("fp32")
    step = TrainingStep(task, row, MOMENTUM_SGD, loss_scale="none", clip_grad_norm=0.5, device=CPU)
    joined(step, peers, reduce=reduce)
    images, labels = (part.chunk(2)[peers.rank] for part in make_batch())
    for turn in range(5):
        step([(images.roll(turn, 0), labels), (images + turn, labels)])  # type: ignore[arg-type]
    return [parameter.detach() for parameter in step.model.parameters()]


def begun_otherwise(peers: Peers) -> list[Tensor]:
    """Return the tensors that a rank begins with, if its model was initialised differently from the other's."""
    net = make_net(seed=peers.rank)
    assert net.norm.running_mean is not None
    net.norm.running_mean.fill_(float(peers.rank))
    step = joined(make_step(find_precision("bf16-master"), make_task(net)), peers, reduce=True)
    return [tensor.detach().clone() for tensor in (*net.parameters(), *net.buffers(), *step._weights.stepped)]


def unlike_gradients(peers: Peers) -> list[str]:
    """Return the errors of a rank if only one rank has a gradient of a weight."""
    errors = []
    for other in range(2):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        reduce = CoalescedReduce(model, peers)
        model[0](torch.ones(1, 2)).sum().backward()
        if peers.rank == other:
            model[1](torch.ones(1, 2)).sum().backward()
        with pytest.raises(UsageError) as caught:
            reduce()
        errors.append(str(caught.value))
    return errors


def run(peers: Peers, checkpoint: Path | None, epochs: int) -> list[Any]:
    """Return the steps, the losses and the validation loss of a run's epochs."""
    build.find_workload = small  # type: ignore[attr-defined]
    datasets.NUM_IMAGES["cifar10"] = (64, 8)
    recipe = Recipe(
        epochs=2,
        max_steps=9,  # more than there are; random labels are no divergence then
        loader=Loader(num_workers=0),
        validate_each_epoch=True,
        validation_workers=0,
    )
    fields = {"kind": "training", "recipe": recipe, "data_set": "synthetic:cifar10"}
    spec = TrialSpec.model_validate(on_two(IMAGES, REDUCE).model_dump() | fields)
    training = TrainingRun(spec, None, checkpoint, peers)
    while len(training.epochs) < epochs:
        training.run_epoch()
    training.close()
    return [(epoch.num_steps, epoch.losses, epoch.validation_loss) for epoch in training.epochs]


def compiled(peers: Peers) -> list[list[float]]:
    """Return the losses of steps that are compiled, and of steps that are not."""
    trace_only()
    return [
        take_steps(peers, "fp16-master", "dynamic", names)["losses"]
        for names in (("compile", "compiled-update", REDUCE), ("no-step-sync", REDUCE))
    ]


def all_of_it(peers: Peers, folder: Path) -> dict[str, Any]:
    """Return all results of a rank, of one process so that torch is imported once."""
    both = ((), (REDUCE,))
    return {
        "steps": [[take_steps(peers, *case, (*names, *more)) for more in both] for *case, names in STEPS],
        "words": [losses_of(on_two(WORDS, *more), NUM_STEPS, peers) for more in both],
        "accumulated": [accumulated(peers, reduce=reduce) for reduce in (False, True)],
        "begun": begun_otherwise(peers),
        "unlike": unlike_gradients(peers),
        "compiled": compiled(peers),
        "whole": run(peers, None, 2),
        "first": run(peers, folder / "checkpoint.pt", 1),
        "resumed": run(peers, folder / "checkpoint.pt", 2),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of two ranks."""
    return answers_of(all_of_it, SPEC, tmp_path_factory.mktemp("ranks"))


# Two ranks


@pytest.mark.parametrize("number", range(len(STEPS)), ids=["-".join((*case[:2], *case[2])) for case in STEPS])
@pytest.mark.slow
def test_20_steps_equal_distributed_data_parallel(number: int, ranks: list[dict[str, Any]]) -> None:
    precision, loss_scale, _ = STEPS[number]
    rounding = torch.finfo(torch.float32 if precision == "fp32" else torch.float16).eps
    for rank in ranks:
        wrapped, reduced = rank["steps"][number]
        losses, expected = (torch.tensor(each["losses"]) for each in (reduced, wrapped))
        is_whole = expected.isfinite()
        assert is_whole.sum() >= NUM_STEPS - 1
        assert (losses - expected)[is_whole].abs().max() < rounding
        assert losses[-1] < losses[0]
        assert (reduced["skipped"], reduced["scale"]) == (wrapped["skipped"], wrapped["scale"])
        assert reduced["skipped"] == (1 if loss_scale == "dynamic" else 0)
    (_, one), (_, other) = (rank["steps"][number] for rank in ranks)
    assert one["losses"] != other["losses"], "each has its own data"
    assert all(torch.equal(*pair) for pair in zip(one["weights"], other["weights"], strict=True))


@pytest.mark.slow
def test_language_model_equals_distributed_data_parallel(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        wrapped, reduced = rank["words"]
        assert ((reduced - wrapped) / wrapped).abs().max() < 1e-6


@pytest.mark.slow
def test_accumulated_gradients(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for wrapped, reduced in zip(*rank["accumulated"], strict=True):
            assert (reduced - wrapped).abs().max() < 1e-6
    assert all(torch.equal(*pair) for pair in zip(*(rank["accumulated"][1] for rank in ranks), strict=True))


@pytest.mark.slow
def test_ranks_begin_with_the_model_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    net = make_net(seed=0)
    for one, other in zip(*(rank["begun"] for rank in ranks), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(ranks[1]["begun"][0], net.conv.weight.detach().bfloat16())


@pytest.mark.slow
def test_gradients_of_some_ranks_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for error, number in zip(rank["unlike"], (1, 0), strict=True):
            assert f"a gradient of 1.weight in some ranks, and in others, such as rank {number}, none" in error


@pytest.mark.slow
def test_compiled_steps(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        losses, plain = (torch.tensor(each) for each in rank["compiled"])
        assert (losses - plain)[plain.isfinite()].abs().max() < 20 * torch.finfo(torch.float16).eps


@pytest.mark.slow
def test_validation_and_resuming(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["whole"] for rank in ranks)
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0] == 8  # steps
        assert one[1] != other[1], "each trains on its share"
        assert one[2] == other[2] is not None
    for rank in ranks:
        assert rank["first"] == rank["whole"][:1]
        assert rank["resumed"] == rank["whole"]


# One rank's part, without the other


class Halving(Peers):
    """A rank whose peer has gradients of zeros."""

    def all_reduce_mean(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        tensor.mul_(0.5)


def odd_model() -> nn.Module:
    """Return weights of several dtypes: channels last, 0-dimensional, transposed, with gaps, overlapping, empty."""
    whole = torch.zeros(6, 8)
    return nn.ParameterList(
        [
            nn.Parameter(torch.zeros(4, 3, 3, 3).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.zeros(())),
            nn.Parameter(whole.t()),
            nn.Parameter(whole[:, ::2]),
            nn.Parameter(torch.zeros(5, 1, 1, 7, dtype=torch.bfloat16).permute(3, 1, 2, 0)),
            nn.Parameter(torch.zeros(3, dtype=torch.float64)),
            nn.Parameter(torch.zeros(0, 2)),
            nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)),
            nn.Parameter(torch.zeros(2, dtype=torch.float16)),
        ]
    )


def odd_values(rank: int) -> list[Tensor]:
    """Return gradients for them, some in layouts that autograd would not give them."""
    generator = torch.Generator().manual_seed(5 + rank)
    values = [
        torch.randint(-64, 64, weight.shape, generator=generator).to(weight.dtype)
        for weight in odd_model().parameters()
    ]
    values[0] = values[0].to(memory_format=torch.channels_last)
    values[2] = values[2].t().contiguous().t()
    values[3] = values[3][:1].expand(6, 4)
    values[-1].fill_(60_000.0)  # whose sum float16 does not hold
    return values


def gradient_of(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def test_gradients_of_any_dtype_and_layout() -> None:
    model = odd_model()
    weights = list(model.parameters())
    for weight, value in zip(weights, odd_values(0), strict=True):
        weight.grad = value
    CoalescedReduce(model, Halving())()
    for weight, value in zip(weights, odd_values(0), strict=True):
        assert torch.equal(gradient_of(weight), value / 2)
        gradient = gradient_of(weight)
        assert gradient.storage_offset() * gradient.element_size() % 128 == 0
    for number in (0, 2, 4):
        assert gradient_of(weights[number]).stride() == weights[number].stride()
    assert gradient_of(weights[0]).is_contiguous(memory_format=torch.channels_last)
    storages = {weight.dtype: gradient_of(weight).untyped_storage().data_ptr() for weight in weights}
    assert all(gradient_of(weight).untyped_storage().data_ptr() == storages[weight.dtype] for weight in weights)
    assert len(set(storages.values())) == len(storages) == 4, "a collective a dtype"


def test_untrained_weight_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    reduce = CoalescedReduce(model, Halving())
    for _ in range(2):
        model.zero_grad()
        model[0](torch.ones(1, 2)).sum().backward()
        reduce()
        assert gradient_of(model[0].weight).tolist() == [[0.5, 0.5], [0.5, 0.5]]
        assert all(weight.grad is None for part in model[1:] for weight in part.parameters())


def test_weight_trained_in_some_steps_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    reduce = CoalescedReduce(model, Halving())
    model(torch.ones(1, 2)).sum().backward()
    reduce()
    model[1].requires_grad_(True)
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match=r"1\.weight has a gradient in some steps only"):
        reduce()


def test_sparse_gradient_is_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="cannot average the sparse gradient of weight"):
        CoalescedReduce(model, Halving())()


REFUSED_BUFFER = pytest.raises(UsageError, match="Counting writes its buffer teacher as it trains")


class Counting(nn.Module):
    """A layer with a constant buffer, and with a buffer that forward may write or replace."""

    def __init__(self, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.linear, self.norm, self._change = nn.Linear(2, 2), nn.BatchNorm1d(2), change
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("teacher", torch.zeros(2))

    def forward(self, values: Tensor) -> Tensor:
        self._change(self)
        return self.norm(self.linear(values)) * self.mask  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "expectation"),
    [
        (lambda _: None, nullcontext()),
        (lambda layer: layer.teacher.add_(1), REFUSED_BUFFER),
        (lambda layer: setattr(layer, "teacher", layer.teacher + 1), REFUSED_BUFFER),
    ],
    ids=["constant", "written", "replaced"],
)
def test_model_that_writes_buffers_is_refused(change: Callable[[Any], object], expectation: Any) -> None:
    model = Counting(change)
    reduce = CoalescedReduce(model, Halving())
    model(torch.randn(4, 2)).square().sum().backward()
    reduce()
    model(torch.randn(4, 2)).square().sum().backward()
    with expectation:
        reduce()


def test_graph_is_released_at_the_end() -> None:
    captures = FakeCaptures()
    with ExitStack() as stack:
        setup = build_trial(on_two("mnist-cnn", REDUCE), stack, Halving())
        setup.step.graph = StepGraph(setup.step._train, CPU, None, captures=captures)  # type: ignore[arg-type]
        batch = torch.randn(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
        losses = [setup.step.graph(batch) for _ in range(6)]
        assert (captures.num_aside, captures.num_captured, len(captures.launches)) == (3, 1, 3)
        assert len({float(loss.detach()) for loss in losses}) == 6
    assert captures.num_captured == 0


# A trial's processes


@pytest.mark.slow
def test_trial_of_two_gloo_ranks() -> None:
    protocol = MeasurementProtocol(
        warm_up_steps=1, warm_up_seconds=0.05, block_seconds=0.01, num_blocks=3, max_seconds=1.0
    )
    fields = {"workload": "mnist-cnn", "batch_size": 8, "protocol": protocol, "techniques": (REDUCE,)}
    spec = SPEC.model_copy(update=fields)
    (trial,) = TrialRunner(ForkserverEngine(), None, fake_environment(None), NullListener()).run([spec])
    assert trial.status == "ok", f"{trial.message}\n{trial.log}"
    assert trial.facts is not None
    assert trial.facts.averaged_by == "collectives", "gloo's"
    first, second = trial.ranks
    assert [block.num_steps for block in first.blocks] == [block.num_steps for block in second.blocks]
    assert [block.loss for block in first.blocks] != [block.loss for block in second.blocks]
