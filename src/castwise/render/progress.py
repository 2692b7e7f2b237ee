"""Live progress of a sweep on stderr: which trial, its phase, the time left."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from castwise.records.schema import Trial
from castwise.registry.suites import is_search
from castwise.render.units import format_duration
from castwise.spec.trial import TrialSpec


class LiveProgress:
    """A bar where stderr is a terminal, a line a trial where it is not.

    Args:
        console: Writes to stderr.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._label = self._search = ""
        self._sitting: str | None = None
        self._index = self._count = 0
        self._started = time.monotonic()

    def __enter__(self) -> "LiveProgress":
        """Show the bar, where there is a terminal."""
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[left]}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Show that trial `index` of `count` begins; without a count it is one of a search, or of a climb."""
        if index == 1:
            self._started = time.monotonic()
        self._label, self._index, self._count = spec.label, index, count
        self._search = "search for the largest batch, " if is_search(spec) else ""
        if self._bar is not None and self._task is None:
            self._task = self._bar.add_task("", total=1.0, left="")

    def phase(self, name: str, done: float) -> None:
        """Show the running trial's phase, its share done, and the time left for all."""
        if self._bar is None or self._task is None:
            return
        finished = self._index - 1 + done
        self._bar.update(
            self._task,
            completed=finished / self._count if self._count else done,
            description=f"{self._which}  {self._label}  {name}",
            left=self._left(finished) if self._count else "",
        )

    def ended(self, trial: Trial) -> None:
        """Say how the trial ended: always where there is no bar to show it, else where it did not end well."""
        why = "" if trial.status == "ok" else f": {trial.message}"
        if self._bar is None:
            self._say(f"{self._which}: {self._label}: {trial.status} ({self._took(trial)}){why}")
        elif trial.status != "ok":
            self._say(f"{self._label}: {trial.status}{why}", style="yellow")

    def _took(self, trial: Trial) -> str:
        """Return in words what a trial took; the time of those that took turns is said once, for it was one time."""
        took = format_duration(trial.duration_seconds)
        if trial.session_id is None or trial.status not in ("ok", "diverged"):  # one that failed ended by itself
            return took
        is_new, self._sitting = trial.session_id != self._sitting, trial.session_id
        return f"in a sitting of {took}" if is_new else "in the same sitting"

    @property
    def _which(self) -> str:
        if not self._count:
            return f"{self._search}trial {self._index}"
        return f"trial {self._index} of {self._count}"

    def remark(self, line: str) -> None:
        """Say a line above the bar."""
        self._say(line)

    def _say(self, line: str, style: str | None = None) -> None:
        # A line to the reader is a line to `grep` too, however long.
        self._console.print(line, style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def _left(self, finished: float) -> str:
        # The first trial's own share says little before it is timed; then the mean of what went by is a fair guess.
        if finished < 0.3:
            return ""
        passed = time.monotonic() - self._started
        return f"about {format_duration(passed / finished * (self._count - finished))} left"
