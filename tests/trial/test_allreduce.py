"""The mean of all ranks' tensors: the way that ranks agree on, the kernels, and the memory that it takes."""

import ctypes
from typing import Any

import pytest
import torch
from interpreted import interpreted, run_interpreted
from small_step import make_net, make_step, make_task

from castwise.registry.precisions import find_precision
from castwise.trial.distributed import Peers
from castwise.trial.kernels.allreduce import reducer
from castwise.trial.kernels.allreduce.reducer import Allocated, CollectiveMean, Groups, make_allreducer, with_layout

GROUPS = [[torch.zeros(5, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16)], [torch.zeros(3)]]


class Others(Peers):
    """One of two ranks; the other gives these answers."""

    world_size = 2

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)

    def gather_objects(self, value: object) -> list[object]:  # type: ignore[override]
        return [value, self._answers.pop(0)]

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        tensor.div_(2)


class Shared:
    """A fake of the mean in shared memory, on any device."""

    outside_bytes = 1 << 20
    earlier_peaks = (2 << 20, 3 << 20)

    def __init__(self, groups: Groups, peers: Peers, allocated: Allocated) -> None:
        del groups, peers, allocated


class Forbidden(Shared):
    def __init__(self, *_: object) -> None:
        raise RuntimeError("no memory can be shared")


PEAKS = (5, 7)
THERE, FULL = Allocated(torch.zeros(1), PEAKS), None


def test_collectives_on_a_cpu() -> None:
    mean = make_allreducer(Others(None, False, False), GROUPS)
    assert isinstance(mean, CollectiveMean)
    assert [[(place.shape, place.dtype) for place in places] for places in mean.outputs] == [
        [(each.shape, each.dtype) for each in group] for group in GROUPS
    ]
    mean([[torch.full_like(each, 3) for each in group] for group in GROUPS])
    assert all(bool((place == 1.5).all()) for places in mean.outputs for place in places)
    assert [int(flat.count_nonzero()) for flat in mean.flat] == [9, 3], "zeros stay between the views"
    assert all(place.data_ptr() % 64 == 0 for places in mean.outputs for place in places)


@pytest.mark.parametrize(
    ("kind", "allocated", "answers", "is_shared"),
    [
        (Shared, THERE, (True, True, True), True),
        (Shared, THERE, (False, False), False),
        (Shared, THERE, (True, False), False),
        (Shared, THERE, (True, True, False), False),
        (Shared, FULL, (True, True), False),
        (Shared, FULL, (True, False), False),
        (Forbidden, THERE, (True, True, False), False),
        (Forbidden, THERE, (True, True, True), False),
    ],
)
def test_all_ranks_share_memory_or_none(
    monkeypatch: pytest.MonkeyPatch, kind: type, allocated: Allocated | None, answers: tuple[bool, ...], is_shared: bool
) -> None:
    monkeypatch.setattr(reducer, "can_share", lambda *_: True)
    monkeypatch.setattr(reducer, "allocate", lambda *_: allocated)
    monkeypatch.setattr(reducer, "SymmetricMean", kind)
    others = Others(*answers)
    mean = make_allreducer(others, GROUPS)
    assert isinstance(mean, Shared if is_shared else CollectiveMean)
    assert not others._answers, "both ranks have gathered as often"
    if isinstance(mean, CollectiveMean) and allocated is not None and answers[0]:
        assert mean.earlier_peaks == PEAKS


class OnGpu:
    """A fake of a tensor on a GPU."""

    device = torch.device("cuda:0")

    def __init__(self, dtype: torch.dtype, numel: int = 8) -> None:
        self.dtype = dtype
        self.numel = lambda: numel


@pytest.mark.parametrize(
    ("tensor", "reached", "expected"),
    [
        (OnGpu(torch.float32), True, True),
        (OnGpu(torch.bfloat16), False, False),
        (OnGpu(torch.float64), True, False),
        (OnGpu(torch.float32, 0), True, False),
    ],
)
def test_can_share(monkeypatch: pytest.MonkeyPatch, tensor: OnGpu, reached: bool, expected: bool) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(reducer, "can_compile_kernels", lambda: True)
    monkeypatch.setattr(reducer, "has_peer_atomics", lambda own, other: (own, other) == (0, 1) and reached)
    groups: Groups = [[tensor]]  # type: ignore[list-item]
    assert reducer.can_share(Others(1), groups) is expected
    assert not reducer.can_share(Others(0), groups), "two ranks on one GPU"
    monkeypatch.setattr(reducer, "can_compile_kernels", lambda: False)
    assert not reducer.can_share(Others(1), groups)


