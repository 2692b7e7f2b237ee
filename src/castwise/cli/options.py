"""Commands from options classes: a function of such classes becomes a command with their fields as its options."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from castwise.errors import UsageError
from castwise.spec.options import Option, Panel, options_of, parse_options

_MANY_MACHINES: Panel = "Many machines"


@dataclass(frozen=True, kw_only=True)
class PrintOptions:
    format: Annotated[
        Literal["table", "json", "markdown", "csv"], Option("How results are printed on stdout.", "Output")
    ] = "table"
    wide: Annotated[bool, Option("Print all columns: the default ones fit into 80 characters.", "Output")] = False
    verbose: Annotated[
        bool,
        Option("Print all notes in full, and what failed trials printed, tracebacks of your code included.", "Output"),
    ] = False
    words: tuple[str, ...] = ()  # typed behind the command's name


class HelpCommand(TyperCommand):
    """A command whose help shows no types: metavars say more. Options for many machines are in --help-all alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[-1:] == ["--"]:
            raise UsageError("Nothing follows '--'. Your script does, as in: castwise run -- python train.py")
        ctx.obj = tuple(args)
        options = args[: args.index("--")] if "--" in args else args
        if "--" in args and any(parameter.name.startswith("workload") for parameter in self.params):
            args = [*options, "--", *_command(args[len(options) + 1 :])]
        args = ["--help"] if "--help-all" in options else args
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; --help is shown among others, if these are in groups."""
        parameters = _without_types(super().get_params(ctx))
        panels = {getattr(parameter, "rich_help_panel", None) for parameter in parameters}
        if panels != {None}:
            parameters[-1].rich_help_panel = "Output"
        if _MANY_MACHINES in panels:
            is_short = "--help" in (ctx.obj or ())
            for parameter in parameters:
                if getattr(parameter, "rich_help_panel", None) == _MANY_MACHINES:
                    parameter.hidden = is_short
            parameters[-1].help = "Show this message and exit; --help-all shows the options for many machines, too."
        return parameters


def _command(words: list[str]) -> list[str]:
    """Return what follows `--`, unless it is a workload, as a command that begins with Python or a launcher."""
    from castwise.registry.workloads import known_workload  # it imports pydantic, and help needs none
    from castwise.spec.user_model import with_python

    is_workload = known_workload(words[0].split(",")[0]) is not None
    return words if is_workload else with_python(words)


class HelpGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # noqa: ARG005
        elif getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def add_command(
    app: typer.Typer, name: str, function: Callable[..., int | None], examples: str = "", *, hidden: bool = False
) -> None:
    """Add a function to the command line.

    Args:
        app: The command line.
        name: The command's name.
        function: Takes options classes, by the annotations of its parameters, and returns the exit code.
        examples: What the help shows last.
        hidden: Whether the help of castwise leaves it out.
    """
    classes = {key: value for key, value in get_type_hints(function).items() if key != "return"}
    found = [option for options in classes.values() for option in options_of(options)]
    found.sort(key=lambda option: get_args(Panel).index(option.panel))
    parameters = [_parameter(option) for option in found]
    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def call(context: typer.Context, **given: Any) -> None:
        given = {key: value.value if isinstance(value, Enum) else value for key, value in given.items()}
        options = {key: parse_options(kind, given, on_command_line=True) for key, kind in classes.items()}
        for key, value in options.items():
            if isinstance(value, PrintOptions):
                options[key] = replace(value, words=context.obj)
        raise typer.Exit(function(**options) or 0)

    call.__doc__ = function.__doc__
    # Typer reads a command's options off its function's signature.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, cls=HelpCommand, epilog=examples or None, hidden=hidden)(call)


# What the help shows as the value of an option, by its type.
_METAVARS: dict[Any, str] = {
    bool: "",
    int: "N",
    str: "NAME",
    Path: "PATH",
    tuple[str, ...]: "NAMES",
    tuple[int, ...]: "NUMBERS",
}


def _parameter(option: Option) -> inspect.Parameter:
    """Return the parameter of which Typer makes an option or an argument."""
    default = option.field_default if option.default is None else option.default
    choices = get_args(option.type) if get_origin(option.type) is Literal else ()
    words: dict[str, Any] = {"help": option.help, "hidden": option.hidden, "envvar": option.environment}
    if not all(choice in option.help for choice in choices):
        words["help"] += f" One of: {', '.join(choices)}."
    if option.completion is not None:
        words["autocompletion"] = completion_of(option.completion)
    if option.is_argument:
        default = [default] if option.takes_many and default is not None else default
        info = typer.Argument(metavar=option.label, **words)
    else:
        flags = option.flags
        if default is True:
            flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",)
        words["metavar"] = option.metavar or (option.keyword.upper() if choices else _METAVARS.get(option.type))
        info = typer.Option(*flags, rich_help_panel=option.panel, **words)
    kind = _type_on_command_line(option)
    return inspect.Parameter(
        option.keyword,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.is_required else default,
        annotation=Annotated[kind | None if default is None and not option.is_required else kind, info],
    )


def _type_on_command_line(option: Option) -> Any:
    """Return what Typer shall check and show: a text for what castwise reads itself."""
    kind: Any = option.type
    if get_origin(kind) is Literal:
        return Enum("Choice", {name.upper(): name for name in get_args(kind)}, type=str)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    if option.parse is not None and kind is not Path:
        kind = str
    return list[kind] if option.takes_many else kind


def completion_of(kind: str) -> Callable[[str], list[str]]:
    """Return a function for the shell that completes the last name of a list: of workloads, for example."""

    def complete(incomplete: str) -> list[str]:
        # One registry is imported for it, not all.
        if kind == "workloads":
            from castwise.registry.workloads import WORKLOADS

            names = [row.name for row in WORKLOADS]
        elif kind == "precisions":
            from castwise.registry.precisions import NAMED_PRECISIONS, PRECISIONS

            names = [row.name for row in (*PRECISIONS, *NAMED_PRECISIONS)]
        elif kind == "techniques":
            from castwise.registry.techniques import NONE, SETS, TECHNIQUES

            names = [NONE, *SETS, *(row.name for row in TECHNIQUES)]
        else:
            from castwise.registry.suites import SUITE_NAMES

            names = list(SUITE_NAMES)
        # Lists are comma-separated, and the techniques of a loop are joined by "+".
        last = re.split("[,+]" if kind == "techniques" else ",", incomplete)[-1]
        return [incomplete.removesuffix(last) + name for name in names if name.startswith(last)]

    return complete
