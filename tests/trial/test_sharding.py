"""Weights that FSDP2 shards: two ranks compared with DistributedDataParallel's."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import fake_environment
from loops import ADADELTA, IMAGES, TOKENS, WORDS, setup_of, spec_of
from ranks import answers_of
from small_step import CPU, MOMENTUM_SGD, make_batch, make_net, make_task
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torch.profiler import ProfilerActivity
from traced import trace_only

from castwise.apply.pytree import Batch, tree_tensors
from castwise.errors import TechniqueError, UsageError
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.runner import NullListener, TrialRunner
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import step_config_of
from castwise.registry.workloads import OptimizerSpec
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.spec.types import Parallelism
from castwise.trial.distributed import Peers, shard, spread
from castwise.trial.flops import count_flops
from castwise.trial.models.task import Task, UserLoop
from castwise.trial.step import TrainingStep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("sharding"),  # one process sets `ranks` up
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"), reason="this torch cannot shard on a CPU"
    ),
]
NUM_STEPS = 5
WAYS: tuple[Parallelism, ...] = ("ddp", "fsdp")
# Workload, precision and techniques; rounding to 16 bits makes another order of sums visible.
CASES: dict[tuple[str, str, tuple[str, ...]], float] = {
    (TOKENS, "fp32", ()): 1e-5,
    (TOKENS, "fp32", ("foreach-optimizer", "pad-vocabulary", "chunked-loss", "activation-checkpointing")): 1e-5,
    (TOKENS, "fp32", ("fused-optimizer", "selective-checkpointing")): 1e-5,
    (TOKENS, "fp32", ("fsdp-keep-weights",)): 1e-5,
    (TOKENS, "bf16-mixed", ()): 5e-4,
    (TOKENS, "fp16-mixed", ("fused-optimizer",)): 5e-4,
    (WORDS, "fp32", ()): 1e-5,
    (IMAGES, "fp32", ()): 1e-5,
}
COMPILED = [(TOKENS, "fp32", ("compile",)), (TOKENS, "fp32", ("compile-blocks",))]
SCALINGS: tuple[tuple[str, ...], ...] = ((), ("no-step-sync",), ("fused-optimizer",))


def on_two(way: Parallelism, workload: str = TOKENS, precision: str = "fp32", names: tuple[str, ...] = ()) -> TrialSpec:
    return spec_of(workload, precision, *names).model_copy(update={"world_size": 2, "parallelism": way})


# What runs in each rank


def whole(tensors: Any) -> list[Tensor]:
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in tensors]


def num_bytes(tensors: Any) -> int:
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def num_gathers(run: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("c10d::_allgather"))


def train(peers: Peers, spec: TrialSpec) -> dict[str, Any]:
    with setup_of(spec, peers) as (setup, batches):
        step = setup.step
        model, parameters = step.model, list(step.model.parameters())
        start = whole(parameters)
        losses = [step(batches[index % len(batches)]).item() for index in range(NUM_STEPS)]
        changes = [end - before for end, before in zip(whole(parameters), start, strict=True)]
        return {
            "losses": losses,
            "change": torch.cat([change.flatten() for change in changes]),
            "bytes": [num_bytes(parameters), num_bytes(tree_tensors(list(step.optimizer.state.values())))],
            "flops": count_flops(spec, step, setup.task, batches),
            "dtypes": {each.dtype for each in parameters},
            "tied": model.head.weight is model.tokens.weight if spec.workload == TOKENS else None,
            "gathers": num_gathers(lambda: step(batches[0])),
            "parts": sum(isinstance(part, FSDPModule) for part in model.modules()),
        }


def make(
    peers: Peers, way: Parallelism, task: Task, optimizer: OptimizerSpec = MOMENTUM_SGD, **how: Any
) -> TrainingStep:
    """Return a step of a small model in two ranks."""
    settings = {"loss_scale": "none", "precision": "fp32", "names": (), "clip_grad_norm": 1.0} | how
    loop = step_config_of(settings.pop("names"))
    optimizer = OptimizerSpec(optimizer.name, (*optimizer.arguments, *loop.optimizer_arguments))
    row, settings["loop"] = find_precision(settings.pop("precision")), loop
    sharded = partial(shard, peers=peers) if way == "fsdp" else None
    step = TrainingStep(task, row, optimizer, device=CPU, shard=sharded, **settings)
    step.spread(lambda model: spread(model, on_two(way)))
    return step


def overflow_in_one_shard(
    peers: Peers, way: Parallelism, names: tuple[str, ...]
) -> tuple[int, float | None, list[Tensor]]:
    """Take three steps; in the second the gradient of the last row overflows, which is rank 1's to step."""
    torch.manual_seed(0)
    factor = 0.0

    def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
        output = model(batch[0]).float()
        return nn.functional.cross_entropy(output, batch[1]) + (output[:, 9] * factor).sum()

    task = make_task(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)), compute_loss)
    adam = OptimizerSpec("Adam", (("lr", 0.01),))
    step = make(peers, way, task, adam, precision="fp16-mixed", loss_scale="dynamic", names=names)
    for each in (0.0, 1e38, 0.0):
        factor = each
        step(make_batch())
    return step.scaling.skipped_steps, step.scaling.read_scale(), whole(step.model.parameters())


