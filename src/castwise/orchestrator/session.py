"""What measures a trial, as the orchestrator sees it: real processes, or a fake in tests."""

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from castwise.records.schema import (
    Block,
    Environment,
    Epoch,
    Facts,
    RankSamples,
    Resumed,
    Shortfall,
    Status,
    StepProfile,
    TracedMemory,
)
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel, UserWorkload

OnProgress = Callable[[float], None]
OnNote = Callable[[str], None]


class TrialFailedError(Exception):
    """A trial failed.

    Attributes:
        log: The end of what the process printed.
        refused: Whether castwise itself refused the request: the user's mistake, not the model's.
        shortfall: By how much memory fell short, if the process reported it.
    """

    def __init__(
        self,
        status: Status,
        message: str,
        log: str = "",
        refused: bool = False,
        shortfall: Shortfall | None = None,
    ) -> None:
        super().__init__(message)
        self.status: Status = status
        self.message = message
        self.log = log
        self.refused = refused
        self.shortfall = shortfall


class ProcessGoneError(TrialFailedError):
    """A trial's process ended without an answer."""


class Session(Protocol):
    """One trial's process or processes. Every method but `close` may raise TrialFailedError."""

    timeout_seconds: float  # that a call may take

    def open(self, device: str) -> Environment:
        """Open the device ("auto": the first GPU, else the CPU) and describe the machine."""

    def check(self, workloads: Sequence[str]) -> None:
        """Make sure that the zoos named have these models."""

    def inspect(self, model: UserModel, limit_seconds: float, on_note: OnNote | None = None) -> UserWorkload:
        """Run the user's code and return what is known of their model.

        A script's steps may take `limit_seconds`; `on_note` receives a line now and then on what is waited for. It
        waits after its second step, and `set_up` goes on from there if it is to be measured as it is written.
        """

    def fetch(self, data_set: str, data_dir: Path) -> None:
        """Download a data set into a folder."""

    def find_weights(self, models: Sequence[str], where: Path | None) -> dict[str, str | None]:
        """Return the file of pretrained weights of each model of torchvision, None if it cannot be had.

        `where` is a file, or a folder with files; None tries torchvision's download.
        """

    def trace_memory(
        self,
        spec: TrialSpec,
        batch_sizes: tuple[int, ...],
        rooms: tuple[int, ...],
        may_compute: bool = True,
        on_note: OnNote | None = None,
    ) -> TracedMemory:
        """Return what a step's memory would be on a GPU, by batch size, and end. No GPU is needed.

        The largest batch for each of `rooms`, amounts of memory in bytes, is among them. A step that needs values is
        computed on the CPU if it may be. `on_note` receives a line now and then on what a script is waited for.
        """

    def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
        """Build model, data and optimizer; a training trial resumes from its checkpoint if there is one."""

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        """Run until the step time has settled; `step_seconds` is that of earlier processes of the configuration."""

    def lead_in(self) -> None:
        """Launch the steps that lead to the next block, and do not wait for them."""

    def run_block(self, length: int = 1) -> Block:
        """Time one block of steps, `length` times as long as usual."""

    def run_stretch(self, lead_in_seconds: float, num_blocks: int, block_seconds: float) -> tuple[Block, ...]:
        """Time blocks of steps right after untimed ones, without a pause before or between them."""

    def run_sustained(self, seconds: float) -> Block:
        """Run steps for about so many seconds without a pause; they are not among the samples."""

    def resume(self) -> Resumed:
        """Return what a training trial runs, and the epochs that are done."""

    def run_epoch(self, on_progress: OnProgress | None = None) -> Epoch:
        """Train one epoch, validate, and write the checkpoint; progress is the share of the epoch, 0 to 1."""

    def finish(self, weights: Path | None = None) -> tuple[RankSamples, ...]:
        """Return all that was measured, by rank, and end the processes; a training trial's weights are kept.

        If the protocol has `profile_steps`, the processes go on until `profile`.
        """

    def profile(self, num_steps: int, trace: Path | None = None) -> StepProfile:
        """Profile steady steps after `finish`, write a trace for Perfetto to a file if one is given, and end."""

    def close(self) -> None:
        """End the processes, whatever they are doing. May be called at any time, and again."""

    @property
    def ready_seconds(self) -> float:
        """Seconds from the request for the processes until their devices were open."""


class Engine(Protocol):
    def start(self, timeout_seconds: float, num_processes: int = 1) -> Session:
        """Start the processes of one trial, one a rank; each phase may take `timeout_seconds`.

        Raises:
            EngineError: No process could be started.
        """


class BackgroundCloser:
    """Ends sessions in the background: a process takes tenths of a second to release its device."""

    THREAD_NAME = "castwise closing"

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def close(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            thread = threading.Thread(target=session.close, name=self.THREAD_NAME)
            try:
                thread.start()
            except RuntimeError:  # no further thread can be started
                session.close()
            else:
                self._threads.append(thread)

    def wait(self) -> None:
        """Wait until all have ended. May be called again."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
