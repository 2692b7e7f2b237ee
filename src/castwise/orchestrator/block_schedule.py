"""How many blocks a process times, and how long each is: until its step time is known well enough."""

from dataclasses import dataclass

from castwise.analysis.statistics import FEWEST_BLOCKS, TOLERANCE, noise_of, required_blocks
from castwise.spec.trial import MeasurementProtocol

# A block is at most this many times as long as usual. Source: chosen here; too few longer blocks show no outliers.
_MAX_LENGTH = 3
# How well a process must be known, as a share of the standard deviation between processes of its configuration. The
# interval is then an eighth wider than if each were known exactly; more blocks gain less than another process.
_SHARE_OF_PROCESS_STD = 0.5


@dataclass(frozen=True)
class PriorStats:
    """What earlier processes of the same configuration measured."""

    noise: float  # the largest of any of them, of a block of usual length, as a share of the step time
    step_seconds: float
    process_std: float = 0.0  # between their step times, as a share of the step time; 0 if they are too few
    is_at_power_limit: bool = False  # in any of them


class BlockSchedule:
    """The blocks of one process; if adaptive, it ends once the step time is known, and may take longer blocks."""

    def __init__(
        self, protocol: MeasurementProtocol, prior: PriorStats | None = None, *, adaptive: bool = True
    ) -> None:
        self._protocol = protocol
        self._prior = prior
        self._adaptive = adaptive
        self._step_times: list[float] = []
        self._lengths: list[int] = []
        self._seconds = 0.0

    def add(self, seconds: float, num_steps: int, length: int = 1) -> None:
        """Add a timed block that was `length` times as long as usual."""
        self._seconds += seconds
        self._step_times.append(seconds / num_steps)
        self._lengths.append(length)

    @property
    def goes_on(self) -> bool:
        num_timed, protocol = len(self._step_times), self._protocol
        if sum(self._lengths) >= protocol.num_blocks:
            return False
        if num_timed < protocol.min_blocks:
            return True
        if self._seconds > protocol.max_seconds:
            return False
        # However quiet earlier processes were: three blocks of one that flips between two speeds may well agree.
        is_known = num_timed >= FEWEST_BLOCKS and sum(self._lengths) >= self._required
        return not (self._adaptive and is_known)

    @property
    def share(self) -> float:
        """Return the share of the allowed blocks or of the allowed time that is used, 0 to 1."""
        used = sum(self._lengths) / self._protocol.num_blocks
        return min(1.0, max(used, self._seconds / self._protocol.max_seconds))

    @property
    def is_quiet(self) -> bool:
        """Return whether the smallest number of blocks is known to be enough."""
        return self._is_noise_known and self._required <= FEWEST_BLOCKS

    @property
    def length(self) -> int:
        """Return how many times as long as usual the next block should be.

        A process that needs all of its blocks joins several into one: then the baseline, whose steps usually take the
        longest, takes fewer blocks with it.
        """
        num_blocks = self._protocol.num_blocks
        if not self._adaptive or not self._is_noise_known or self._required <= num_blocks:
            return 1
        left = num_blocks - sum(self._lengths)
        return max(1, min(_MAX_LENGTH, left // max(1, FEWEST_BLOCKS - len(self._lengths))))

    @property
    def _is_noise_known(self) -> bool:
        return self._prior is not None or len(self._step_times) >= FEWEST_BLOCKS

    @property
    def _required(self) -> float:
        noise = noise_of(self._step_times, self._lengths)
        if self._prior is None:
            return required_blocks(noise)
        tolerance = max(TOLERANCE, _SHARE_OF_PROCESS_STD * self._prior.process_std)
        return required_blocks(max(noise, self._prior.noise), tolerance)
