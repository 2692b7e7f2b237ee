"""The least time of a step, against sums done by hand."""

import pytest
from least_time import Ceilings, Operation, Work, least_time

PRODUCT = Operation("mm", flops=4000.0, elements=100.0)
NORM = Operation("native_batch_norm", flops=0.0, elements=300.0)
CEILINGS = Ceilings(flops_per_second=1000.0, bytes_per_second=200.0)


def work(num_states: int = 0, *, clips: bool = False) -> Work:
    return Work((PRODUCT, NORM), num_parameters=10, num_states=num_states, clips=clips)


@pytest.mark.parametrize(
    ("element_bytes", "num_states", "clips", "per_parameter"),
    [
        (4, 0, False, 4 + 8),  # gradient; weight read and written
        (2, 0, False, 2 + 8 + 2),  # and the 16-bit copy written
        (2, 1, False, 2 + 8 + 2 + 8),
        (2, 2, True, 4 + 8 + 2 + 16),
    ],
)
def test_bytes_of_the_update(element_bytes: int, num_states: int, clips: bool, per_parameter: int) -> None:
    assert work(num_states, clips=clips).update_bytes(element_bytes) == 10 * per_parameter


def test_totals() -> None:
    assert work().flops == 4000
    assert work().bytes(2) == 400 * 2 + 120


def test_least_time() -> None:
    found = least_time(work(), 2, CEILINGS)
    assert found.arithmetic == 4.0
    assert found.memory == 920 / 200
    # The product is bound by arithmetic, the norm and the update by memory.
    assert found.by_operation == 4.0 + 600 / 200 + 120 / 200
    assert found.bound == 920 / 200


def test_one_operation_after_another_is_never_faster_than_the_bound() -> None:
    for rate in (10.0, 1e3, 1e6):
        found = least_time(work(2, clips=True), 4, Ceilings(rate, 200.0))
        assert found.by_operation >= found.bound