def with_own_optimizer(peers: Peers, way: Parallelism) -> list[Tensor]:
    """Return the weights after steps of two batches each, by an optimizer that was made of whole weights."""
    net = make_net(seed=peers.rank)  # rank 0's are taken
    net.conv.weight.requires_grad_(False)
    optimizer = SGD([{"params": net.linear.parameters(), "lr": 0.2}, {"params": net.norm.parameters()}], lr=0.1)

    def own(weights: Any) -> SGD:
        weights.adopt(optimizer)
        return optimizer

    task = make_task(net)
    task.user_loop = UserLoop(own, None, accumulate=2)
    step = make(peers, way, task)
    images, labels = (part.chunk(2)[peers.rank] for part in make_batch())
    for turn in range(NUM_STEPS):
        step([(images.roll(turn, 0), labels), (images + turn, labels)])  # type: ignore[arg-type]
    return whole(step.model.parameters())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def tied_to_a_block(peers: Peers) -> tuple[list[bool], bool]:
    """Return which of two blocks are sharded by themselves, and whether the second's weight is still tied."""
    first, second, head = Block(), Block(), nn.Linear(4, 4)
    head.weight = second.linear.weight
    shard(nn.Sequential(first, second, head), peers)
    return [isinstance(each, FSDPModule) for each in (first, second)], head.weight is second.linear.weight


def refused(work: Callable[[], object]) -> str:
    try:
        work()
    except (TechniqueError, UsageError) as error:
        return str(error)
    return ""


def has_stepped(peers: Peers) -> None:
    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(make_batch()[0]).sum().backward()
    optimizer.step()
    task = make_task(net)
    task.user_loop = UserLoop(lambda weights: weights.adopt(optimizer), None)
    make(peers, "fsdp", task)


def all_of_it(peers: Peers, _: Path) -> dict[str, Any]:
    """Return the results of a rank, all in one process so that torch is imported once."""
    return {
        "cases": {case: [train(peers, on_two(way, *case)) for way in WAYS] for case in CASES},
        "overflow": {names: [overflow_in_one_shard(peers, way, names) for way in WAYS] for names in SCALINGS},
        "own": [with_own_optimizer(peers, way) for way in WAYS],
        "tied": tied_to_a_block(peers),
        "fused SGD": refused(lambda: make(peers, "fsdp", make_task(make_net()), names=("fused-optimizer",))),
        "has stepped": refused(lambda: has_stepped(peers)),
    }


def compiled(peers: Peers, _: Path) -> dict[str, Any]:
    trace_only()
    return {"cases": {case: [train(peers, on_two(way, *case)) for way in WAYS] for case in COMPILED}}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of two ranks."""
    return answers_of(all_of_it, on_two("fsdp"), tmp_path_factory.mktemp("ranks"))


# Two ranks


def check(ranks: list[dict[str, Any]], case: tuple[str, str, tuple[str, ...]], tolerance: float) -> None:
    for rank in ranks:
        ddp, fsdp = rank["cases"][case]
        assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=tolerance)
        # Adam takes whole steps by gradients that are nothing but rounding, as those of keys' biases are.
        assert float((fsdp["change"] - ddp["change"]).norm() / ddp["change"].norm()) < 100 * tolerance
        assert (fsdp["tied"], fsdp["dtypes"]) == (ddp["tied"], {torch.float32})
        assert fsdp["parts"] == (3 if case[0] == TOKENS else fsdp["parts"]), "two blocks, and the rest"
        assert fsdp["flops"].products == ddp["flops"].products != {}
        sizes = [(*way["bytes"], way["flops"].update_bytes) for way in (fsdp, ddp)]
        for ours, theirs in zip(*sizes, strict=True):
            assert ours == pytest.approx(theirs / 2, rel=0.05)


def test_whole_weights_are_gathered_once_a_step(ranks: list[dict[str, Any]]) -> None:
    plain, kept = (ranks[0]["cases"][TOKENS, "fp32", names][1] for names in ((), ("fsdp-keep-weights",)))
    assert plain["gathers"] > kept["gathers"] == kept["parts"]


@pytest.mark.parametrize(("case", "tolerance"), CASES.items(), ids=str)
def test_losses_and_weights_equal_ddps_and_a_rank_holds_half(
    case: tuple[str, str, tuple[str, ...]], tolerance: float, ranks: list[dict[str, Any]]
) -> None:
    check(ranks, case, tolerance)


def test_compiled_losses_and_weights_equal_ddps(tmp_path: Path) -> None:
    results = answers_of(compiled, on_two("fsdp"), tmp_path)
    for case in COMPILED:
        check(results, case, 1e-5)


@pytest.mark.parametrize("names", SCALINGS, ids="+".join)
def test_overflow_in_one_shard_is_skipped_by_all(names: tuple[str, ...], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (skipped, scale, ddps), (skipped_here, scale_here, weights) = rank["overflow"][names]
        assert (skipped_here, scale_here) == (skipped, scale) == (1, 2.0**15)
        for ours, theirs in zip(weights, ddps, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_optimizer_of_whole_weights_steps_shards(ranks: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(*reversed(ranks[1]["own"]), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_block_tied_to_another_part_is_sharded_with_it(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["tied"] == ([True, False], True)


def test_what_cannot_be_sharded_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert "no fused SGD for sharded weights" in ranks[0]["fused SGD"]
    assert "an optimizer that has stepped already" in ranks[0]["has stepped"]


def test_a_trial_of_two_gloo_ranks() -> None:
    protocol = MeasurementProtocol(warm_up_steps=1, warm_up_seconds=0.05, num_blocks=2, min_blocks=1, max_seconds=1.0)
    spec = on_two("fsdp", ADADELTA).model_copy(update={"protocol": protocol})
    (trial,) = TrialRunner(ForkserverEngine(), None, fake_environment(None), NullListener()).run([spec])
    assert trial.status == "ok", f"{trial.message}\n{trial.log}"
    assert trial.facts is not None
    assert trial.facts.num_parameters == 1_199_882
    assert [len(rank.blocks) > 0 and rank.peak_allocated_bytes is not None for rank in trial.ranks] == [True] * 2
