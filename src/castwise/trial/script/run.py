"""A script that trains, run until it has taken the steps that are asked for, and stopped after the last one.

The script has the process's main thread, as signal handlers and some libraries need; the calls of the parent are
answered in another one. The step of its first optimizer is where it waits for the next order.
"""

import functools
import itertools
import math
import multiprocessing
import os
import queue
import re
import runpy
import shlex
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from castwise.apply.hardware import make_event, set_current, synchronize
from castwise.apply.precision import read_fp32_precision
from castwise.errors import TechniqueError, UsageError
from castwise.records.schema import Block, Facts, RankSamples, RankStep, StepProfile, WorkBetweenSteps
from castwise.registry.frameworks import framework_of
from castwise.registry.precisions import AS_WRITTEN, find_precision
from castwise.registry.trackers import trackers_off
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserModel, UserWorkload, digest_of
from castwise.trial.distributed import Peers
from castwise.trial.flops import count_flops_of_script
from castwise.trial.kernel_profile import profile_step, rank_step
from castwise.trial.memory import memory_meter
from castwise.trial.numerics import compare_script
from castwise.trial.script.autocast import note_own_precision
from castwise.trial.script.file_overlay import FileOverlay
from castwise.trial.script.hooks import ScriptHooks, num_graphs
from castwise.trial.script.precision import ScriptPrecision
from castwise.trial.script.replacing import on_import, replaces
from castwise.trial.script.techniques import ScriptTechniques
from castwise.trial.steady_run import SETTLED_WINDOWS, WINDOW_SECONDS, settled
from castwise.trial.step import count_dtypes, describe_optimizer
from castwise.trial.user_model.source import digest, is_users, user_files

_LIMIT_SHARE = 0.9  # of the time that the parent waits for an answer
_LEAST_WINDOW = WINDOW_SECONDS / 2  # of warm-up that shows whether the step time has settled; chosen here
_GRACE_SECONDS = 1.0  # for the step in flight when an order's time is up
_FIRST_NOTE_SECONDS = 10.0  # of waiting for a script's steps, after which a line says so; each next one after as many
_END_SECONDS = 2.0  # for the `finally` blocks of a stopped script; a parent waits longer for its process
_STARTS_PYTHON = re.compile(r"python[\d.]*|torchrun|accelerate")
# Work that a script does now and then, such as rollouts, evaluation or logging, if it takes more than steps do.
_MOST_STEPS_KEPT = 100_000
_LEAST_EXTRA_SHARE = 0.05  # of all steps' time; chosen here
_EXTRA_FACTORS = 30.0, 10.0, 3.0  # of the usual step's time: what is much longer, first; chosen here
_LEAST_RARE_FACTOR = 5.0  # of the usual step's time, if it comes less than three times; chosen here
_LEAST_LONE_SHARE = 0.3  # of the timed steps' time, in one of them; chosen here
_LEAST_DOUBTFUL_SHARE = 0.1  # of all time, of what may never come again; chosen here
_MOST_STEPS_WAITED = 32  # until each of a script's optimizers has stepped; chosen here
_NUM_FIRST_STEPS = 5  # that load libraries, search algorithms and compile
_FEWEST_TIMED_STEPS = 20  # fewer do not tell what is usual
_FEWEST_PERIODS, _LEAST_PERIODIC = 3, 0.8  # of work at regular distances, and the share of them that has it
_NUM_PERIODS = 3  # that are tried
_MOST_EXTRA_STEPS = 0.35  # of all steps; chosen here
_MOST_STRETCH_SECONDS = 10.0  # in which a whole period is timed; chosen here
_SEVERAL_PERIODS_SECONDS = 3.0  # in which several are, so that each block has one; chosen here
_MOST_SECONDS_LOOKED = 5.0  # after the first step, for what came before it to come again, if that was brief
# Of a script that ends before it is timed, steps of warm-up are: so many after so many others, in so many blocks.
# Source: chosen here.
_FEWEST_STEPS, _COLD_STEPS, _SHORT_BLOCKS = 8, 3, 5
_INSPECTED_STEPS = 2  # what precedes the first may look at a batch, so the second shows how many samples a step has


class ScriptStopped(BaseException):
    """Ends a script that has taken all its steps; its `finally` blocks run."""


@dataclass(frozen=True)
class Moment:
    """The end of a step."""

    time: Any  # the host's clock, or an event on the device
    num_steps: int  # since the script's begin
    num_samples: int  # trained on since then
    num_values: int  # of all their tensors
    data_seconds: float  # since then
    skipped_steps: int | torch.Tensor  # since then
    loss: torch.Tensor | None


class StepSeconds(NamedTuple):
    """How long a step took, with what the script did since the one before."""

    own: float  # its thread's CPU time and waits for loaders: no other program's; 0 if torch.compile compiled
    wall: float


@dataclass
class Order:
    """What the script is to do next.

    `next_mark` returns after how many steps another moment is taken, given those taken so far, None to wait.
    """

    next_mark: Callable[[Sequence[Moment]], int | None]
    synchronised: bool = True  # whether a moment waits for the device; otherwise it is an event there
    moments: list[Moment] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)


