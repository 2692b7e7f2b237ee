"""CUDA graphs without CUDA: what is captured runs when it is replayed, and not before."""

from collections.abc import Callable

from torch import Tensor


class FakeCaptures:
    """Stands in for `CudaCaptures`, and counts what it does."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.peak_bytes = self.earlier_peak_bytes = 0
        self.launches: list[int] = []  # the steps of each replay, counted by the losses that it fills
        self.num_captured = 0  # graphs
        self.num_aside = 0  # steps that ran uncaptured

    def run_aside(self, work: Callable[[], Tensor]) -> Tensor:
        self.num_aside += 1
        return work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        self.seconds = (self.seconds or 0.0) + 0.25
        places = next(cell.cell_contents for cell in work.__closure__ or () if isinstance(cell.cell_contents, list))

        def replay() -> None:
            self.launches.append(len(places))
            work()

        return replay

    def release(self) -> None:
        self.num_captured = 0
