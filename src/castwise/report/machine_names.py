"""Names of machines: the GPU's model, and then whatever tells machines with one model apart."""

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from castwise.records.schema import Environment
from castwise.registry.gpus import short_device_name
from castwise.spec.grouping import grouped

_CORES = re.compile(r" \((\d+) cores\)$")
_CONTAINER = re.compile(r"[0-9a-f]{12}")  # the host name that a container gets if nobody names it


def machine_names(sides: Sequence[Sequence[Environment]], folders: Sequence[str]) -> list[str]:
    """Return a short name for each side of a comparison, with its environments and its folder; no two are alike."""
    traits = []
    for environments, folder in zip(sides, folders, strict=True):
        values = [list(dict.fromkeys(each)) for each in zip(*map(_traits, environments), strict=True)]
        found = [" / ".join(each) if len(each) <= 2 else "" for each in values]
        last_part = PurePath(folder).name
        device = " / ".join(dict.fromkeys(short_device_name(each.device_name) for each in environments))
        *known, version, gpu, fingerprint = found
        traits.append([device, *known, last_part, folder, version, gpu, fingerprint])
    words = [", ".join(each) for each in _distinctions(traits, first=1)]
    # A device's name that all sides share is left out if it is long.
    is_long = len({side[0] for side in traits}) == 1 and len(traits[0][0]) > 16 and all(words)
    names = [
        own if is_long else f"{device} ({own})" if own else device
        for (device, *_), own in zip(traits, words, strict=True)
    ]
    return [f"{name} #{names[:n].count(name) + 1}" if names.count(name) > 1 else name for n, name in enumerate(names)]


def names_by_fingerprint(environments: Iterable[Environment]) -> dict[str, str]:
    """Return what readers call each machine: `H200`, and `H200, 64-core host` if there is another one."""
    machines = {each.fingerprint: each for each in environments}
    words = distinctions(machines.values())
    return {key: ", ".join(filter(None, (short_device_name(m.device_name), words[key]))) for key, m in machines.items()}


def distinctions(environments: Iterable[Environment]) -> dict[str, str]:
    """Return by fingerprint what tells each machine from the others: `64-core host`; empty if there is only one."""
    machines = {each.fingerprint: _traits(each) for each in environments}
    return {name: ", ".join(words) for name, words in zip(machines, _distinctions([*machines.values()]), strict=True)}


def _traits(machine: Environment) -> list[str]:
    """Return in words in what machines with one GPU model may differ, what a reader knows best first."""
    cores = _CORES.search(machine.cpu)
    commit = f" at {machine.commit.rstrip('+')[:8]}" if machine.commit else ""
    return [
        "" if _CONTAINER.fullmatch(machine.hosts) else f"host {machine.hosts}",
        f"{cores[1]}-core host" if cores else "",
        f"{machine.num_gpus} GPU{'' if machine.num_gpus == 1 else 's'}",
        short_device_name(_CORES.sub("", machine.cpu)),
        f"torch {machine.torch}",
        f"driver {machine.driver}",
        "packed" if machine.packed else "",
        "" if machine.power_limit_watts is None else f"{machine.power_limit_watts:.0f} W",
        f"castwise {machine.castwise}{commit}",
        (machine.gpu_uuid or "")[:12],
        f"machine {machine.fingerprint}",
    ]


def _distinctions(traits: Sequence[Sequence[str]], first: int = 0) -> list[list[str]]:
    """Return for each machine as few of its traits, in order, as tell it from the others."""
    chosen: list[list[str]] = [list(machine[:first]) for machine in traits]
    for index in range(first, max(map(len, traits), default=0)):
        for numbers in grouped(range(len(chosen)), lambda number: tuple(chosen[number])).values():
            if len({traits[number][index] for number in numbers}) > 1:
                for number in numbers:
                    chosen[number] += [traits[number][index]] if traits[number][index] else []
    return [words[first:] for words in chosen]
