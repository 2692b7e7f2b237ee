"""What a trial's parent saw of GPU and host while it ran: documents of its record."""

from pydantic import Field

from castwise.spec.frozen import FrozenModel, renamed


class GpuFacts(FrozenModel):
    """What the driver says of a GPU that does not change while a trial runs; None where `missing` says why.

    Of several GPUs a limit is the lowest of any, a mode is on where it is on all, and memory errors are their sum.

    Attributes:
        max_sm_clock_hertz: The highest clock of the streaming multiprocessors.
        power_limit_watts: The power limit in force.
        persistence_mode: Whether the driver stays loaded when no program uses the GPU.
        ecc_mode: Whether memory has error correction.
        ecc_errors: Memory errors that ECC could not correct, from the driver's loading to the trial's start.
        max_pcie_generation: The PCIe generation that GPU and slot can do.
        max_pcie_width: The number of PCIe lanes that GPU and slot can do.
        missing: Why a field is None, or not of all GPUs, by its name; "gpu" stands for all fields.
    """

    max_sm_clock_hertz: float | None = None
    power_limit_watts: float | None = None
    persistence_mode: bool | None = None
    ecc_mode: bool | None = None
    ecc_errors: int | None = None
    max_pcie_generation: int | None = None
    max_pcie_width: int | None = None
    missing: dict[str, str] = Field(default_factory=dict)


class TelemetrySummary(FrozenModel):
    """What GPU and host were doing while one block or epoch was timed, as its parent process saw it.

    Clocks and power are those of the samples taken while it ran; of the ones just before and just after where it
    was too short for others. Of several GPUs it is of all: clocks, PCIe and samples are those of the GPU with the
    lowest, the temperature is that of the hottest, and the rest is of them together. Power and energy are there only
    where they are known of each. Readings of older records have one GPU, the first of several.

    Attributes:
        seconds: From the sample just before to the one just after, by the host's clock.
        num_gpus: GPUs that it covers: those that could be read; 0 where none could, and on a CPU.
        num_samples: Samples of the GPU; 0 on a CPU.
        sm_clock_hertz: Mean clock of the streaming multiprocessors.
        min_sm_clock_hertz: Their lowest clock.
        memory_clock_hertz: Mean clock of the memory.
        power_watts: Mean power of the board.
        max_temperature_celsius: The core's highest temperature.
        throttle_reasons: All that held the clock down in any sample, by nvidia-smi's names.
        foreign_processes: The most processes at once that computed on the GPU and are not this program's.
        energy_joules: What the driver's energy counter went up by; None also where it stood still.
        pcie_generation: The highest generation that the PCIe link ran at.
        pcie_width: The most PCIe lanes in use.
        ecc_errors: Memory errors that ECC could not correct, from the driver's loading to the end.
        cpu_pressure: Share of the time in which a runnable task waited for a CPU (PSI's "some").
        cpu_steal: Share of the CPUs' time that the hypervisor gave to others.
        cpu_load: Runnable tasks over usable CPUs, averaged over a minute.
        missing: Why a field is None, or of a part of the time or of the GPUs only, by its name; "gpu" stands for all
            of the GPU's.
        affected_gpus: Where only some of several GPUs were throttled, had others' processes or memory errors: which, by
            torch's names, by the throttle reason or by the field's name.
    """

    seconds: float
    num_gpus: int = 1
    num_samples: int = 0
    sm_clock_hertz: float | None = None
    min_sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    power_watts: float | None = None
    max_temperature_celsius: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    foreign_processes: int | None = None
    energy_joules: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    ecc_errors: int | None = None
    cpu_pressure: float | None = None
    cpu_steal: float | None = None
    cpu_load: float | None = None
    missing: dict[str, str] = Field(default_factory=dict)
    affected_gpus: dict[str, tuple[str, ...]] = renamed({}, "whose")

    @property
    def gpu_power_watts(self) -> float | None:
        """Return the mean power of one GPU."""
        return None if self.power_watts is None else self.power_watts / max(1, self.num_gpus)


class EnergyMeasurement(FrozenModel):
    """What the driver's energy counter said while steps ran on and on, after the timed blocks.

    The counter ticks ten times a second (H200): over a timed block it says next to nothing. Here the time is taken from
    tick to tick, so that the mean power is that of running steps and nothing else. GPUs' counters tick apart: of
    several GPUs it is the sum of their powers, each from its own first tick to its last, over the shortest of these
    times.

    Attributes:
        num_gpus: GPUs whose energy it is; 1 in older records, the first of several.
        joules: What the counter went up by from its first tick to its last.
        seconds: The time between the two, by the host's clock.
        num_ticks: Ticks, the first not counted; the fewest of any GPU's.
        step_seconds: Seconds a step of the stretch; 0 where that is not known.
        late_seconds: How late the first and the last tick were seen at the most, of any GPU.
        missing: Why joules are 0; empty where they are not.
    """

    num_gpus: int = 1
    joules: float = 0.0
    seconds: float = 0.0
    num_ticks: int = 0
    step_seconds: float = 0.0
    late_seconds: float = 0.02  # of records from before it was noted: the counter was read every 20 ms
    missing: str = ""
