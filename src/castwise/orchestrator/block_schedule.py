"""How many turns a process takes, and how long each is: until its step time is known well enough."""

from dataclasses import dataclass

from castwise.analysis.statistics import FEWEST_BLOCKS, TOLERANCE, noise_of, required_blocks
from castwise.spec.trial import MeasurementProtocol

# How many times as long as usual a turn may be. Source: chosen here; of longer ones too few are left to see outliers.
_LONGEST = 3
# How well a process need be known, as a share of what processes of its cell differ by: the interval is then an eighth
# wider than if each were known exactly, and what further blocks take is better spent on another process.
_ENOUGH = 0.5


@dataclass(frozen=True)
class PriorStats:
    """What earlier processes of the same cell showed.

    Attributes:
        noise: The most noise of any of them, as a share of the step time: that of a block of usual length.
        step_seconds: Seconds a step.
        apart: The standard deviation of their step times, as a share of it; 0 where they are too few to tell.
    """

    noise: float
    step_seconds: float
    apart: float = 0.0


class BlockSchedule:
    """The turns of one process.

    Args:
        protocol: How many blocks it may take, and how long.
        earlier: What other processes of its cell showed; None where there were none.
    """

    def __init__(self, protocol: MeasurementProtocol, earlier: PriorStats | None = None) -> None:
        self._protocol, self._earlier = protocol, earlier
        self._step_times: list[float] = []
        self._lengths: list[int] = []
        self._timed = 0.0

    def take(self, seconds: float, num_steps: int, length: int = 1) -> None:
        """Note a turn.

        Args:
            seconds: What its steps took.
            num_steps: How many they were.
            length: How many times as long as usual it was.
        """
        self._timed += seconds
        self._step_times.append(seconds / num_steps)
        self._lengths.append(length)

    @property
    def goes_on(self) -> bool:
        """Return whether another turn is to be timed."""
        count, protocol = len(self._step_times), self._protocol
        if sum(self._lengths) >= protocol.num_blocks:
            return False
        if count < protocol.min_blocks:
            return True
        return self._timed <= protocol.max_seconds and not self._is_settled

    @property
    def is_quiet(self) -> bool:
        """Return whether the fewest turns are known to do."""
        return self._is_noise_known and self._wanted <= FEWEST_BLOCKS

    @property
    def length(self) -> int:
        """Return how many times as long as usual the next turn is best.

        A process that needs all blocks it may have takes several in a turn: the baseline, whose steps take the longest
        as a rule, then goes with it for fewer turns.
        """
        most = self._protocol.num_blocks
        if not self._is_noise_known or self._wanted <= most:
            return 1
        left = most - sum(self._lengths)
        return max(1, min(_LONGEST, left // max(1, FEWEST_BLOCKS - len(self._lengths))))

    @property
    def _is_settled(self) -> bool:
        # However quiet earlier processes were: of one that flips between two speeds, three blocks may well be alike.
        return len(self._step_times) >= FEWEST_BLOCKS and sum(self._lengths) >= self._wanted

    @property
    def _is_noise_known(self) -> bool:
        return self._earlier is not None or len(self._step_times) >= FEWEST_BLOCKS

    @property
    def _wanted(self) -> float:
        own = noise_of(self._step_times, self._lengths)
        if self._earlier is None:
            return required_blocks(own)
        return required_blocks(max(own, self._earlier.noise), max(TOLERANCE, _ENOUGH * self._earlier.apart))
