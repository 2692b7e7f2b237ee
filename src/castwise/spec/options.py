"""The options of commands: one class a command, whose fields are `Annotated` with an `Option`.

`castwise.cli.options` makes an option or an argument of a command from each, `castwise.api` a keyword.
"""

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from castwise.errors import UsageError
from castwise.spec.quantities import parse_count, parse_duration, parse_list, parse_memory, parse_numbers, parse_share

_Options = TypeVar("_Options")

# The groups of a command's help, in their order.
Panel = Literal["What to measure", "How long", "Machine", "Output", "Records", "Prices", "Many machines"]

DEFAULT_RESULTS = Path("castwise-results")


_LEAST_BUDGET_SECONDS = 5.0  # `import torch` takes 2.4 s, a trial's process and its warm-up seconds more


def check_budget(seconds: float | None) -> None:
    """Refuse a budget in which not even the first trial can end, before any process is started."""
    if seconds is not None and seconds < _LEAST_BUDGET_SECONDS:
        raise UsageError(
            f"A budget of {seconds:g} s is too short: PyTorch and the first trial take longer. Try --budget 5min."
        )


@dataclass(frozen=True)
class Option:
    """How a field of an options class is given."""

    help: str = ""
    panel: Panel = "What to measure"  # the group of the help that shows it
    keyword: str = ""  # in Python, and with dashes on the command line; by default the field's name
    flags: tuple[str, ...] = ()  # on the command line, if they are not "--" and the keyword
    parse: Callable[[str, Any], Any] | None = None  # from the option's name and what a user gave; None goes by the type
    metavar: str | None = None  # what the help shows as its value, or as the argument; None goes by the type
    completion: Literal["workloads", "precisions", "techniques", "suites"] | None = None  # by the shell
    environment: str | None = None  # the variable that gives it, too
    is_argument: bool = False  # whether the command line has it by its place
    takes_many: bool = False  # whether that argument may be repeated
    default: Any = None  # of the command line, if it differs from that of Python
    hidden: bool = False  # from the help
    # Of the field, filled in by `options_of`.
    name: str = ""
    type: Any = None  # without None
    field_default: Any = None
    is_required: bool = False

    @property
    def label(self) -> str:
        """Return its name on the command line."""
        return self.metavar or self.keyword.upper() if self.is_argument else self.flags[0]


def options_of(options: type) -> Iterator[Option]:
    """Yield the options of a class, its own before those of its bases."""
    hints = get_type_hints(options, include_extras=True)
    by_name = {field.name: field for field in fields(options)}
    names = dict.fromkeys(name for owner in options.__mro__ for name in inspect.get_annotations(owner))
    for name in names:
        if get_origin(hints[name]) is not Annotated:
            continue
        kind, option = get_args(hints[name])
        keyword = option.keyword or name
        default = by_name[name].default
        yield replace(
            option,
            keyword=keyword,
            flags=option.flags or (f"--{keyword.replace('_', '-')}",),
            parse=option.parse or _PARSERS.get(without_none(kind)),
            name=name,
            type=without_none(kind),
            field_default=None if default is MISSING else default,
            is_required=default is MISSING,
        )