@pytest.mark.parametrize(
    ("access", "atomics", "expected"), [(True, 1, True), (True, 0, False), (False, 1, False), (True, None, False)]
)
def test_has_peer_atomics(monkeypatch: pytest.MonkeyPatch, access: bool, atomics: int | None, expected: bool) -> None:
    class Driver:
        def cuDeviceGet(self, device: Any, number: int) -> int:
            device._obj.value = 10 + number
            return 0

        def cuDeviceGetP2PAttribute(self, value: Any, attribute: int, own: Any, other: Any) -> int:
            assert (attribute, own.value, other.value) == (3, 10, 11)
            value._obj.value = atomics or 0
            return 0 if atomics is not None else 999

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: access and (own, other) == (0, 1))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    assert reducer.has_peer_atomics(0, 1) is expected


def test_no_peer_atomics_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    assert not reducer.has_peer_atomics(0, 1)


def test_no_kernels_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert reducer.can_compile_kernels()
    monkeypatch.setenv("CC", "/no/compiler")
    assert not reducer.can_compile_kernels()


def test_with_layout() -> None:
    place = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    alike = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert with_layout(place, alike) is alike
    whole = torch.randn(4, 3, 1, 1)
    assert with_layout(torch.empty(4, 3, 1, 1).to(memory_format=torch.channels_last), whole) is whole, "one pixel"
    memory = torch.randn(49)
    for unlike in (alike.contiguous(), alike.double(), memory[1:].as_strided(place.shape, place.stride())):
        found = with_layout(place, unlike)
        assert found is not unlike
        assert (found.stride(), found.dtype, found.data_ptr() % 16) == (place.stride(), place.dtype, 0)
        assert torch.equal(found, unlike.float())


def test_peaks_count_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = make_step(find_precision("fp32"), make_task(make_net()))
    step.average_gradients(Others())
    assert (step.peak_allocated(10), step.peak_reserved(20)) == (10, 20), "none yet"
    assert step._reduce is not None
    monkeypatch.setattr(step._reduce, "mean", Shared(GROUPS, Peers(), THERE))
    more, (allocated, reserved) = Shared.outside_bytes, Shared.earlier_peaks
    assert (step.peak_allocated(10), step.peak_reserved(20)) == (more + 10, more + 20)
    assert (step.peak_allocated(10, ever=True), step.peak_reserved(20, ever=True)) == (allocated, reserved)
    assert (step.peak_allocated(allocated, ever=True), step.peak_reserved(reserved, ever=True)) == (
        allocated + more,
        reserved + more,
    )
    assert step.peak_allocated(None, ever=True) is step.peak_reserved(None, ever=True) is None


@interpreted
def test_kernels_compute_the_mean() -> None:
    run_interpreted(
        """
        import torch
        from castwise.trial.kernels.allreduce.triton_kernels import SharedGroup

        shapes = ((64, 3, 3, 3), (5000,), (), (0,), (128, 64, 1, 1), (4096,)) + ((9,),) * 70

        def tensors(rank, dtype):
            torch.manual_seed(rank)
            made = [torch.randn(shape).to(dtype) for shape in shapes]
            return [each.to(memory_format=torch.channels_last) if each.ndim == 4 else each for each in made]

        half, other = (torch.float16, 2.0**-10, 3), (torch.bfloat16, 2.0**-7, 4)
        for dtype, allowed, ranks in ((torch.float32, 2.0**-22, 2), half, other):
            given = [tensors(rank, dtype) for rank in range(ranks)]
            size = SharedGroup.num_bytes(given[0], ranks)
            # Past the end nothing may be written.
            memories = [torch.full((size + 64,), 7, dtype=torch.uint8) for _ in range(ranks)]
            addresses = [memory.data_ptr() for memory in memories]
            groups = [SharedGroup(given[0], memory, addresses, rank) for rank, memory in enumerate(memories)]
            for turn in range(2):
                for group, own in zip(groups, given):
                    group.scatter(own)
                for group in groups:
                    group.average()
                for memory in memories:
                    assert (memory[size:] == 7).all()
                for number in range(len(shapes)):
                    places = [group.outputs[number] for group in groups]
                    assert all(torch.equal(place, places[0]) for place in places), "all ranks have the same bits"
                    assert places[0].stride() == given[0][number].stride()
                    expected = torch.stack([own[number].double() for own in given]).mean(0)
                    # The interpreter cuts bfloat16 off where a GPU rounds it.
                    error = (places[0].double() - expected).abs() / expected.abs().clamp(min=1)
                    assert not error.numel() or error.max() <= allowed, (dtype, ranks, number, error.max())
                given = [[each * 2 for each in own] for own in given]  # elsewhere in memory
        """
    )
