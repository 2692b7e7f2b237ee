"""Two GPUs that average buffers in each other's memory."""

from pathlib import Path

import pytest
import torch
from loops import IMAGES, spec_of
from ranks import answers_of

from castwise.measure.means import SymmetricMean, mean_over
from castwise.measure.parallel import Peers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

SIZES = [(300_001, torch.bfloat16), (7, torch.float32), (5_000, torch.float16)]
SEEDS = (0, 1)


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for numel, dtype in SIZES]


def means(peers: Peers, _: Path) -> list[list[torch.Tensor]]:
    """Return the means that a rank has: by themselves, and of a graph that is replayed."""
    device = torch.device(f"cuda:{peers.rank}")
    torch.cuda.set_device(device)
    mean = mean_over(peers, SIZES, device)
    if not isinstance(mean, SymmetricMean):
        return []
    shown = []

    def work() -> None:
        for buffer, own in zip(mean.buffers, given, strict=True):
            buffer.copy_(own)
        mean()

    given = [each.to(device) for each in values(peers.rank)]
    work()
    shown.append([buffer.cpu() for buffer in mean.buffers])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    for _ in range(50):
        for buffer in mean.buffers:
            buffer.zero_()
        graph.replay()
    shown.append([buffer.cpu() for buffer in mean.buffers])
    graph.reset()
    return shown


def test_every_rank_has_the_mean_rounded_once(tmp_path: Path) -> None:
    spec = spec_of(IMAGES, "fp32", device="cuda:0").model_copy(update={"world_size": 2, "parallelism": "ddp"})
    ranks = answers_of(means, spec, tmp_path)
    assert all(ranks), "H200s of a host see each other's memory"
    both = zip(*(values(seed) for seed in SEEDS), strict=True)
    expected = [torch.stack([each.float() for each in pair]).mean(0).to(pair[0].dtype) for pair in both]
    for found in (shown for rank in ranks for shown in rank):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