def without_none(kind: Any) -> Any:
    """Return a type without the None that it may be instead."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    (rest,) = (part for part in get_args(kind) if part is not NoneType)
    return rest


def parse_options(options: type[_Options], given: Mapping[str, Any], *, on_command_line: bool = False) -> _Options:
    """Return the options that a user gave by keyword; None is as good as not given."""
    values: dict[str, Any] = {}
    for option in options_of(options):
        value = given.get(option.keyword)
        if value is not None:
            label = option.label if on_command_line else option.keyword
            values[option.name] = option.parse(label, value) if option.parse else value
    return options(**values)


# How values of these types are read.
_PARSERS: dict[Any, Callable[[str, Any], Any]] = {
    Path: lambda _, given: Path(given),
    tuple[Path, ...]: lambda _, given: tuple(map(Path, given)),
    tuple[str, ...]: parse_list,
    tuple[int, ...]: parse_numbers,
}

# How values of other kinds are read, and what the help calls them.
DURATION: dict[str, Any] = {"parse": parse_duration, "metavar": "TIME"}
SHARE: dict[str, Any] = {"parse": parse_share, "metavar": "SHARE"}
MEMORY: dict[str, Any] = {"parse": parse_memory, "metavar": "SIZE"}
COUNT: dict[str, Any] = {"parse": parse_count, "metavar": "N"}
WORKLOADS: dict[str, Any] = {"completion": "workloads", "is_argument": True, "takes_many": True}
PRECISIONS: dict[str, Any] = {"keyword": "precision", "completion": "precisions"}


def parse_workload(option: str, value: Any) -> str:
    """Return the name of one workload, or that of a script's command; a list is refused."""
    names = parse_workloads(option, value if isinstance(value, list) else str(value))
    if len(names) > 1:
        listed = ",".join(names)
        raise UsageError(f"{option} is one name here, and '{listed}' is a list. Give one command for each.")
    return names[0]


def parse_model(option: str, value: Any) -> str:
    """Return the name of one workload; a script is refused."""
    from castwise.spec.user_model import is_script, shown_name

    name = parse_workload(option, value)
    if is_script(name):
        raise UsageError(f"'{shown_name(name)}' is a script. castwise run, why, tune and fits take one.")
    return name


def parse_workloads(option: str, given: Any) -> tuple[str, ...]:
    """Return the names of workloads, or the one of a script's command: a text, or its words."""
    from castwise.spec.user_model import is_script, script_command  # it imports pydantic, and help needs none

    words = shlex.split(given) if isinstance(given, str) and is_script(given) else given
    command = None if isinstance(words, str) else script_command([str(word) for word in words])
    return parse_list(option, given) if command is None else (command,)


WORKLOAD_NAMES = (
    "(`castwise list workloads`), or torchvision:NAME, timm:NAME, transformers:CONFIG, FILE.py:FUNCTION, "
    "module.path:FUNCTION"
)
Model = Annotated[str, Option(f"A workload {WORKLOAD_NAMES}.", parse=parse_model, **WORKLOADS)]
ModelOrScript = Annotated[
    str,
    Option(
        f"A workload {WORKLOAD_NAMES}. Or your script with its arguments: -- python train.py --lr 1e-3.",
        parse=parse_workload,
        **WORKLOADS,
    ),
]
TECHNIQUES_HELP = (
    "Loops, comma-separated: none, the plain one, or changes to it (`castwise list techniques`) joined by '+'; tuned "
    "is short for {}. Default: the plain loop."
)
Techniques = Annotated[
    tuple[str, ...] | None, Option(TECHNIQUES_HELP.format("those that most models gain from"), completion="techniques")
]
OptimizerStates = Annotated[
    tuple[str, ...] | None,
    Option(
        "What Adam keeps its state in: fp32, bf16, 8-bit, fp8 or 4-bit, comma-separated. Default: fp32, as torch does.",
        keyword="optimizer_state",
    ),
]
WorldSizes = Annotated[
    tuple[int, ...] | None,
    Option("Numbers of GPUs, comma-separated; each trains on a whole batch. Default: 1.", keyword="gpus"),
]
Parallelisms = Annotated[
    tuple[str, ...] | None,
    Option(
        "How GPUs share a step: ddp (a process each), fsdp (that, with sharded weights) or dp (DataParallel). "
        "Default: ddp.",
        keyword="parallelism",
    ),
]