class Ranks:
    """The ranks of a script as rank 0 sees them; here it is the only one."""

    num_ranks = 1

    def allow(self, num_steps: float) -> None:
        """Let all ranks take steps until they have taken so many."""

    def samples_of_others(self) -> int:
        """Return the samples per step of all ranks but this one."""
        return 0

    def begin_profile(self) -> None:
        """Let the other ranks measure their collectives while this one is profiled."""

    def communication_of_others(self) -> tuple[tuple[float, RankStep], ...]:
        """Return the seconds of the other ranks' collectives, and what else their steps take; empty if not known."""
        return ()

    def make_folder(self) -> str:
        """Return a new folder for the files that the script writes."""
        return tempfile.mkdtemp(dir=util.get_temp_dir())  # which is swept

    def stop_looking(self) -> None:
        """Let the other ranks look for no further models."""


class ScriptRun:
    """A script in its process: `run` in the main thread, and everything else in the one that answers the parent."""

    def __init__(self, script: UserModel, precision: str, device: str, techniques: Sequence[str] = ()) -> None:
        self.name = Path(script.path).name
        self._script, self._device = script, torch.device(device)
        self._precision, self._techniques = precision, techniques
        self.hooks: ScriptHooks | None = None
        self.files: FileOverlay | None = None
        self.folder = ""  # for the files that it writes; empty for one of its own
        self._temporary = ""  # for temporary files
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._order: Order | None = None
        self._next_mark: float = math.inf  # the step at whose end something is to be done
        self.num_steps = 0
        self.steps: deque[StepSeconds] = deque(maxlen=_MOST_STEPS_KEPT)  # the last ones, without the first
        self._step_began: tuple[float, float] | None = None  # by the clocks of `StepSeconds`
        self._num_graphs = 0  # that torch.compile has compiled
        self.digest = ""  # of the script's files, once its first step is done
        self.framework = ""  # the outermost one that takes its steps, likewise; empty if the script does so by itself
        self.ranks = Ranks()
        self.ending: BaseException | None = None  # how the script ended, once it has
        self._has_ended = threading.Event()
        self._is_stopping = False
        self.memory = memory_meter(self._device)
        self.memory.reset_peak()
        self._modules = set(sys.modules)
        self._started = ""  # the first command of the script's that may train in its place
        self.own_precision: dict[str, list[str]] = {}  # with each function of torch's that switches autocast
        self.seconds = 0.0  # that its inspection took
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext  # in which the script runs
        self.is_traced = False  # for `castwise fits`, which has less options

    def run(self) -> None:
        """Run the script until it ends or is stopped, as Python would by `python FILE` or `python -m MODULE`."""
        script = self._script
        # This process is a fork server's child, and would start a loader's workers by it, without the script's classes.
        multiprocessing.set_start_method(None, force=True)
        if self._device.type == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a script takes a GPU if it sees one
        else:
            set_current(self._device)
        if "MASTER_PORT" not in os.environ:  # processes of several precisions cannot share a script's default
            os.environ["MASTER_PORT"] = str(get_free_port())  # type: ignore[no-untyped-call]
        sys.argv = [script.path, *script.arguments]
        sys.path.insert(0, os.getcwd() if script.name else str(Path(script.path).parent))
        self.folder = self.folder or self.ranks.make_folder()
        self._temporary = tempfile.mkdtemp(dir=os.path.dirname(self.folder))  # which is swept
        own, kept = [os.getcwd(), str(Path(script.path).parent)], list[str]()
        if script.scratch:
            kept.append(os.path.join(script.scratch, os.path.basename(self.folder)))
            os.makedirs(kept[0], exist_ok=True)  # other ranks have it, too
            os.chdir(kept[0])
        process = os.getpid()
        ending: BaseException = SystemExit(0)
        try:
            self._take_order()
            self.files = FileOverlay(self.folder, self._temporary, own, kept)
            self.hooks = ScriptHooks(
                ScriptPrecision(find_precision(self._precision), self._device.type),
                ScriptTechniques(self._techniques, self._device),
                self._after_step,
            )
            on_import("accelerate.commands.launch", _launch_here)
            with self.around():
                if script.name:
                    runpy.run_module(script.name, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(script.path, run_name="__main__")
        except ScriptStopped:
            pass
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it raises is its end
            ending = error if self.hooks is None else self.hooks.precision.weights.explained(error)
        finally:
            if os.getpid() != process:
                os._exit(0)  # a process that the script forked has come to the script's end
            self.ending = ending
            self._has_ended.set()
            if self._order is not None:
                self._order.is_over.set()

    def follow(self, next_mark: Callable[[Sequence[Moment]], int | None]) -> None:
        self._orders.put(Order(next_mark, synchronised=False))

    def stop(self) -> None:
        """Let the script end at its present step; may be called again."""
        self._orders.put(None)

    def end(self) -> None:
        """Stop the script, and end the process if it goes on: it may have caught the exception that stops it."""
        self.stop()
        has_ended = self._has_ended.wait(_END_SECONDS) and self.ending is not None
        if self.files is not None:
            self.files.switch_off()
        for folder in (self.folder, self._temporary):
            shutil.rmtree(folder, ignore_errors=True)
        if not has_ended:
            os._exit(0)

    def _take_order(self) -> None:
        order = self._orders.get()
        if order is None:
            self._next_mark = 0
            if self._is_stopping:  # it went on after the first exception: `end` ends it, once all is answered
                self._has_ended.set()
                threading.Event().wait()
            self._is_stopping = True
            self._orders.put(None)
            raise ScriptStopped
        self._order = order
        self._go_on(order.next_mark(order.moments))

    def _go_on(self, num_steps: int | None) -> None:
        self._next_mark = math.inf if num_steps is None else self.num_steps + num_steps
        self.ranks.allow(self._next_mark)

    def _after_step(self) -> None:
        """Note the step's time, and do what is due after it, which belongs to no step."""
        if self._step_began is not None:
            own, wall = (now - before for now, before in zip(self._clocks(), self._step_began, strict=True))
            has_compiled, self._num_graphs = num_graphs() > self._num_graphs, num_graphs()
            self.steps.append(StepSeconds(0.0 if has_compiled else min(own, wall), wall))
        try:
            self._carry_on()
        finally:
            self._step_began = self._clocks()

    def _clocks(self) -> tuple[float, float]:
        waited = 0.0 if self.hooks is None else self.hooks.data_seconds
        return time.thread_time() + waited, time.perf_counter()

    def _carry_on(self) -> None:
        """Take a moment if one is due, and wait for the next order after the last one."""
        self.num_steps += 1
        if self.num_steps == 1:
            self.digest = digest(user_files([Path(self._script.path)], self._modules))
            stack = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_stack(sys._getframe())]
            self.framework = framework_of(stack[::-1])
        if self.num_steps < self._next_mark:
            return
        order, hooks = self._order, self.hooks
        assert order is not None, "the script began with one"
        assert hooks is not None, "it calls this"
        if not self._is_stopping and not order.is_over.is_set():
            order.moments.append(
                Moment(
                    self._now(synchronised=order.synchronised),
                    self.num_steps,
                    *hooks.trained_on,
                    hooks.data_seconds,
                    hooks.skipped_steps,
                    hooks.loss,
                )
            )
            mark = order.next_mark(order.moments)
            if mark is not None:
                self._go_on(mark)
                return
            synchronize(self._device)
            order.is_over.set()
        self._take_order()

    def _now(self, *, synchronised: bool) -> Any:
        if self._device.type != "cpu" and not synchronised:
            event = make_event(self._device)
            event.record()
            return event
        synchronize(self._device)
        return time.perf_counter()

    def carry_out(
        self,
        order: Order,
        limit_seconds: float = math.inf,
        on_note: Callable[[str], None] | None = None,
        *,
        may_end: bool = False,
    ) -> list[Moment]:
        """Let the script go on until an order is over, its time is up, or the script has ended; return its moments.

        `on_note` receives a line on what is waited for, now and then.

        Raises:
            BaseException: What the script raised, if it took no step of the order. To end well is nothing to raise if
                it `may_end`.
        """
        if self.ending is None:
            self._orders.put(order)
        passed, pause = 0.0, min(_FIRST_NOTE_SECONDS, limit_seconds / 2) if on_note else math.inf
        while self.ending is None and passed < limit_seconds:
            pause = min(pause, limit_seconds - passed)
            if order.is_over.wait(None if math.isinf(pause) else pause):
                break
            passed += pause
            pause = passed
            if on_note is not None and passed < limit_seconds:
                started = f"; it has started '{self._started}'" if self._started else ""
                on_note(f"waiting for step {self.num_steps + 1} of {self.name}, {passed:.0f} s so far{started}")
        if self.ending is None and not order.is_over.is_set():
            self._next_mark = 0  # the step in flight is the last one
            order.next_mark = lambda _: None
            order.is_over.wait(_GRACE_SECONDS)
        moments, ending = list(order.moments), self.ending
        has_exited = isinstance(ending, SystemExit) and not ending.code
        if ending is not None and not ((moments or may_end) and has_exited):
            self._raise_ending(ending)
        return moments

    def _raise_ending(self, ending: BaseException) -> NoReturn:
        """Raise what the script raised, or a UsageError if it ended by itself before castwise had enough steps."""
        if isinstance(ending, EOFError):
            raise UsageError(f"{self.name} asks for input, and a trial has no terminal. Give it all by arguments.")
        if not isinstance(ending, SystemExit):
            raise ending if isinstance(ending, Exception) else RuntimeError(repr(ending))
        how = f"ended with sys.exit({ending.code!r})" if ending.code else "ended"
        if not self.num_steps:
            raise UsageError(
                f"{self.name} {how} before an optimizer took a step.{self._elsewhere} --verbose prints its output."
            )
        raise UsageError(
            f"{self.name} {how} after optimizer step {self.num_steps}. castwise needs more: let the script train "
            "for longer."
        )

    @property
    def samples_per_step(self) -> int:
        """Return the samples of a step of this rank's, 0 if they are not known."""
        assert self.hooks is not None, "it has run"
        return round(next(iter(self.hooks.samples_seen.values()), 0.0))

    @property
    def _elsewhere(self) -> str:
        """Return what to do if the script trains in a process that it starts; empty if it started none."""
        if not self._started:
            return ""
        return f" It started '{self._started}'. If that trains, name it: castwise run -- {self._started}."

    def _note_command(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Keep the first command that starts another file, or module, of the user's in Python."""
        # Source: the table of audit events in Python's documentation.
        if self._started or event not in ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec"):
            return
        command = arguments[event != "os.system"]
        if isinstance(command, str | bytes | os.PathLike):
            with suppress(ValueError):
                command = shlex.split(os.fsdecode(command))
        words = [os.fsdecode(word) for word in command]
        first = next((i for i, word in enumerate(words) if _STARTS_PYTHON.fullmatch(Path(word).name)), len(words))
        program, *others = (Path(words[first]).name, *words[first + 1 :]) if words[first:] else [""]
        files = [word for word in others if word.endswith(".py") and is_users(os.path.abspath(word))]
        module = others[1].partition(".")[0] if others[:1] == ["-m"] and others[1:] else ""
        if (files and not os.path.samefile(files[0], self._script.path)) or (
            module and PathFinder.find_spec(module, [os.getcwd()]) is not None
        ):
            self._started = shlex.join(["python" if program.startswith("python") else program, *others])

    def raise_too_slow(self, limit_seconds: float) -> NoReturn:
        """Raise a UsageError: the script has not taken its first step, or its second, in time."""
        count = "one optimizer step, and no second," if self.num_steps else "no optimizer step"
        raise UsageError(
            f"{self.name} took {count} within {limit_seconds:.3g} s.{self._elsewhere} Give it more time with "
            + ("--timeout." if self.is_traced else "--timeout or --budget.")
        )

    def inspect(self, limit_seconds: float, on_note: Callable[[str], None]) -> UserWorkload:
        """Run the script for two steps, and return what is known of it.

        Raises:
            UsageError: They took longer than the limit, or the script ended before.
        """
        started = time.perf_counter()
        sys.addaudithook(self._note_command)
        own = self.own_precision = note_own_precision(with_switches=True)
        order = Order(lambda moments: 1 if len(moments) < _INSPECTED_STEPS else None)
        if len(self.carry_out(order, limit_seconds, on_note)) < _INSPECTED_STEPS and self.ending is None:
            self.raise_too_slow(limit_seconds)
        assert self.hooks is not None, "it has run"
        if trackers := trackers_off():
            on_note(f"castwise starts {self.name} several times, with its trackers off: {', '.join(trackers)}")
        samples = self.samples_per_step
        files = user_files([Path(self._script.path)], self._modules)
        self.seconds = time.perf_counter() - started
        return UserWorkload(
            model=self._script.model_copy(update={"digest": self.digest}),
            batch_size=self._script.units_per_step or (samples and samples + self.ranks.samples_of_others()) or 1,
            same_precisions=self.hooks.precision.same_as_written(self.hooks.models, own),
            sources={str(file): digest_of(str(file)) for file in files},
        )


class ScriptTrial:
    """A steady trial of a script: everything between `set_up` and `finish`, as `SteadyRun` has it.

    All blocks of a process are timed in one go, right after steps that are not: while a script waits for its next
    order, its loader's workers go on until they have prepared all they may, so the first steps after that find their
    batches ready. As many steps lead in as batches may have been prepared.

    Args:
        spec: What to measure.
        begun: The script as written, inspected and waiting, which this trial goes on with; None starts it.
    """

    def __init__(self, spec: TrialSpec, begun: ScriptRun | None = None) -> None:
        assert spec.user_model is not None, "a script is one"
        self._spec, self._script = spec, spec.user_model
        self.is_to_be_profiled = spec.protocol.profile_steps > 0
        self.run = begun or ScriptRun(spec.user_model, spec.precision, spec.device, spec.techniques)
        self._blocks: list[Block] = []
        self._step_seconds = 0.0
        self._warm_up_peak: int | None = None
        self._param_dtypes: dict[str, int] = {}
        self._set_up_seconds = 0.0
        self._own_precision: dict[str, list[str]] = {}
        self._notes: list[str] = []
        self._between: WorkBetweenSteps | None = None
        self._warm_up: list[Moment] = []
        self.on_note: Callable[[str], None] | None = None  # receives lines on what is waited for

    @property
    def _hooks(self) -> ScriptHooks:
        assert self.run.hooks is not None, "the script has begun"
        return self.run.hooks

    @property
    def _longer(self) -> str:
        return f"Let it train {'with the first ' if self._hooks.steps_of_others > 2 else ''}for longer"

    def _shorter(self, advice: str) -> str:
        if self._spec.protocol.num_steps is not None:
            return f", or {advice}"
        few = self.run.num_steps // 3  # as many again warm up
        return f", or give it --steps {few}, which shortens warm-up, too" if few > 1 else ""

    @property
    def _limit_seconds(self) -> float:
        return _LIMIT_SHARE * self._spec.protocol.timeout_seconds

    def carry_out(self, order: Order, *, may_end: bool = False) -> None:
        """Let the script go on until an order is over, or raise a UsageError if that takes too long."""
        moments = self.run.carry_out(order, self._limit_seconds, self.on_note, may_end=may_end)
        if not moments and self.run.ending is None:
            self.run.raise_too_slow(self._limit_seconds)

    def set_up(self) -> None:
        """Run the script until its first step is done."""
        started = time.perf_counter() - self.run.seconds
        if not self.run.num_steps:
            self._own_precision = note_own_precision() if self._spec.precision == AS_WRITTEN else {}
            self.carry_out(Order(lambda moments: None if moments else 1))
        else:
            own = self.run.own_precision.items()
            self._own_precision = {kind: lines for kind, lines in own if not kind.startswith("set_autocast")}
        hooks, spec = self._hooks, self._spec
        hooks.techniques.check_found()
        if self._script.digest not in ("", self.run.digest):
            raise UsageError(f"{self.run.name} was changed while it was being measured. Run castwise again.")
        parameters = [parameter for model in hooks.models for parameter in model.parameters()]
        elsewhere = {parameter.device.type for parameter in parameters} - {spec.device_type, "meta"}
        if elsewhere:
            here = "a GPU, which it sees" if self.run.is_traced else f"{spec.device}, by --device"
            raise UsageError(
                f"{self.run.name} trains on {elsewhere.pop()}, and this is for {here}. Give it its argument for that."
            )
        if not parameters and spec.precision != AS_WRITTEN and not hooks.precision.autocast.has_been_on:
            if "deepspeed" in sys.modules:
                row = find_precision(spec.precision)
                none = 'no "bf16", "fp16" and "torch_autocast"'
                raise TechniqueError(
                    "DeepSpeed trains copies of the weights, which castwise cannot change. In its configuration "
                    f"{spec.precision} is {row.frameworks.deepspeed or none}: measure that as-written"
                )
            raise UsageError(
                f"{self.run.name} has no call of a torch.nn.Module in which castwise saw weights of an optimizer. "
                "If it makes its optimizers in their first step, as pyro does, write autocast around the loss: that "
                "castwise changes."
            )
        hooks.precision.check_effect()
        hooks.precision.make_masters(hooks.models, hooks.stepped[0])
        self._param_dtypes = count_dtypes(parameters)
        hooks.precision.put_masters_in()
        self._set_up_seconds = time.perf_counter() - started

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        """Run steps until their time has settled, and return what is now known of the trial."""
        del step_seconds
        started, protocol = time.perf_counter(), self._spec.protocol
        has_settled = False

        def next_mark(moments: Sequence[Moment]) -> int | None:
            nonlocal has_settled
            if not moments:
                return 1
            pairs = [(after.time - before.time, before, after) for before, after in itertools.pairwise(moments)]
            windows = [seconds / (after.num_steps - before.num_steps) for seconds, before, after in pairs]
            has_settled |= settled(
                [each for each, pair in zip(windows, pairs, strict=True) if pair[0] >= _LEAST_WINDOW]
            )
            is_out_of_time = time.perf_counter() - started >= protocol.warm_up_seconds
            hooks, is_soon = self._hooks, moments[-1].num_steps < _MOST_STEPS_WAITED
            is_enough = moments[-1].num_steps >= protocol.warm_up_steps and bool(windows)
            is_enough &= is_out_of_time or not (is_soon and hooks.have_more(*hooks.optimizers))
            is_as_asked = is_enough and protocol.num_steps is not None
            if is_as_asked or (is_enough and (has_settled or is_out_of_time) and not self._waits_for_more_work()):
                return None
            wanted = max(1, round(WINDOW_SECONDS / windows[-1])) if windows else 1
            wanted = min(wanted, moments[-1].num_steps)  # it may be a short script
            return wanted if is_enough else min(wanted, max(1, protocol.warm_up_steps - moments[-1].num_steps))

        moments = self.run.carry_out(Order(next_mark), self._limit_seconds)
        self._warm_up = moments
        if len(moments) < 2 or (self.run.ending is not None and not self._timed_in_warm_up()):
            raise UsageError(
                f"{self.run.name} took {self._steps_in_words()}: too few to time any after warm-up. "
                f"{self._longer}{self._shorter('shorten --warm-up')}."
            )
        first, last = moments[max(0, len(moments) - 1 - SETTLED_WINDOWS)], moments[-1]
        if extra_work([step.own for step in self.run.steps])[1]:
            first = moments[0]  # the last windows may have none of it, or more than their share
        self._step_seconds = (last.time - first.time) / (last.num_steps - first.num_steps)
        self._hooks.stop_looking()
        self.run.ranks.stop_looking()
        self._warm_up_peak = self.run.memory.peak_allocated()
        if self.run.ending is None:
            self.run.memory.reset_peak()
        hooks, num_ranks = self._hooks, self.run.ranks.num_ranks
        hooked = [f"model {type(model).__name__}" for model in hooks.models]
        hooked += [f"optimizer {type(optimizer).__name__}" for optimizer in hooks.stepped]
        hooked += ["DataLoader"] if hooks.uses_loader else []
        if self._script.units_per_step is None:
            unseen = "steps, as no batch is seen (--units-per-step)"
            hooked += [f"samples are {next(iter(hooks.samples_seen), unseen)}"]
        hooked += [f"{num_ranks} ranks"] if num_ranks > 1 else []
        weights, is_as_written = hooks.precision.weights, self._spec.precision == AS_WRITTEN
        own_precision = {**self._own_precision, **(weights.own(hooks.models) if is_as_written else {})}
        return Facts(
            num_parameters=sum(self._param_dtypes.values()),
            units_per_sample=1,
            unit=self._script.unit or "samples",
            param_dtypes=self._param_dtypes,
            fp32_precision=read_fp32_precision(),
            optimizer="; ".join(map(describe_optimizer, hooks.stepped)),
            hooked=tuple(hooked),
            set_up_seconds=self._set_up_seconds,
            warm_up_seconds=time.perf_counter() - started,
            warm_up_steps=last.num_steps,
            settled=has_settled,
            refused_allocations=self.run.memory.refused_allocations(),
            own_precision={kind: tuple(lines) for kind, lines in own_precision.items()},
            lost_updates=weights.lost if is_as_written else None,
            framework=self.run.framework,
            padding_share=hooks.num_padding / (hooks.num_tokens + hooks.num_padding) if hooks.num_tokens else None,
        )

    def run_stretch(self, lead_in_seconds: float, num_blocks: int, block_seconds: float) -> tuple[Block, ...]:
        """Time blocks of steps right after untimed ones, without a pause before or between them."""
        lengths, have_as_much = self._plan_blocks(num_blocks, block_seconds)
        least = max(2, self._hooks.num_prefetched)
        # Blocks lead in, too: of a script that ends before all are done the last ones are what was measured.
        left = max(0, round(lead_in_seconds / self._step_seconds) - least)
        each = max(1, min(left, lengths[0]))  # a block may be as long as what a script does now and then
        leads = (1, least - 1, *[each] * math.ceil(left / each))
        marks = (*leads, *lengths)
        order = Order(lambda moments: (*marks, None)[len(moments)], synchronised=False)
        moments = self.run.carry_out(order, self._limit_seconds, may_end=True)
        # If the time is up before the steps that lead in are done, they are what was measured.
        begin = max(len(moments) - 1 - len(lengths), len(moments) > 2 or self.run.ending is not None)
        lead_in, have_as_much = sum(marks[: begin + 1]), have_as_much and begin == len(leads) - 1
        moments = moments[begin:]
        is_short = self.run.ending is not None and _num_steps(moments) < _FEWEST_STEPS
        if is_short and (earlier := self._timed_in_warm_up()):
            moments, lead_in, have_as_much = earlier, 0, False
            self._notes.append(
                f"it ends after {self.run.num_steps} steps: {_num_steps(moments)} of them were timed, as soon as "
                f"{moments[0].num_steps} had been taken, in which their time may not have settled"
            )
        elif len(moments) < 2:
            raise UsageError(
                f"{self.run.name} took {self._steps_in_words()}, and ended, or its time was up, before any block of "
                f"them was timed. {self._longer}{self._shorter('take fewer --steps')}."
            )
        elif len(moments) <= len(lengths):
            self._notes.append(
                f"the script ended, or its time was up, after {len(moments) - 1} of {len(lengths)} blocks"
            )
        synchronize(torch.device(self._spec.device))
        has_extra = self._note_work_between(
            (self.run.num_steps if is_short else moments[-1].num_steps) - moments[0].num_steps
        )
        marked = moments if have_as_much or not has_extra else [moments[0], moments[-1]]
        blocks = tuple(
            self._block(before, after, lead_in_steps=0 if before is not moments[0] else lead_in)
            for before, after in itertools.pairwise(marked)
        )
        self._blocks += blocks
        return blocks

    def _waits_for_more_work(self) -> bool:
        """Return whether work like that before the first step, such as a rollout, is still to come, if it does."""
        passed, before = sum(step.wall for step in self.run.steps), self._hooks.seconds_before_steps
        is_much = before > _LEAST_EXTRA_SHARE * (before + passed) and passed < max(2 * before, _MOST_SECONDS_LOOKED)
        return is_much and not extra_work([step.own for step in self.run.steps])[1]

    def _steps_in_words(self) -> str:
        others = self._hooks.steps_of_others
        # A second optimizer of the same loop takes one.
        whose = f" of its first optimizer, and then {others} of others, which do not count" if others > 2 else ""
        return f"{self.run.num_steps} steps{whose}"

    def _note_work_between(self, num_steps: int) -> bool:
        """Return whether some of the last steps, which were timed, have extra work.

        If all steps have a larger or smaller share of it, that is kept for the record.
        """
        steps, before = list(self.run.steps), self._hooks.seconds_before_steps
        period, found = extra_work([step.own for step in steps])
        inside = [index for index in found if index >= len(steps) - num_steps]
        passed, extra = sum(step.wall for step in steps), sum(steps[index].wall for index in found)
        timed = sum(steps[index].wall for index in inside) / sum(step.wall for step in steps[-num_steps:])
        if period:
            whole = len(steps) - len(steps) % period
            share = sum(steps[index].wall for index in found if index >= len(steps) - whole)
            share /= sum(step.wall for step in steps[-whole:])
            is_certain = len(found) > 1 or before > 0
            is_missed = abs(share - timed) >= (_LEAST_EXTRA_SHARE if is_certain else _LEAST_DOUBTFUL_SHARE)
            is_missed &= num_steps % period != 0
        else:
            share = (extra + before) / (passed + before)
            is_missed = len(inside) > 1 or timed > _LEAST_LONE_SHARE or share - timed >= _LEAST_DOUBTFUL_SHARE
        if is_missed:
            is_before = not period and before > extra
            self._between = WorkBetweenSteps(
                period_steps=period,
                times_seen=1 if is_before else len(found) + (before > 0),
                seconds=before if is_before else extra / len(found),
                share=share,
                timed_share=timed,
            )
        return bool(inside)

    def _timed_in_warm_up(self) -> list[Moment]:
        """Return the bounds of blocks among the steps of warm-up, after the first ones; none if they are too few."""
        moments = self._warm_up
        cold = max(_COLD_STEPS, moments[0].num_steps + self._hooks.num_prefetched) if moments else 0
        warm = [moment for moment in moments if moment.num_steps >= cold]
        if _num_steps(warm) < _FEWEST_STEPS:
            return []
        bounds = warm[:1]
        for moment in warm:
            if moment.num_steps - bounds[-1].num_steps >= _num_steps(warm) // _SHORT_BLOCKS:
                bounds.append(moment)
        return bounds

    def _plan_blocks(self, num_blocks: int, block_seconds: float) -> tuple[list[int], bool]:
        """Return the steps of each block, and whether each has as much of the work that comes with some steps only."""
        step_seconds, asked = self._step_seconds, self._spec.protocol.num_steps
        period, _ = extra_work([step.own for step in self.run.steps])
        num_steps = asked or max(num_blocks, round(num_blocks * block_seconds / step_seconds))
        if asked is None:
            several = period * min(num_blocks, self._spec.protocol.min_blocks)
            least = several if several * step_seconds < _SEVERAL_PERIODS_SECONDS else period
            num_steps = max(num_steps, least if least * step_seconds < _MOST_STRETCH_SECONDS else 0)
        num_blocks = min(num_blocks, max(1, num_steps // max(1, period)))
        length = num_steps // num_blocks
        has_periods = 0 < period <= length
        if asked is None:
            num_steps = num_blocks * (length - length % period if has_periods else length)
        bounds = [num_steps * number // num_blocks for number in range(num_blocks + 1)]
        lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
        return lengths, has_periods and num_steps % (num_blocks * period) == 0

    def _block(self, before: Moment, after: Moment, lead_in_steps: int) -> Block:
        hooks, is_clock = self._hooks, isinstance(after.time, float)
        scaler = hooks.precision.scaling.scaler
        # The other ranks are taken to train on as many.
        num_ranks = self.run.ranks.num_ranks if self._script.units_per_step is None else 0
        return Block(
            seconds=after.time - before.time if is_clock else before.time.elapsed_time(after.time) / 1e3,
            num_steps=after.num_steps - before.num_steps,
            lead_in_steps=lead_in_steps,
            in_stretch=True,
            loss=None if after.loss is None else after.loss.cpu().double().mean().item(),
            loss_scale=None if scaler is None else scaler.get_scale(),
            num_samples=(after.num_samples - before.num_samples) * num_ranks or None,
            num_values=after.num_values - before.num_values or None,
            skipped_steps=int(after.skipped_steps - before.skipped_steps),
            data_seconds=after.data_seconds - before.data_seconds if hooks.uses_loader else None,
        )

    def finish(self) -> RankSamples:
        """Return everything measured, and stop the script unless it is profiled next."""
        if self._hooks.loss is None:
            self._notes.append("no loss is known, nor whether it diverges: the script never calls backward")
        self._notes += self._hooks.notes
        seen = list(self._hooks.samples_seen.items())
        if self._script.units_per_step is None and len(seen) > 1 and not math.isclose(seen[0][1], seen[1][1]):
            (name, mean), (other, other_mean) = seen[:2]
            self._notes.append(
                f"a step's samples are {name}: {mean:.4g}. That is not {other}, {other_mean:.4g}: if these count, give "
                f"it --units-per-step {other_mean:.0f}"
            )
        files = self.run.files
        assert files is not None, "it has run"
        files.switch_off()  # what castwise writes, such as a trace, is the user's
        if written := files.written():
            others = f" and {len(written) - 1} more of its files are" if len(written) > 1 else ", which it wrote, is"
            self._notes.append(
                f"'{written[0].name}'{others} gone: each process of the script writes into a folder of its own, and no "
                "file was overwritten"
            )
        timed = list(self.run.steps)[-sum(block.num_steps for block in self._blocks) :]
        samples = RankSamples(
            blocks=tuple(self._blocks),
            peak_allocated_bytes=self.run.memory.peak_allocated(),
            peak_reserved_bytes=self.run.memory.peak_reserved(),
            warm_up_peak_allocated_bytes=self._warm_up_peak,
            notes=tuple(self._notes),
            between_steps=self._between,
            compiled_steps=sum(not step.own for step in timed),
            compiled_share=sum(step.wall for step in timed if not step.own) / sum(step.wall for step in timed),
        )
        if not self.is_to_be_profiled:
            self.run.stop()
        return samples

    def profile(self, num_steps: int, trace: Path | None) -> StepProfile:
        """Profile about so many steps after all else, and stop the script."""

        def run(count: int, recorded: AbstractContextManager[Any], lead_in: int = 1) -> int:
            def next_mark(moments: Sequence[Moment]) -> int | None:
                # In the script's thread: it is what is recorded.
                if len(moments) == 1:
                    recorded.__enter__()
                elif moments:
                    recorded.__exit__(None, None, None)
                return (lead_in, count, None)[len(moments)]

            if len(self.run.carry_out(Order(next_mark), self._limit_seconds)) < 2:
                raise UsageError(f"{self.run.name} ended, or its time was up, before {count} steps were profiled")
            return count

        hooks, steps_before = self._hooks, self.run.num_steps
        waited_before = hooks.data_seconds
        self.run.ranks.begin_profile()
        # Times may be those after a wait in which a loader prepares batches; FLOPs and roundings are the same.
        lead_in = max(1, hooks.num_prefetched)
        profile = profile_step(self._spec, hooks, functools.partial(run, lead_in=lead_in), num_steps, trace, Peers())
        if profile.communication is not None and (others := self.run.ranks.communication_of_others()):
            seconds, first = rank_step(profile.communication, torch.device(self._spec.device))
            waited = (hooks.data_seconds - waited_before) / max(1, self.run.num_steps - steps_before)
            steps = (first.model_copy(update={"data_seconds": waited}), *(own for _, own in others))
            update = {"rank_seconds": (seconds, *(each for each, _ in others)), "rank_steps": steps}
            communication = profile.communication.model_copy(update=update)
            profile = profile.model_copy(update={"communication": communication})
        device = torch.device(self._spec.device)
        flops = count_flops_of_script(run, hooks.models, hooks.stepped, device, max(1, profile.num_steps))
        numerics = None
        if self._spec.protocol.numerics:  # last: it changes the step that it observes
            numerics = compare_script(self._spec, run, hooks.models)
        self.run.stop()
        return profile.model_copy(update={"flops": flops, "numerics": numerics})


def _num_steps(moments: Sequence[Moment]) -> int:
    return moments[-1].num_steps - moments[0].num_steps if moments else 0


def _launch_here(module: ModuleType) -> None:
    """Let the one process that Accelerate's launcher would start be this one: `trl sft` calls it for its own script."""

    @replaces(module, "simple_launcher")
    def launch(start: Any, arguments: Any) -> None:
        (program, *words), environment = module.prepare_simple_launcher_cmd_env(arguments)
        if program != sys.executable:
            start(arguments)
            return
        os.environ.update(environment)
        if "OMP_NUM_THREADS" in environment:  # torch has read it by now
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        is_module = words[0] == "-m"
        sys.argv = words[is_module:]
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(words[0]))
        (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")


def extra_work(seconds: Sequence[float]) -> tuple[int, list[int]]:
    """Return how a script's work besides its steps is spread over these, which follow the first one.

    Returns:
        After how many steps it comes again, 0 if it does not, or not at regular distances; and the indices of the steps
        that have it. If one alone has it, it is taken to come again after as many steps, unless it has not.
    """
    if len(seconds) < _FEWEST_TIMED_STEPS:
        return 0, []
    usual, total = statistics.median(seconds), sum(seconds)
    extra = sum(each for each in seconds[1:] if each > _EXTRA_FACTORS[-1] * usual)
    for factor in _EXTRA_FACTORS:
        long = [index for index, each in enumerate(seconds) if index and each > factor * usual]
        is_much = sum(seconds[index] for index in long) >= (_LEAST_EXTRA_SHARE + len(long) / len(seconds)) * total
        if is_much and len(long) <= _MOST_EXTRA_STEPS * len(seconds) and (period := _period_of(long, len(seconds))):
            return period, long
        if sum(seconds[index] for index in long) > _LEAST_PERIODIC * extra:
            break  # the shorter ones may be other programs'
    return _rare_work(seconds)


def _rare_work(seconds: Sequence[float]) -> tuple[int, list[int]]:
    """Return the same of what comes once or twice, or not at regular distances."""
    least = max(_LEAST_RARE_FACTOR * statistics.median(seconds), _LEAST_EXTRA_SHARE * sum(seconds))
    rare = [index for index, each in enumerate(seconds) if each > least and index >= _NUM_FIRST_STEPS]
    # Before the first step may have been the same work as before others, and what comes at each 100th step does so.
    distances = {after - before for before, after in itertools.pairwise(rare if len(rare) > 1 else [-1, *rare])}
    if len(distances) != 1:
        return 0, rare
    period = distances.pop()
    return (period if rare[-1] + period >= len(seconds) else 0), rare


def _period_of(long: Sequence[int], num_steps: int) -> int:
    """Return the regular distance of most of these steps, 0 if there is none or they come too seldom."""
    gaps = Counter(after - before for before, after in itertools.pairwise(long))
    for period, _ in gaps.most_common(_NUM_PERIODS):
        first, _ = Counter(index % period for index in long).most_common(1)[0]
        # Other programs make some other steps longer.
        expected = range(first, num_steps, period)
        if len(expected) >= _FEWEST_PERIODS and len({*expected} & {*long}) > _LEAST_PERIODIC * len(expected):
            return period
    return 0
