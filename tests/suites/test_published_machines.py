"""Published figures as machines: which GPU a name stands for, and which run a figure is of."""

import pytest

from castwise.errors import UsageError
from castwise.registry.published import find_published


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("T4", "Tesla T4"),
        ("tesla-t4", "Tesla T4"),
        ("TitanRTX", "Titan RTX"),
        ("2080Ti", "RTX 2080 Ti"),
        ("GTX 1080 Ti", "GTX 1080 Ti"),
    ],
)
def test_a_gpu_is_found_by_any_way_to_write_it(name: str, gpu: str) -> None:
    machine = find_published(name)
    assert machine.gpu == gpu
    assert {figure.published.gpu for figure in machine.figures} == {gpu}


def test_every_figure_knows_the_run_that_it_is_of() -> None:
    for name in ("T4", "K80", "P100", "TitanRTX", "2080Ti", "1080Ti"):
        for figure in find_published(name).figures:
            assert figure.spec is not None, figure.published
            assert (figure.spec.workload, figure.spec.precision) == (
                figure.published.workload,
                figure.published.precision,
            )
            assert figure.spec.batch_size == figure.published.batch_size
            assert figure.published.loss_scale in (None, figure.spec.loss_scale)


def test_a_gpu_has_the_figures_of_all_suites() -> None:
    assert [suite.name for suite in find_published("T4").suites] == ["tensorcore", "wrn-cifar10"]


def test_sources_with_plots_only_are_named() -> None:
    assert any("amd-nvidia" in note for note in find_published("2080Ti").notes)
    with pytest.raises(UsageError, match="amd-nvidia has plots only"):
        find_published("MI50")


@pytest.mark.parametrize("name", ["H100", "", "Ti", "GTX"])
def test_an_unknown_gpu_is_refused_and_the_known_ones_are_named(name: str) -> None:
    with pytest.raises(UsageError, match=r"No published GPU named .*(Tesla T4|GTX 1080 Ti)"):
        find_published(name)


def test_a_figure_has_the_float32_baseline_of_its_source() -> None:
    figures = {(f.published.workload, f.published.precision): f for f in find_published("2080Ti").figures}
    baseline = figures["fastai-resnet18", "fp16-master"].baseline
    assert baseline is not None
    assert (baseline.precision, baseline.batch_size) == ("fp32", 408)
    assert figures["fastai-resnet18", "fp32"].baseline is None