@dataclass(frozen=True)
class ParameterGrid:
    """What is crossed with what; None is what suits."""

    workloads: Annotated[
        tuple[str, ...] | None,
        Option(
            f"Workloads {WORKLOAD_NAMES}; several apart by spaces or commas. Without one: a short job that suits "
            "this machine.",
            keyword="workload",
            **WORKLOADS,
        ),
    ] = None
    precisions: Annotated[
        tuple[str, ...] | None,
        Option(
            "Precisions, comma-separated; O0 to O3 are understood. Default: all of 16 bits or more on the device.",
            **PRECISIONS,
        ),
    ] = None
    batch_sizes: Annotated[
        tuple[int, ...] | None, Option("Samples per step, comma-separated.", keyword="batch_size")
    ] = None
    lengths: Annotated[
        tuple[int, ...] | None, Option("Tokens of a transformer's sequences, comma-separated.", keyword="seq_len")
    ] = None
    techniques: Techniques = None
    optimizer_states: OptimizerStates = None
    world_sizes: WorldSizes = None
    parallelisms: Parallelisms = None
    loss_scales: Annotated[
        tuple[str, ...] | None,
        Option(
            "none, dynamic, dynamic-apex or numbers, comma-separated; for precisions with float16.",
            keyword="loss_scale",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """What every command that measures takes."""

    timeout_seconds: Annotated[
        float | None,
        Option(
            "How long one phase of a trial may take before it is given up.",
            "How long",
            flags=("--timeout",),
            **DURATION,
        ),
    ] = None
    device: Annotated[
        str | None,
        Option(
            "cpu, cuda or cuda:N; xpu, mps: untried. Default: the first GPU, else cpu.", "Machine", metavar="DEVICE"
        ),
    ] = None
    data_dir: Annotated[
        Path | None,
        Option("The folder real data lies in.", "Machine", keyword="data", metavar="DIR", environment="CASTWISE_DATA"),
    ] = None
    results: Annotated[
        Path | None,
        Option(
            "The folder for records. The same command goes on from them.",
            "Records",
            metavar="DIR",
            default=DEFAULT_RESULTS,
        ),
    ] = None
    again: Annotated[bool, Option("Measure everything again, whatever is recorded.", "Records")] = False
    retry: Annotated[bool, Option("Measure crashed and timed-out trials again.", "Records")] = False


# Of these, what belongs to the machine that measures, not to a plan.
OF_MACHINE = ("results", "data_dir", "again", "retry")


@dataclass(frozen=True, kw_only=True)
class StepOptions(SharedOptions):
    """What every command that times training steps takes."""

    data_set: Annotated[str | None, Option("synthetic, or a real data set: mnist, cifar10, wikitext-2.")] = None
    seed: Annotated[int, Option("Seeds weights, data and dropout.")] = 0


Budget = Annotated[
    float | None,
    Option(
        "Wall time, imports included: 60s, 5min. What is being timed then is finished.",
        "How long",
        keyword="budget",
        **DURATION,
    ),
]


@dataclass(frozen=True, kw_only=True)
class DurationOptions:
    """How long each trial is timed, or for how long rounds of trials go on."""

    budget_seconds: Budget = None
    within: Annotated[
        float | None, Option("Measure in rounds until every speed-up is known within this share.", "How long", **SHARE)
    ] = None
    rounds: Annotated[int | None, Option("Rounds of fresh processes at the most. Default: 5.", "How long", **COUNT)] = (
        None
    )
    seconds: Annotated[
        float | None, Option("Seconds to time each trial for, at the most.", "How long", metavar="S")
    ] = None
    margin: Annotated[
        float | None, Option("Differences up to this count as equal. Default: 1%.", "How long", **SHARE)
    ] = None


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """How a script is measured; None is what suits it."""

    num_steps: Annotated[
        int | None, Option("Steps of a script that are timed in each process.", "How long", keyword="steps", **COUNT)
    ] = None
    warm_up_steps: Annotated[
        int | None, Option("Steps of a script before these, at least.", "How long", keyword="warm_up", **COUNT)
    ] = None
    units_per_step: Annotated[
        int | None, Option("What a step of a script counts as. Default: samples of its loader.", **COUNT)
    ] = None
    step_unit: Annotated[
        Literal["images", "tokens", "samples"] | None,
        Option("What a script's units are called.", flags=("--unit",), metavar="NAME"),
    ] = None
    scratch: Annotated[
        Path | None,
        Option(
            "Where each process of a script gets a working directory of its own; it stays.", "Machine", metavar="DIR"
        ),
    ] = None


_WorkloadsOrScript = Annotated[
    tuple[str, ...] | None,
    Option(
        f"Workloads {WORKLOAD_NAMES}; several apart by spaces or commas. Or your script with its arguments: "
        "-- python train.py --lr 1e-3. Without one: a short job that suits this machine.",
        keyword="workload",
        parse=parse_workloads,
        **WORKLOADS,
    ),
]


@dataclass(frozen=True)
class RunOptions(ParameterGrid, DurationOptions, StepOptions, ScriptOptions):
    """What `castwise run` measures; None is what suits the machine."""

    workloads: _WorkloadsOrScript = None
    nodes_per_trial: Annotated[
        int | None, Option("Nodes that share a trial on several GPUs; --gpus is their sum.", "Many machines", **COUNT)
    ] = None


@dataclass(frozen=True)
class WhyOptions(ParameterGrid, StepOptions, ScriptOptions):
    """What `castwise why` explains; None is what suits the machine."""

    workloads: _WorkloadsOrScript = None
    numerics: Annotated[
        bool,
        Option(
            "Also compare a step's outputs and gradients with float32: where precision is lost first, what underflows "
            "or overflows, and which loss scales fit."
        ),
    ] = False

    precisions: Annotated[
        tuple[str, ...] | None,
        Option(
            "Precisions, comma-separated. Default: those of default, fp32, tf32, fp16-mixed and bf16-mixed that the "
            "device has.",
            **PRECISIONS,
        ),
    ] = None
    trace: Annotated[
        Path | None,
        Option(
            "Write the profiled steps for ui.perfetto.dev: a file for one configuration, a folder for several.",
            "Output",
            metavar="FILE",
        ),
    ] = None
    budget_seconds: Budget = None


def steps_of(options: StepOptions, **others: Any) -> RunOptions:
    """Return the options of `castwise run` that share a command's grid, device, data, records and time limit."""
    names = [field.name for kind in (ParameterGrid, StepOptions, ScriptOptions) for field in fields(kind)]
    return RunOptions(**{name: getattr(options, name) for name in names if hasattr(options, name)} | others)


# Options of all commands that select among what a suite, or a folder of records, has.
OnlyWorkloads = Annotated[
    tuple[str, ...] | None,
    Option("Only these workloads, comma-separated.", keyword="workload", completion="workloads"),
]
OnlyPrecisions = Annotated[
    tuple[str, ...] | None,
    Option("Only these precisions, comma-separated.", **PRECISIONS),
]


@dataclass(frozen=True, kw_only=True)
class SuiteFilter:
    """What of a suite is run, and how long; None takes all."""

    quick: Annotated[bool, Option("A few steps of each run: minutes instead of hours.", "How long")] = False
    epochs: Annotated[
        int | None, Option("Epochs a run at the most; its schedule stays the source's.", "How long", **COUNT)
    ] = None
    max_steps: Annotated[int | None, Option("Steps an epoch at the most.", "How long", **COUNT)] = None
    seeds: Annotated[int, Option("Runs of each configuration, with seeds 0, 1, …", "How long", **COUNT)] = 1
    workloads: OnlyWorkloads = None
    precisions: OnlyPrecisions = None
    world_sizes: Annotated[
        tuple[int, ...] | None, Option("Only these numbers of GPUs, comma-separated.", keyword="gpus")
    ] = None
    synthetic: Annotated[bool, Option("Random samples stand in for real data: time comparable, accuracy not.")] = False
    techniques: Annotated[
        tuple[str, ...] | None,
        Option(TECHNIQUES_HELP.format("the fastest loop known, which the suite's file names"), completion="techniques"),
    ] = None
    validate: Annotated[
        bool, Option("Validate once behind a run whose source does not, outside its time: how accurate the model is.")
    ] = False
