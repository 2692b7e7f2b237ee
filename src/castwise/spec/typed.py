"""Command lines that castwise advises, built from the words that the user typed.

Records name no folders and no secrets. What is printed after a run is pasted into the same terminal, and needs the
folders.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from castwise.spec.options import Option
from castwise.spec.user_model import is_script, shown_name, without_secrets


@dataclass(frozen=True)
class TypedLine:
    """What a user typed behind the name of a command of castwise."""

    workloads: tuple[str, ...] = ()  # names, or the words of a script's command

    def words_of(self, shown: str) -> list[str]:
        """Return a workload as it was typed, from its name in records; secrets stay hidden."""
        if is_script(shown):
            quoted = next(filter(is_script, self.workloads), None)  # the command as one word
            return without_secrets(self.workloads if quoted is None else shlex.split(quoted))
        names = [name.strip() for word in self.workloads for name in word.split(",")]
        own = [name for name in names if ".py" in name or name.startswith("transformers:")]
        return [next((name for name in own if shown_name(name) == shown), shown)]


def read_line(words: Sequence[str], options: Sequence[Option]) -> TypedLine:
    """Return what the words behind a command's name say, which were parsed with these options."""
    by_flag = {flag: option for option in options for flag in option.flags}
    workloads: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            workloads += rest
        elif not word.startswith("-"):
            workloads.append(word)
        else:
            flag, equals, _ = word.partition("=")
            if not equals and flag in by_flag and by_flag[flag].type is not bool:
                next(rest, "")
    return TypedLine(tuple(workloads))


def advised_line(command: str, workload: str, options: Mapping[str, object], typed: TypedLine | None = None) -> str:
    """Return a command line of castwise that can be pasted.

    Args:
        command: `run` or `why`.
        workload: Its name in records.
        options: By keyword.
        typed: The command line that the answer is for; without it the workload has its name in records.
    """
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    if is_script(workload):
        words = shlex.split(workload) if typed is None else typed.words_of(workload)
        return shlex.join(["castwise", command, *flags, "--", *words])
    return shlex.join(["castwise", command, *([workload] if typed is None else typed.words_of(workload)), *flags])
