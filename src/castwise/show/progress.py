"""Live progress of a job on stderr: the results so far, which trial runs, its phase, the time left."""

import io
import math
import threading
import time
from collections.abc import Iterable
from typing import Self

from rich.console import Console, Group
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.status import Status
from rich.text import Text

from castwise.analysis.decide import references_among
from castwise.analysis.result_table import rows_of_steps
from castwise.analysis.steady_metrics import unit_of
from castwise.records.schema import Trial
from castwise.registry.precisions import DEFAULT
from castwise.registry.suites import is_search
from castwise.show.console import print_line
from castwise.show.presentation import print_parts
from castwise.show.run_report import table_parts
from castwise.show.units import format_duration, format_rate, format_ratio
from castwise.spec.trial import TrialSpec

_SILENCE_SECONDS = 8.0  # after which a log gets a line
_LEAST_SHARE_TO_PREDICT = 0.3  # of a trial; before, its own share says little
_FRAMES_PER_SECOND = 4  # drawing takes a CPU that trials may need
_LINES_FOR_BAR = 3


class LiveProgress:
    """The table of the results so far and a bar if stderr is a terminal, else a line for each trial that ends.

    In a search, whose number of trials is not known, a terminal has a line for each trial, too.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self.status: Status | None = None  # while a command gets ready
        self.has_outlook = False  # whether it has been said what is measured
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self.trials: list[Trial] = []  # steady ones: those that ended, and earlier ones
        self.keeps_table = True  # on a terminal, if the job is interrupted
        self._table = Text()
        self._label = self._setting = self._which = self._phase = ""
        self._is_over = threading.Event()
        self._index = self._count = 0
        self._session: str | None = None
        self._started = self._last_line = time.monotonic()
        self._ends = math.inf

    def __enter__(self) -> Self:
        """Show the bar if there is a terminal."""
        self._is_over.clear()
        if not self.console.is_terminal:
            threading.Thread(target=self._show_signs_of_life, daemon=True).start()
        if self.console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[left]}"),
            )
            self._bar = Progress(*columns, console=self.console, auto_refresh=False)
            self._live = Live(
                console=self.console,
                get_renderable=self._frame,
                refresh_per_second=_FRAMES_PER_SECOND,
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the bar, and the table unless the job was interrupted: else it is printed with all results."""
        self._is_over.set()
        self._bar = self._task = None
        if self._live is not None:
            self._live.transient = kind is None or not self._table or not self.keeps_table
            self._live.stop()
            self._live = None

    def known(self, trials: Iterable[Trial], budget_seconds: float | None = None) -> None:
        """Begin the table with results that need not be measured again, and take for how long others are measured.

        A command that begins anew calls it again.
        """
        self.trials = [trial for trial in trials if trial.spec.kind == "steady"]
        self._started = time.monotonic()
        self._ends = self._started + (budget_seconds or math.inf)

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        """Show that trial `index` of `count` begins; a count of 0 means that it is unknown, as in a search."""
        if index == 1 and (self._index, self._label) != (1, spec.label) and math.isinf(self._ends):
            self._started = time.monotonic()  # a session names its first trial twice
        self._label, self._index, self._count = spec.label, index, count
        self._setting = f"{spec.workload} batch {spec.batch_size}"
        if count:
            self._which = f"trial {index} of {count}"
        else:
            self._which = f"{'search for the largest batch, ' if is_search(spec) else ''}trial {index}"
        if self._bar is not None and self._task is None:
            self._task = self._bar.add_task("", total=1.0, left="")

    def phase(self, name: str, done: float) -> None:
        """Show the running trial's phase, its share done (of a session the trials it is worth), and the time left."""
        self._phase = name
        if self.status is not None:
            self.status.update(name)
        if self._bar is None or self._task is None:
            return
        now, finished = time.monotonic(), self._index - 1 + done
        completed, left = done, ""
        if math.isfinite(self._ends):
            completed = min(1.0, (now - self._started) / (self._ends - self._started))
            left = f"at most {format_duration(self._ends - now)} left" if now < self._ends else "time is up, ending"
        elif self._count:
            completed = min(1.0, finished / self._count)
            seconds = (now - self._started) * (self._count / finished - 1) if finished else 0.0
            if finished >= _LEAST_SHARE_TO_PREDICT and seconds > 0:
                # Doubtful speed-ups need more rounds than those that are counted.
                left = f"{'at least' if self._is_in_round else 'about'} {format_duration(seconds)} left"
        description = name if self._is_in_round else f"{self._which}  {self._label}  {name}"
        self._bar.update(self._task, completed=completed, description=description, left=left)

    @property
    def _is_in_round(self) -> bool:
        """Return whether a round is measured: it is of several configurations, and its phases name it."""
        return self._phase.startswith("round ")

    def ended(self, trial: Trial) -> None:
        """Report how the trial ended: in the table, or in a line with its throughput and speed-up so far."""
        is_steady = trial.spec.kind == "steady"
        if is_steady:
            self.trials.append(trial)
        failure = "" if trial.status == "ok" else f": {trial.message}"
        figures = self._figures(trial) if is_steady and trial.status == "ok" else ""
        if self._live is None:
            which = self._phase.partition(":")[0] if self._is_in_round else self._which
            took = f" ({format_duration(trial.duration_seconds)})"
            if trial.session_id is not None and trial.status in ("ok", "diverged"):  # one that failed ended by itself
                # The time of an interleaved session is reported once, with its first trial.
                took = "" if trial.session_id == self._session else took
                self._session = trial.session_id
            self._print(f"{which}: {self._label}: {figures or trial.status}{took}{failure}")
            return
        if not (self._count or self._is_in_round) or not is_steady:
            label = self._label.removeprefix(f"{trial.spec.workload} ")
            style = None if trial.status == "ok" else "yellow"
            self._print(f"  {label}: {figures or trial.status}{failure}", style)
            return
        if trial.status != "ok":
            self._print(f"{self._label}: {trial.status}: {trial.message}", style="yellow")
        # The table of the results so far: its end, if the terminal is too low for all of it.
        text = io.StringIO()
        console = Console(file=text, width=self.console.width, force_terminal=True, emoji=False, force_jupyter=False)
        print_parts(table_parts(rows_of_steps(self.trials))[:2], console)
        lines = text.getvalue().splitlines()
        self._table = Text.from_ansi("\n".join(lines[-max(self.console.height - _LINES_FOR_BAR, 1) :]))
        self._live.refresh()

    def _figures(self, trial: Trial) -> str:
        """Return a configuration's figures so far: `2,560 images/s, 3.00× default`."""

        def setting(each: Trial) -> tuple[str, int, int]:
            return each.spec.workload, each.spec.batch_size, each.spec.world_size

        rows = rows_of_steps([each for each in self.trials if setting(each) == setting(trial)])
        row = next(row for row in rows if row.trial.spec.configuration == trial.spec.configuration)
        if row.throughput is None:
            return ""
        text = f"{format_rate(row.throughput)} {unit_of(trial)}/s"
        reference = next((each for each in references_among(rows) if each.trial.status == "ok"), row)
        ratio = None if reference is row else row.over(reference)
        name = "default" if reference.trial.spec.precision == DEFAULT else reference.trial.spec.precision
        return text if ratio is None else f"{text}, {format_ratio(ratio.value)} {name}"

    def _frame(self) -> Group:
        # A terminal echoes Ctrl-C as "^C" at the end of the bar: without room for it, all would move by a line.
        bar = [Constrain(self._bar, self.console.width - len("^C") - 1)] if self._bar else []
        return Group(*([self._table] if self._table else []), *bar)

    def _show_signs_of_life(self) -> None:
        """Print what is going on if nothing was printed for some seconds: a log file shows no bar."""
        while not self._is_over.wait(_SILENCE_SECONDS / 4):
            if time.monotonic() - self._last_line >= _SILENCE_SECONDS and self._which:
                passed = format_duration(time.monotonic() - self._started)
                where = self._setting if self._is_in_round else f"{self._which}: {self._label}"
                self._print(f"{where}: {self._phase}, {passed} so far")

    def remark(self, line: str) -> None:
        self._print(line)

    def _print(self, line: str, style: str | None = None) -> None:
        self._last_line = time.monotonic()
        print_line(self.console, line, style)
