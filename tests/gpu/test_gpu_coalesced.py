"""Two GPUs that average all gradients at once, in CUDA graphs, compared with DistributedDataParallel."""

from pathlib import Path

import torch
from loops import IMAGES, WORDS, losses_of, setup_of, spec_of
from ranks import answers_of
from real_gpu import on_gpus
from torch import Tensor

from castwise.registry.technique_fit import why_unsupported
from castwise.registry.techniques import join
from castwise.spec.trial import TrialSpec
from castwise.trial.distributed import Peers

pytestmark = on_gpus(2)

# Both as tests/gpu/test_gpu_techniques.py has them.
BOUNDS = {"fp32": 2000 * 2.0**-23, "bf16-mixed": 0.5 * 2.0**-7, "fp16-mixed": 2.0**-10, "bf16-master": 2.0**-7}
NUM_STEPS = 20
CASES = [
    (IMAGES, "fp32", ("coalesced-reduce",)),
    (IMAGES, "fp32", ("channels-last", "coalesced-reduce", "cuda-graph")),
    (IMAGES, "bf16-mixed", ("channels-last", "fused-optimizer", "compile", "coalesced-reduce", "cuda-graph")),
    (IMAGES, "bf16-master", ("channels-last", "compiled-update", "compile", "coalesced-reduce", "cuda-graph")),
    (IMAGES, "fp16-mixed", ("fused-optimizer", "coalesced-reduce", "cuda-graph-8")),
    (WORDS, "fp16-mixed", ("fused-optimizer", "coalesced-reduce", "cuda-graph")),
]


def on_two(workload: str, precision: str, *names: str) -> TrialSpec:
    spec = spec_of(workload, precision, *names, device="cuda:0")
    return spec.model_copy(update={"world_size": 2, "parallelism": "ddp"})


def on_device(spec: TrialSpec, peers: Peers) -> TrialSpec:
    return spec.model_copy(update={"device": f"cuda:{peers.rank}"})


def losses(peers: Peers, _: Path) -> list[tuple[Tensor, Tensor]]:
    """Return each case's losses under DistributedDataParallel in the plain loop, and with its techniques."""
    torch.cuda.set_device(peers.rank)
    found = []
    for *case, names in CASES:
        plain, other = (on_device(on_two(*case, *each), peers) for each in ((), names))
        found.append((losses_of(plain, NUM_STEPS, peers), losses_of(other, NUM_STEPS, peers)))
    return found


def captures(peers: Peers, _: Path) -> list[tuple[bool, list[Tensor]]]:
    """Return whether steps were captured before and after the fourth, with the weights of each rank."""
    torch.cuda.set_device(peers.rank)
    shown = []
    spec = on_device(on_two(IMAGES, "fp32", "coalesced-reduce", "cuda-graph"), peers)
    with setup_of(spec, peers) as (setup, batches):
        for index in range(NUM_STEPS):
            setup.step(batches[index % len(batches)])
            assert setup.step.averaged_by == "shared memory"
            if index in (2, NUM_STEPS - 1):
                assert setup.step.graph is not None
                weights = [weight.detach().cpu() for weight in setup.step.model.parameters()]
                shown.append((setup.step.graph.captures.seconds is not None, weights))
    return shown


def test_the_losses_of_20_steps_are_distributed_data_parallel_s(tmp_path: Path) -> None:
    for *case, names in CASES:
        assert why_unsupported(on_two(*case, *names)) is None
    ranks = answers_of(losses, on_two(IMAGES, "fp32"), tmp_path)
    for rank in ranks:
        for (_, precision, names), (wrapped, found) in zip(CASES, rank, strict=True):
            assert found.isfinite().all()
            assert ((found - wrapped) / wrapped).abs().max() < BOUNDS[precision], join(names)
    assert not torch.equal(ranks[0][0][1], ranks[1][0][1]), "each has its own data"


def test_all_ranks_capture_the_collective_and_their_weights_stay_alike(tmp_path: Path) -> None:
    first, second = answers_of(captures, on_two(IMAGES, "fp32"), tmp_path)
    assert [is_captured for is_captured, _ in first] == [is_captured for is_captured, _ in second] == [False, True]
    for (_, weights), (_, others) in zip(first, second, strict=True):
        assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))
    assert not torch.equal(first[0][1][0], first[1][1][0]), "replays train"
