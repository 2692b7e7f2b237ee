"""The GPU's hardware counters by a fake NVML, with the reasons why there are none."""

from types import SimpleNamespace
from typing import Any

import pytest

from castwise.telemetry import gpm
from castwise.telemetry.gpm import METRICS, ON_MIG, TOO_OLD, GpmCounters
from castwise.telemetry.gpu import CounterReading
from castwise.telemetry.summary import mean_counters

NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST = 3, 4, 15
IDS = {name: number for number, name in enumerate(METRICS.values(), start=2)}


class FakeGpm:
    """The part of `pynvml` for counters: what it gives in per cent, by a metric's number; `fails` in a function."""

    NVML_SUCCESS, NVML_GPM_METRICS_GET_VERSION = 0, 1

    class NVMLError(Exception):
        value = 0

    def __init__(self) -> None:
        self.percent: dict[int, float] = {number: 10.0 * number for number in IDS.values()}
        self.statuses: dict[int, int] = {}
        self.fails: dict[str, int] = {}
        self.supported, self.is_mig = 1, 0
        self.asked: list[str] = []
        self.num_buffers = 0
        self.freed: list[str] = []

    def __getattr__(self, name: str) -> int:
        if name not in IDS:
            raise AttributeError(name)
        return IDS[name]

    def _enter(self, name: str) -> None:
        self.asked.append(name)
        if name in self.fails:
            error = self.NVMLError(f"{name} failed")
            error.value = self.fails[name]
            raise error

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> int:
        self._enter("mig")
        return self.is_mig

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:
        self._enter("support")
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self) -> str:
        self._enter("alloc")
        self.num_buffers += 1
        return f"buffer {self.num_buffers}"

    def nvmlGpmSampleGet(self, handle: str, buffer: str) -> None:
        assert handle == "handle"
        self._enter("get")

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(98)])

    def nvmlGpmMetricsGet(self, query: Any) -> None:
        self._enter("metrics")
        assert (query.version, query.sample1, query.sample2) == (1, "buffer 1", "buffer 2")
        for metric in query.metrics[: query.numMetrics]:
            metric.value, metric.nvmlReturn = self.percent[metric.metricId], self.statuses.get(metric.metricId, 0)

    def nvmlGpmSampleFree(self, buffer: str) -> None:
        self.freed.append(buffer)


def gpm_of(library: FakeGpm) -> GpmCounters:
    return GpmCounters(library, frozenset({NOT_SUPPORTED}))


def read_once(counters: GpmCounters) -> CounterReading:
    counters.begin("handle")
    return counters.read("handle")


@pytest.fixture(autouse=True)
def takes_blocks_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpm, "_LEAST_SECONDS", 0.0)


def test_samples_that_are_too_close_give_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpm, "_LEAST_SECONDS", 3600.0)
    assert read_once(gpm_of(FakeGpm())) == CounterReading(missing="blocks shorter than 3600.0 s")


def test_counters_are_shares_of_the_time_between_two_samples() -> None:
    library = FakeGpm()
    counters = gpm_of(library)
    reading = read_once(counters)
    assert reading.shares == {field: pytest.approx(IDS[name] / 10) for field, name in METRICS.items()}
    assert reading.seconds > 0
    assert reading.missing == ""
    read_once(counters)
    assert library.asked.count("alloc") == 2, "buffers are used again"
    counters.close()
    counters.close()
    assert library.freed == ["buffer 1", "buffer 2"]


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
def test_a_metric_that_is_no_figure_is_left_out(value: float) -> None:
    library = FakeGpm()
    library.percent[IDS[METRICS["fp16_share"]]] = value
    library.statuses[IDS[METRICS["dram_share"]]] = NOT_SUPPORTED
    reading = read_once(gpm_of(library))
    assert set(METRICS) - set(reading.shares) == {"fp16_share", "dram_share"}
    assert reading.missing == "the driver gave no fp16_share and dram_share"


def test_more_than_all_is_all() -> None:
    library = FakeGpm()
    library.percent[IDS[METRICS["sm_share"]]] = 100.4
    assert read_once(gpm_of(library)).shares["sm_share"] == 1.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"supported": 0}, TOO_OLD), ({"is_mig": 1}, ON_MIG), ({"fails": {"get": NOT_SUPPORTED}}, "get failed")],
)
def test_what_stays_missing_is_not_asked_for_again(changes: dict[str, Any], why: str) -> None:
    library = FakeGpm()
    vars(library).update(changes)
    counters = gpm_of(library)
    assert read_once(counters) == CounterReading(missing=why)
    num_asked = len(library.asked)
    assert read_once(counters) == CounterReading(missing=why)
    assert len(library.asked) == num_asked


def test_an_old_package_has_no_counters() -> None:
    reading = read_once(GpmCounters(SimpleNamespace(NVMLError=FakeGpm.NVMLError), frozenset()))
    assert reading.missing == "this nvidia-ml-py does not have them"


@pytest.mark.parametrize("function", ["get", "metrics", "alloc", "support"])
@pytest.mark.parametrize("code", [NO_PERMISSION, GPU_IS_LOST])
def test_an_error_may_pass(function: str, code: int) -> None:
    library = FakeGpm()
    counters = gpm_of(library)
    library.fails = {function: code}
    assert read_once(counters).missing == f"{function} failed"
    library.fails = {}
    assert read_once(counters).shares


def test_an_error_between_the_two_samples_gives_no_counters_of_another_block() -> None:
    library = FakeGpm()
    counters = gpm_of(library)
    read_once(counters)
    library.fails = {"get": GPU_IS_LOST}
    assert read_once(counters) == CounterReading(missing="get failed")


def test_a_driver_from_before_mig_has_none() -> None:
    library = FakeGpm()
    library.fails = {"mig": 13}
    assert read_once(gpm_of(library)).shares


def test_means_are_weighted_by_time_and_keep_reasons_once() -> None:
    readings = [
        CounterReading(1.0, {"tensor_share": 0.2, "dram_share": 0.5}),
        CounterReading(3.0, {"tensor_share": 0.6}),
        *[CounterReading(missing="GPU is lost")] * 2,
    ]
    blocks = [{"cuda:0": reading} for reading in readings]
    counters, why = mean_counters(blocks)
    assert counters is not None
    assert counters.tensor_share == pytest.approx(0.5)
    assert (counters.dram_share, counters.num_blocks, counters.sm_share) == (0.5, 2, None)
    assert why == "GPU is lost"
    assert mean_counters(blocks[2:]) == (None, "GPU is lost")
    assert mean_counters([]) == mean_counters([{}]) == (None, "")


def test_several_gpus_have_a_mean_and_reasons_with_names() -> None:
    one, two = CounterReading(1.0, {"tensor_share": 0.2}), CounterReading(1.0, {"tensor_share": 0.4})
    both, why = mean_counters([{"cuda:0": one, "cuda:1": two}])
    assert both is not None
    assert (both.num_blocks, both.tensor_share, why) == (1, pytest.approx(0.3), "")
    half, why = mean_counters([{"cuda:0": one, "cuda:1": CounterReading(missing="no")}])
    assert half is not None
    assert (half.tensor_share, why) == (0.2, "cuda:1: no")
