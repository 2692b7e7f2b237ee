"""Hardware counters of an NVIDIA GPU without a profiler: NVML's GPM, on Hopper and newer GPUs (source: nvml.h)."""

import math
import time
from contextlib import suppress
from typing import Any

from castwise.telemetry.gpu import CounterReading, one_at_a_time

# By field of `records.schema.GpuCounters`. NVML gives per cent. Source: nvml.h, nvmlGpmMetricId_t.
METRICS = {
    "sm_share": "NVML_GPM_METRIC_SM_UTIL",
    "occupancy_share": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_share": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "fp32_share": "NVML_GPM_METRIC_FP32_UTIL",
    "fp16_share": "NVML_GPM_METRIC_FP16_UTIL",
    "integer_share": "NVML_GPM_METRIC_INTEGER_UTIL",
    "dram_share": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
TOO_OLD = "NVIDIA's driver has them from Hopper on"
# Between samples that are closer the shares are half of what they are, or missing. Source: of 630 records of GPT-2 and
# others one has blocks of 81 ms: 43 % of the multiprocessors, 79 % in blocks of 117 ms (H200, driver 580.159.04).
_LEAST_SECONDS = 0.1
ON_MIG = "not read on a part of a GPU (MIG)"


class GpmCounters:
    """A GPU's counters between two moments. Nothing raises: a reading without counters says why."""

    def __init__(self, nvml: Any, final_codes: frozenset[Any]) -> None:
        """Use a library; counters are not asked for again after an error whose `value` is in `final_codes`."""
        self._nvml, self._final_codes = nvml, final_codes
        self._errors = (nvml.NVMLError, AttributeError, TypeError, ValueError)
        self._buffers: list[Any] = []  # of the beginning and of the end
        self._began = 0.0
        self._missing = "they were not read"
        self._is_final = False

    @one_at_a_time()
    def begin(self, handle: Any) -> None:
        """Take the first sample."""
        if self._is_final:
            return
        try:
            if not self._buffers and (why := self._why_none(handle)):
                self._missing, self._is_final = why, True
                return
            while len(self._buffers) < 2:
                self._buffers.append(self._nvml.nvmlGpmSampleAlloc())
            self._nvml.nvmlGpmSampleGet(handle, self._buffers[0])
            self._began, self._missing = time.perf_counter(), ""
        except self._errors as error:
            self._note(error)

    @one_at_a_time()
    def read(self, handle: Any) -> CounterReading:
        """Take the second sample, and return what happened since the first."""
        if self._missing:
            return CounterReading(missing=self._missing)
        nvml = self._nvml
        try:
            nvml.nvmlGpmSampleGet(handle, self._buffers[1])
            seconds = time.perf_counter() - self._began
            if seconds < _LEAST_SECONDS:
                return CounterReading(missing=f"blocks shorter than {_LEAST_SECONDS} s")
            query = nvml.c_nvmlGpmMetricsGet_t()
            query.version = nvml.NVML_GPM_METRICS_GET_VERSION
            query.numMetrics = len(METRICS)
            query.sample1, query.sample2 = self._buffers
            for metric, name in zip(query.metrics, METRICS.values(), strict=False):
                metric.metricId = getattr(nvml, name)
            nvml.nvmlGpmMetricsGet(query)
            shares = {
                field: min(metric.value / 100, 1.0)
                for field, metric in zip(METRICS, query.metrics, strict=False)
                if metric.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(metric.value) and metric.value >= 0
            }
        except self._errors as error:
            self._note(error)
            return CounterReading(missing=self._missing)
        lacking = " and ".join(field for field in METRICS if field not in shares)
        return CounterReading(seconds, shares, f"the driver gave no {lacking}" if lacking else "")

    @one_at_a_time()
    def close(self) -> None:
        """Give the buffers back. May be called again."""
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            with suppress(*self._errors):
                self._nvml.nvmlGpmSampleFree(buffer)

    def _why_none(self, handle: Any) -> str:
        """Return why this GPU has no such counters; empty if it has."""
        with suppress(*self._errors):  # a driver from before MIG
            if self._nvml.nvmlDeviceIsMigDeviceHandle(handle):
                return ON_MIG
        return "" if self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice else TOO_OLD

    def _note(self, error: Exception) -> None:
        self._missing = str(error) or type(error).__name__
        if isinstance(error, AttributeError):
            self._missing, self._is_final = "this nvidia-ml-py does not have them", True
        self._is_final |= getattr(error, "value", None) in self._final_codes
