"""Command lines that castwise advises, built from the words that the user typed.

Records name no folders and no secrets. What is printed after a run is pasted into the same terminal, and needs the
folders.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from castwise.registry.precisions import precision_row
from castwise.registry.techniques import NONE, join
from castwise.spec.options import ParameterGrid, ScriptOptions, SharedOptions, StepOptions, options_of
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.spec.user_model import is_object, is_script, shown_name, without_secrets

# What an advised command sets itself, also instead of a plan; and `--again`, which forgets what was just measured.
_REPLACED = {option.keyword for option in options_of(ParameterGrid)}
_REPLACED |= {"nodes_per_trial", "plan", "shard", "rounds", "within", "again", "budget"}
# What other commands have in common with `castwise run`.
_SHARED = {
    "why": {option.keyword for kind in (StepOptions, ScriptOptions) for option in options_of(kind)},
    "accuracy": {option.keyword for option in options_of(SharedOptions)},
}


@dataclass(frozen=True)
class TypedLine:
    """What a user typed behind the name of a command of castwise."""

    workloads: tuple[str, ...] = ()  # names, or the words of a script's command
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the words of each, by keyword

    def kept(self, command: str) -> dict[str, tuple[str, ...]]:
        """Return the options that an advised command repeats."""
        names = self.options.keys() - _REPLACED
        names = names & _SHARED.get(command, names)
        return {name: words for name, words in self.options.items() if name in names}

    def words_of(self, shown: str) -> list[str]:
        """Return a workload as it was typed, from its name in records; secrets stay hidden."""
        if is_script(shown):
            one = "".join(self.workloads) or shown  # the command as one word, or not typed
            return without_secrets(self.workloads if len(self.workloads) > 1 else shlex.split(one))
        names = [name.strip() for word in self.workloads for name in word.split(",")]
        own = [name for name in names if ".py" in name or name.startswith("transformers:")]
        return [next((name for name in own if shown_name(name) == shown), shown)]


def read_line(words: Sequence[str], *kinds: type) -> TypedLine:
    """Return what the words behind a command's name say, which were parsed with these classes of options."""
    by_flag = {flag: option for kind in kinds for option in options_of(kind) for flag in option.flags}
    workloads: list[str] = []
    found: dict[str, tuple[str, ...]] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            workloads += rest
        elif not word.startswith("-"):
            workloads.append(word)
        else:
            flag, equals, _ = word.partition("=")
            if flag in by_flag:
                has_value = by_flag[flag].type is not bool and not equals
                found[by_flag[flag].keyword] = (word, next(rest, "")) if has_value else (word,)
    return TypedLine(tuple(workloads), found)


def advised_line(command: str, workload: str, options: Mapping[str, object], typed: TypedLine | None = None) -> str:
    """Return a command line of castwise, with these options by keyword, that can be pasted.

    The workload is named as in records, or as it was typed, if that is at hand; other options that were typed are kept.
    Of objects of a Python session it is a call.
    """
    if is_object(workload):
        written = [f"{name}={json.dumps(value)}" for name, value in options.items()]
        return f"castwise.{'compare' if command == 'run' else command}({', '.join(['...', *written])})"
    kept = {} if typed is None else typed.kept(command)
    flagged = {f"--{name.replace('_', '-')}": str(value) for name, value in options.items()}
    for words in kept.values():
        flagged.pop(words[0].partition("=")[0], None)
    flags = [word for pair in flagged.items() for word in pair]
    flags += [word for words in kept.values() for word in words]
    named = (typed or TypedLine()).words_of(workload)
    before, after = ([], ["--", *named]) if is_script(workload) else (named, [])
    return shlex.join(["castwise", command, *before, *flags, *after])


def measuring_options(specs: Sequence[TrialSpec]) -> dict[str, str | int]:
    """Return the options, by keyword, with which `castwise run` measures these configurations."""
    spec = specs[0]
    script = spec.user_model if spec.is_script else None
    # A loss scale goes to the precisions that scale their loss; if none does, to all.
    scaling = [other for other in specs if precision_row(other.precision).loss_scale != "none"] or specs
    scales = ",".join(dict.fromkeys(other.loss_scale for other in scaling))
    in_setting: dict[str, tuple[str | int, str | int]] = {  # each with what needs no option
        "batch_size": (spec.batch_size, 0),
        "loss_scale": (scales, "" if any(other.changed_loss_scale for other in scaling) else scales),
        "techniques": (",".join(dict.fromkeys(join(other.techniques) for other in specs)), NONE),
        "gpus": (spec.world_size, 1),
        "nodes_per_trial": (spec.num_nodes, 1),
        "parallelism": (spec.parallelism.replace("ddp", "none"), "none"),
        "device": (spec.device, "cuda:0"),
        "data_set": (spec.data_set if spec.user_model is None else SYNTHETIC, SYNTHETIC),
        "seed": (spec.seed, 0),
    }
    options: dict[str, str | int] = {"precision": ",".join(dict.fromkeys(other.precision for other in specs))}
    named = in_setting if script is None else ("techniques",)
    options |= {name: in_setting[name][0] for name in named if in_setting[name][0] != in_setting[name][1]}
    if script is not None:
        asked = {"steps": spec.protocol.num_steps, "units_per_step": script.units_per_step, "unit": script.unit}
        options |= {name: value for name, value in asked.items() if value is not None}
    return options
