"""Two GPUs that average buffers in each other's memory."""

from pathlib import Path

import pytest
import torch
from loops import IMAGES, spec_of
from ranks import answers_of

from castwise.measure.means import SymmetricMean, mean_over
from castwise.measure.parallel import Peers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

GROUPS = {
    torch.bfloat16: [(64, 3, 7, 7), (300_001,), (), (512, 256, 1, 1), (0,), (4096,)],
    torch.float32: [(7,), (2049,)],
    torch.float16: [(5_000,)] * 70,
}
SEEDS = (0, 1)


def values(seed: int) -> list[list[torch.Tensor]]:
    """Return a rank's tensors, images' filters with channels innermost."""
    generator = torch.Generator().manual_seed(seed)
    made = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for dtype, shapes in GROUPS.items()]
    return [[each.to(memory_format=torch.channels_last) if each.ndim == 4 else each for each in one] for one in made]


def means(peers: Peers, _: Path) -> list[list[torch.Tensor]]:
    """Return the means that a rank has: by themselves, and of a graph that is replayed."""
    device = torch.device(f"cuda:{peers.rank}")
    torch.cuda.set_device(device)
    given = [[each.to(device) for each in group] for group in values(peers.rank)]
    mean = mean_over(peers, given)
    if not isinstance(mean, SymmetricMean):
        return []
    shown = []

    def look() -> None:
        shown.append([place.clone().cpu() for places in mean.places for place in places])
        for places in mean.places:
            for place in places:
                place.zero_()
        torch.cuda.synchronize()
        peers.barrier()  # nobody writes into what is being cleared

    mean(given)
    look()
    moved = [[each.clone() for each in group] for group in given]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        mean(moved)
    for _ in range(50):
        graph.replay()
    look()
    unlike = [[each.contiguous() for each in group] for group in given]  # other addresses, and another order
    for group in moved:
        for each in group:
            each.fill_(float("nan"))
    mean(unlike)
    look()
    graph.reset()
    return shown


def test_every_rank_has_the_mean_rounded_once(tmp_path: Path) -> None:
    spec = spec_of(IMAGES, "fp32", device="cuda:0").model_copy(update={"world_size": 2, "parallelism": "ddp"})
    ranks = answers_of(means, spec, tmp_path)
    assert all(ranks), "H200s of a host see each other's memory"
    both = zip(*([each for group in values(seed) for each in group] for seed in SEEDS), strict=True)
    expected = [torch.stack([each.float() for each in pair]).mean(0).to(pair[0].dtype) for pair in both]
    assert [len(rank) for rank in ranks] == [3, 3]
    for found in (shown for rank in ranks for shown in rank):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
