"""Two GPUs that average buffers in each other's memory."""

from pathlib import Path

import torch
from loops import IMAGES, spec_of
from ranks import answers_of
from real_gpu import on_gpus

from castwise.trial.distributed import Peers
from castwise.trial.kernels.allreduce.reducer import SymmetricMean, make_allreducer

pytestmark = on_gpus(2)

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


Tensors = list[list[torch.Tensor]]


def captured(mean: SymmetricMean, given: Tensors) -> tuple[list[torch.Tensor], list[torch.cuda.CUDAGraph]]:
    """Return two graphs of the mean of the same values elsewhere, of which the second has to copy, and those values."""
    others, graphs = [], []
    for order in (torch.preserve_format, torch.contiguous_format):
        other = [[each.clone(memory_format=order) for each in group] for group in given]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            mean(other)
        others += [each for group in other for each in group]
        graphs.append(graph)
    return others, graphs


def means(peers: Peers, _: Path) -> list[list[torch.Tensor]]:
    """Return the means that a rank has: by themselves, and of a graph that is replayed."""
    device = torch.device(f"cuda:{peers.rank}")
    torch.cuda.set_device(device)
    given = [[each.to(device) for each in group] for group in values(peers.rank)]
    mean = make_allreducer(peers, given)
    if not isinstance(mean, SymmetricMean):
        return []
    shown = []

    def look() -> None:
        shown.append([place.clone().cpu() for places in mean.outputs for place in places])
        for places in mean.outputs:
            for place in places:
                place.zero_()
        torch.cuda.synchronize()
        peers.barrier()  # nobody writes into what is being cleared

    mean(given)
    look()
    others, graphs = captured(mean, given)
    for graph in (*graphs, *graphs):
        for _ in range(20):
            graph.replay()
        look()
        mean(given)
        look()
    for each in others:
        each.fill_(float("nan"))
    mean(given)
    mean(mean.outputs)  # their own means
    look()
    if peers.rank:
        given[0][1][-1] = float("inf")
    mean(given)
    assert mean.outputs[0][1][-1].isinf(), "an overflow in one rank is one in all"
    for graph in graphs:
        graph.reset()
    return shown


def test_every_rank_has_the_mean_rounded_once(tmp_path: Path) -> None:
    spec = spec_of(IMAGES, "fp32", device="cuda:0").model_copy(update={"world_size": 2, "parallelism": "ddp"})
    ranks = answers_of(means, spec, tmp_path)
    assert all(ranks), "H200s of a host see each other's memory"
    both = zip(*([each for group in values(seed) for each in group] for seed in SEEDS), strict=True)
    expected = [torch.stack([each.float() for each in pair]).mean(0).to(pair[0].dtype) for pair in both]
    assert [len(rank) for rank in ranks] == [10, 10]
    for found in (shown for rank in ranks for shown in rank):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
