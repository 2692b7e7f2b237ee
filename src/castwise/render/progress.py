"""Live progress of a job on stderr: which trial, its phase, the time left."""

import threading
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from castwise.records.schema import Trial
from castwise.registry.suites import is_search
from castwise.render.units import format_duration
from castwise.spec.trial import TrialSpec

_SILENCE_SECONDS = 8.0  # after which a log gets a line
_LEAST_SHARE_TO_PREDICT = 0.3  # of a trial; before, its own share says little


class LiveProgress:
    """A bar if stderr is a terminal, else a line a trial.

    Args:
        console: Writes to stderr.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._label = self._which = self._phase = ""
        self._is_over = threading.Event()
        self._index = self._count = 0
        self._session: str | None = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        """Show the bar if there is a terminal."""
        self._is_over.clear()
        if not self._console.is_terminal:
            threading.Thread(target=self._show_signs_of_life, daemon=True).start()
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
        """Remove the bar."""
        self._is_over.set()
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Show that trial `index` of `count` begins; a count of 0 means that it is unknown, as in a search."""
        if index == 1:
            self._started = time.monotonic()
        self._label, self._index, self._count = spec.label, index, count
        if count:
            self._which = f"trial {index} of {count}"
        else:
            self._which = f"{'search for the largest batch, ' if is_search(spec) else ''}trial {index}"
        if self._bar is not None and self._task is None:
            self._task = self._bar.add_task("", total=1.0, left="")

    def phase(self, name: str, done: float) -> None:
        """Show the running trial's phase, its share done, and the time left for all."""
        self._phase = name
        if self._bar is None or self._task is None:
            return
        completed, left = done, ""
        if self._count:
            finished = self._index - 1 + done
            completed = finished / self._count
            if finished >= _LEAST_SHARE_TO_PREDICT:
                seconds_each = (time.monotonic() - self._started) / finished
                left = f"about {format_duration(seconds_each * (self._count - finished))} left"
        description = f"{self._which}  {self._label}  {name}"
        self._bar.update(self._task, completed=completed, description=description, left=left)

    def ended(self, trial: Trial) -> None:
        """Report how the trial ended: always without a bar, else only if it did not end well."""
        why = "" if trial.status == "ok" else f": {trial.message}"
        if self._bar is None:
            self._print(f"{self._which}: {self._label}: {trial.status} ({self._took(trial)}){why}")
        elif trial.status != "ok":
            self._print(f"{self._label}: {trial.status}{why}", style="yellow")

    def _took(self, trial: Trial) -> str:
        """Return how long a trial took; the time of an interleaved session is reported once, with its first trial."""
        took = format_duration(trial.duration_seconds)
        if trial.session_id is None or trial.status not in ("ok", "diverged"):  # one that failed ended by itself
            return took
        is_new, self._session = trial.session_id != self._session, trial.session_id
        return f"in a session of {took}" if is_new else "in the same session"

    def _show_signs_of_life(self) -> None:
        """Print what is going on if nothing was printed for some seconds: a log file shows no bar."""
        while not self._is_over.wait(_SILENCE_SECONDS / 4):
            if time.monotonic() - self._last_line >= _SILENCE_SECONDS and self._which:
                passed = format_duration(time.monotonic() - self._started)
                self._print(f"{self._which}: {self._label}: {self._phase}, {passed} so far")

    def remark(self, line: str) -> None:
        """Print a line above the bar."""
        self._print(line)

    def _print(self, line: str, style: str | None = None) -> None:
        self._last_line = time.monotonic()
        # Never wrapped: `grep` finds a line whole.
        self._console.print(line, style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)
