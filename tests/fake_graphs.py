"""CUDA graphs without CUDA: what is captured runs when it is replayed, and not before."""

from collections.abc import Callable

from torch import Tensor


class FakeCaptures:
    """Stands in for `CudaCaptures`, and keeps count.

    Attributes:
        launches: The steps of each replay, in order; as told by the losses that it fills.
        num_captured: Graphs.
        num_aside: Steps that ran uncaptured.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.peak_bytes = self.earlier_peak_bytes = 0
        self.launches: list[int] = []
        self.num_captured = self.num_aside = 0

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
