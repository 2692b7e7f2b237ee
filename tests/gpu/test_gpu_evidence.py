"""Hardware counters and profiles of real trials on a GPU. With `-s` it prints what was found."""

import pytest
import torch
from real_gpu import measured, on_gpus

from castwise.records.schema import Trial
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.trial.flops import _padded_speedup

pytestmark = on_gpus(1)

PRODUCTS = ("tensor_core_product", "plain_product", "unknown_product")

PROTOCOL = MeasurementProtocol(
    warm_up_steps=3, warm_up_seconds=3.0, block_seconds=0.2, lead_in_seconds=0.03, num_blocks=4, profile_steps=3
)


def measure(precision: str, *techniques: str) -> Trial:
    spec = TrialSpec(
        workload="resnet50",
        precision=precision,
        loss_scale="dynamic" if precision == "fp16-mixed" else "none",
        batch_size=64,
        device="cuda:0",
        techniques=techniques,
        protocol=PROTOCOL,
    )
    trial = measured(spec)
    assert trial.status == "ok", f"{trial.message}\n{trial.log}"
    show(trial)
    return trial


def show(trial: Trial) -> None:
    profile, block = trial.profile, trial.ranks[0].blocks[-1]
    assert profile is not None
    step = 1e3 * block.seconds / block.num_steps
    print(f"\n{trial.spec.label}: timed step {step:.2f} ms; {trial.counters or trial.telemetry_note}")
    print(
        f"profiled {1e3 * profile.seconds:.2f} ms, idle {1e3 * (profile.idle_seconds or 0):.2f} ms, {profile.missing}"
    )
    print({name: f"{1e3 * seconds:.2f} ms" for name, seconds in profile.class_seconds.items()}, profile.format_seconds)
    print(list(profile.module_seconds)[:8])
    for each in profile.kernels:
        print(f"  {1e3 * each.seconds:7.3f} ms {each.launches:5.1f} {each.kind:20} {each.format:5} {each.name[:100]}")


@pytest.mark.parametrize(
    ("precision", "product"),
    [("fp32", "plain_product"), ("bf16-mixed", "tensor_core_product"), ("fp16-mixed", "tensor_core_product")],
)
def test_products_run_where_the_precision_says(precision: str, product: str) -> None:
    trial = measure(precision)
    profile = trial.profile
    assert profile is not None
    assert profile.missing == ""
    assert {"normalisation", "elementwise", "optimizer", product} <= set(profile.class_seconds)
    assert ("loss_scaling" in profile.class_seconds) == (precision == "fp16-mixed")
    products = {kind: profile.class_seconds.get(kind, 0.0) for kind in PRODUCTS}
    assert max(products, key=products.__getitem__) == product, products
    assert sum(profile.class_seconds.values()) == pytest.approx(profile.busy_seconds, rel=0.1)
    assert {"layer1.0", "layer4.2", "fc"} <= set(profile.module_seconds)
    assert profile.module_seconds["layer1.0"].backward_seconds > profile.module_seconds["layer1.0"].forward_seconds > 0
    assert any(each.shapes for each in profile.kernels)


def test_counters_tell_tensor_cores_from_float32_units() -> None:
    plain, mixed = measure("fp32"), measure("bf16-mixed", "channels-last")
    if plain.counters is None:
        pytest.skip(plain.telemetry_note)
    assert mixed.counters is not None
    assert plain.counters.num_blocks == 4
    shares = (plain.counters.tensor_share, plain.counters.fp32_share, mixed.counters.tensor_share)
    assert None not in shares
    assert plain.counters.tensor_share < 0.05 < mixed.counters.tensor_share  # type: ignore[operator]
    assert plain.counters.fp32_share > 0.1  # type: ignore[operator]


def test_kernels_in_a_cuda_graph_are_seen() -> None:
    profile = measure("bf16-mixed", "cuda-graph").profile
    assert profile is not None
    assert profile.missing == "modules are not told apart in a step with cuda-graph"
    assert profile.class_seconds["tensor_core_product"] > 0
    assert profile.num_kernels > 100


def test_a_padded_product_is_faster() -> None:
    for width, least, most in ((2045, 1.2, 20.0), (2048, 0.9, 1.1)):
        factors = (((8192, width), torch.bfloat16, False), ((width, width), torch.bfloat16, True))
        found = _padded_speedup(factors, torch.device("cuda:0"))
        assert found is not None
        assert least < found < most
