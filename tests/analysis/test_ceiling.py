"""Ceilings against closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castwise.analysis.ceiling import ceiling, least_bytes
from castwise.records.schema import StepFlops
from castwise.registry.gpus import find_gpu_model

H200 = find_gpu_model("NVIDIA H200")
TERA = 10**12
SECONDS = {"total": 100.0, "products": 38.0, "moved": 62.0}


def test_the_least_bytes_of_a_step() -> None:
    flops = StepFlops(
        products={"convolution": {"tf32": 494_500 * TERA // 1000}, "linear": {"fp32": 67 * TERA}},
        weights_bytes=TERA,
        gradients_bytes=TERA,
        update_bytes=2 * TERA,
        saved_bytes=8 * TERA,
    )
    assert least_bytes(flops) == 24 * TERA


def test_an_unknown_peak_gives_no_ceiling() -> None:
    assert ceiling("tf32", None, **SECONDS) is None
    assert ceiling("tf32", H200, total=0.0, products=0.0, moved=0.0) is None


def test_a_ceiling_is_amdahl_s() -> None:
    found = ceiling("tf32", H200, **SECONDS)
    assert found is not None
    ratio = 989.5 / 494.5
    assert found.products_gain == pytest.approx(100 / (62 + 38 / ratio))
    assert found.gain == pytest.approx(100 / (31 + 38 / ratio))
    bound = "tf32 → bf16-mixed can gain at most 2.01× (1.24× if nothing but its products gets faster)."
    assert found.sentence == bound


def test_the_same_storage_gains_by_products_alone() -> None:
    found = ceiling("fp16-mixed", H200, **SECONDS | {"total": 101.0})
    assert found is not None
    assert found.gain == found.products_gain == 1.0
    assert found.sentence == "fp16-mixed → bf16-mixed can gain at most 1.00×."


def test_the_default_s_ratio_comes_from_its_flops() -> None:
    flops = StepFlops(products={"convolution": {"tf32": 494_500}, "linear": {"fp32": 67_000}})
    assert ceiling("default", H200, **SECONDS) is None
    found = ceiling("default", H200, total=1.0, products=1.0, moved=0.0, flops=flops)
    assert found is not None
    assert found.gain == pytest.approx(2 * 989.5 / (494.5 + 67))


times = st.floats(0, 1e3)


@given(
    product=times,
    memory=times,
    other=times,
    product_gain=st.floats(1.0, 989.5 / 494.5),
    memory_gain=st.floats(1.0, 2.0),
)
def test_no_consistent_measurement_is_above_its_ceiling(
    product: float, memory: float, other: float, product_gain: float, memory_gain: float
) -> None:
    total = product + memory + other
    found = ceiling("tf32", H200, total=total, products=product, moved=memory)
    if total == 0:
        assert found is None
        return
    measured = total / (product / product_gain + memory / memory_gain + other)
    assert found is not None
    assert found.gain >= 1
    assert found.gain >= found.products_gain - 1e-9
    assert measured <= found.gain * (1 + 1e-9)
