"""What a GPU's management library reports; `nvml.py` and `amdsmi.py` say how each vendor's is asked."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from castwise.records.schema import GpuFacts

Query = Callable[[Any, Any], Any]  # of the library and the GPU's handle

_LOCK = threading.Lock()
_MOST_SECONDS = 1.0  # that another thread's call is waited for: a driver that has lost its GPU may not return


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let no two threads call a library at once, each for its GPU.

    4 of 11 commands that watched four GPUs ended by SIGSEGV as timing began, and none of those that watched fewer (NVML
    of driver 580.159.04). That its calls at once are the cause is supposed, not shown.
    """
    is_free = _LOCK.acquire(timeout=_MOST_SECONDS)
    try:
        yield
    finally:
        if is_free:
            _LOCK.release()


class GpuUnreadableError(Exception):
    """A GPU's management library is not there or does not know the GPU; the message says why."""


@dataclass(frozen=True)
class Sample:
    """What the driver reports at one moment; a field is None if it is not known, and `missing` says why."""

    sm_clock_hertz: float | None = None  # AMD: of the graphics engine
    memory_clock_hertz: float | None = None
    # The board's: on GPUs since Ampere, but the A100 and A30, the mean of the last second; on those and older ones the
    # power at that moment. Source: nvml.h, nvmlDeviceGetPowerUsage.
    power_watts: float | None = None
    temperature_celsius: float | None = None
    throttle_reasons: tuple[str, ...] | None = None  # what limits the clock, by nvidia-smi's names
    energy_joules: float | None = None  # since the driver was loaded
    pcie_generation: int | None = None  # the present one: an idle link uses a low one to save power
    pcie_width: int | None = None
    ecc_errors: int | None = None  # that ECC could not correct, since the driver was loaded
    processes: frozenset[int] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CounterReading:
    """A GPU's hardware counters between two moments."""

    seconds: float = 0.0  # between the two, by the host's clock
    shares: Mapping[str, float] = field(default_factory=dict)  # by field of `records.schema.GpuCounters`
    missing: str = ""  # why there are none, or not all


class Monitor:
    """One GPU's management library, opened.

    Every field is asked for by itself, and none raises: one that is not available does not hide others.
    """

    package: ClassVar[str]
    sample_queries: ClassVar[Mapping[str, Query]]
    fact_queries: ClassVar[Mapping[str, Query]]

    def __init__(
        self,
        library: Any,
        errors: tuple[type[Exception], ...],
        *,
        start: Callable[[], object],
        find: Callable[[], Any],
        stop: Callable[[], object],
        final_codes: frozenset[Any] = frozenset(),
    ) -> None:
        """Start the library, which raises `errors`, and find the GPU's handle in it.

        A field is not asked for again after an error whose `value` is one of the `final_codes`.

        Raises:
            GpuUnreadableError: The library does not start, or does not find the GPU.
        """
        self._library, self._errors, self._stop, self._final_codes = library, errors, stop, final_codes
        self._hidden: dict[str, str] = {}
        self._is_open = False
        try:
            with one_at_a_time():
                start()
                self._is_open = True
                self._handle = find()
        except GpuUnreadableError:
            self.close()
            raise
        except errors as error:
            self.close()
            raise GpuUnreadableError(str(error)) from None

    def facts(self) -> GpuFacts:
        """Return what does not change while a trial runs."""
        values, missing = self._ask(self.fact_queries)
        return GpuFacts.model_validate({**values, "missing": missing})

    def read(self) -> Sample:
        """Return what the driver reports now; for a lost GPU, a sample of reasons."""
        values, missing = self._ask(self.sample_queries)
        return Sample(**values, missing=missing)

    def read_energy(self) -> Sample:
        """Return the energy counter alone, which takes a fraction of the time."""
        values, missing = self._ask({"energy_joules": self.sample_queries["energy_joules"]})
        return Sample(**values, missing=missing)

    def begin_counters(self) -> None:
        """Let the hardware counters begin, if there are any."""

    def read_counters(self) -> CounterReading:
        """Return the hardware counters since they began."""
        return CounterReading(missing=f"{self.package} is not asked for them")

    def close(self) -> None:
        """Close the library. May be called again."""
        if self._is_open:
            self._is_open = False
            with suppress(*self._errors), one_at_a_time():
                self._stop()

    def _ask(self, queries: Mapping[str, Query]) -> tuple[dict[str, Any], dict[str, str]]:
        values: dict[str, Any] = {}
        missing: dict[str, str] = {}
        for name, query in queries.items():
            if name in self._hidden:
                missing[name] = self._hidden[name]
                continue
            try:
                with one_at_a_time():
                    values[name] = query(self._library, self._handle)
            except self._errors as error:
                missing[name] = str(error)
                if getattr(error, "value", None) in self._final_codes:
                    self._hidden[name] = str(error)
            except (AttributeError, KeyError):  # a release from before the field
                missing[name] = self._hidden[name] = f"this {self.package} does not have it"
        return values, missing
