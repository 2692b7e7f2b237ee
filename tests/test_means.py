"""Buffers whose mean ranks take: which way they agree on, the kernel of one, and where its memory is counted."""

import pytest
import torch
from interpreted import run_interpreted
from small_step import make_net, make_step, make_task

from castwise.measure import means
from castwise.measure.means import CollectiveMean, mean_over
from castwise.measure.parallel import Peers
from castwise.precisions import find_precision

CPU = torch.device("cpu")
SIZES = [(5, torch.bfloat16), (3, torch.float32)]


class Others(Peers):
    """A rank beside others that say what they are told to."""

    world_size = 2

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)

    def gather(self, value: object) -> list[object]:  # type: ignore[override]
        return [value, self._answers.pop(0)]

    def average(self, tensor: torch.Tensor) -> None:
        tensor.div_(2)


class Shared:
    """Stands for the mean in shared memory, on any device."""

    outside_bytes = 1 << 20

    def __init__(self, sizes: list[tuple[int, torch.dtype]], device: torch.device, peers: Peers) -> None:
        del peers
        self.buffers = [torch.zeros(numel, dtype=dtype, device=device) for numel, dtype in sizes]

    def __call__(self) -> None:
        """Leave all as it is."""


class Forbidden(Shared):
    def __init__(self, *_: object) -> None:
        raise RuntimeError("no memory can be shared")


def able(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    monkeypatch.setattr(means, "_can_share", lambda *_: True)
    monkeypatch.setattr(means, "SymmetricMean", kind)


def test_ranks_on_a_cpu_take_collectives() -> None:
    mean = mean_over(Others(None, False), SIZES, CPU)
    assert isinstance(mean, CollectiveMean)
    assert [(len(buffer), buffer.dtype) for buffer in mean.buffers] == SIZES
    assert not any(buffer.any() for buffer in mean.buffers)
    mean.buffers[1].fill_(3)
    mean()
    assert mean.buffers[1].tolist() == [1.5] * 3


@pytest.mark.parametrize(
    ("kind", "answers", "is_shared"),
    [
        (Shared, (True, True), True),
        (Shared, (False,), False),
        (Shared, (True, False), False),
        (Forbidden, (True, True), False),
        (Forbidden, (True, False), False),
    ],
)
def test_all_ranks_share_memory_or_none_does(
    monkeypatch: pytest.MonkeyPatch, kind: type, answers: tuple[bool, ...], is_shared: bool
) -> None:
    able(monkeypatch, kind)
    assert isinstance(mean_over(Others(*answers), SIZES, CPU), Shared if is_shared else CollectiveMean)


@pytest.mark.parametrize(("sizes", "reaches"), [(SIZES, True), (SIZES, False), ([(5, torch.float64)], True)])
def test_memory_is_shared_by_gpus_that_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, sizes: list[tuple[int, torch.dtype]], reaches: bool
) -> None:
    asked = []

    def can_device_access_peer(own: torch.device, other: int) -> bool:
        asked.append((own.index, other))
        return reaches

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(means, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_device_access_peer)
    expected = reaches and sizes == SIZES
    assert means._can_share(Others(1), sizes, torch.device("cuda:0")) is expected
    assert asked == ([(0, 1)] if sizes == SIZES else [])
    assert not means._can_share(Others(0), sizes, torch.device("cuda:0")), "both say they are one and the same"


def test_memory_that_the_allocator_does_not_hold_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    able(monkeypatch, Shared)
    step = make_step(find_precision("fp32"), make_task(make_net()))
    step.average_gradients(Others(*[True] * 3))
    assert (step.outside_bytes, step.peak_allocated(10), step.peak_reserved(20)) == (0, 10, 20), "none yet"
    assert step._reduce is not None
    monkeypatch.setattr(step._reduce, "_mean", Shared(SIZES, CPU, Peers()))
    assert step.peak_allocated(10) == (1 << 20) + 10
    assert step.peak_allocated_ever(10) == (1 << 20) + 10
    assert step.peak_reserved(20) == (1 << 20) + 20
    assert step.peak_allocated(None) is step.peak_reserved(None) is None


def test_shares_of_all_ranks_make_the_mean_rounded_once() -> None:
    done = run_interpreted(
        """
        import torch
        from castwise.measure.mean_kernels import write_means

        for dtype, allowed in ((torch.float32, 2.0**-22), (torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)):
            for ranks, numel in ((2, 5000), (3, 10), (4, 20001)):
                torch.manual_seed(numel)
                buffers = [torch.randn(numel).to(dtype) for _ in range(ranks)]
                expected = torch.stack([each.double() for each in buffers]).mean(0)
                addresses = torch.tensor([each.data_ptr() for each in buffers], dtype=torch.int64)
                for rank in range(ranks):
                    write_means(addresses, buffers[rank], rank)
                assert all(torch.equal(each, buffers[0]) for each in buffers), "all ranks have the same bits"
                # The interpreter cuts bfloat16 off where a GPU rounds it.
                error = (buffers[0].double() - expected).abs() / expected.abs().clamp(min=1)
                assert error.max() <= allowed, (dtype, ranks, float(error.max()))
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]
