"""The table of emitted scripts beside the loops that were measured."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from emitted import ALIKE, RUNG, SCRIPT
from stored import by_place, place_of, ratio_with_interval

from castwise.analysis.statistics import Estimate, estimate
from castwise.registry.techniques import join
from castwise.registry.workloads import find_workload
from castwise.render.table import markdown_text
from castwise.render.units import format_rate
from castwise.spec.plan import TrialSpec

_GOAL = 0.02  # how far from its rung's a script's speed may be


def emitted_table(*paths: Path) -> str:
    """Return a line a loop: its speed, and that of its script over it.

    Args:
        paths: Records of `emitted.py`, such as those of a host's GPUs, whose names begin with their dates. Of a loop
            that several have, the last one's stands.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        document = json.loads(path.read_text())
        where = place_of(document["environment"], path.name[:10])
        found |= {loop["name"]: loop | {"where": where} for loop in document["loops"]}
    loops = list(found.values())
    lines = [
        "\n\n".join(where for where, _ in by_place(loops)),
        "",
        "| what | loop | castwise | script, as many steps | 95 % interval | script as it stands | 95 % interval "
        "| processes a side | within 2 % |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [_line(loop) for loop in loops if loop["turns"] or loop.get("failure")]
    notes = [note for loop in loops for note in _notes(loop["name"], loop["turns"])]
    return "\n".join([*lines, *(["", *notes] if notes else []), ""])


def _notes(name: str, turns: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what stands beside a script that does not keep up: castwise's steps at a stretch, and the GPU's clock."""
    ratio = _ratio(turns, SCRIPT)
    if ratio is None or _said(ratio) != "no":
        return
    at_a_stretch = _ratio(turns, SCRIPT, "at_a_stretch")
    if at_a_stretch is not None:
        yield (
            f"- {name}, script as it stands over the steps that castwise runs on and on after its blocks: "
            f"{ratio_with_interval(at_a_stretch)}"
        )
    clocks = {side: _clock(turns, side) for side in (RUNG, ALIKE, SCRIPT)}
    said = [f"{side} {clock}" for side, clock in clocks.items() if clock]
    if said:
        yield f"- {name}, SM clock and power where most is drawn: {'; '.join(said)}"


def _clock(turns: Sequence[dict[str, Any]], side: str) -> str:
    told = [
        (turn["clock_hertz"], turn["power_watts"])
        for turn in turns
        if turn["side"] == side and turn.get("clock_hertz") is not None
    ]
    if not told:
        return ""
    clocks, powers = zip(*told, strict=True)
    low, high = min(clocks) / 1e6, max(clocks) / 1e6
    return (
        f"{statistics.median(clocks) / 1e6:,.0f} MHz ({low:,.0f} to {high:,.0f}) at {statistics.median(powers):.0f} W"
    )


def _line(loop: dict[str, Any]) -> str:
    spec = TrialSpec.model_validate(loop["spec"])
    what = f"{loop['name']}, batch {spec.batch_size}"
    named = markdown_text(f"{spec.precision}, {join(spec.techniques)}")
    if not loop["turns"]:
        return f"| {what} | {named} | – | – | – | – | – | – | {markdown_text(loop['failure'][:200])} |"
    unit = find_workload(spec.workload).unit
    speed = estimate(_speeds(loop["turns"], RUNG))
    assert speed is not None
    alike, alone = (_ratio(loop["turns"], side) for side in (ALIKE, SCRIPT))
    told = alike or alone
    assert told is not None
    cells = [what, named, f"{format_rate(speed.value)} {unit}/s", *_cells(alike), *_cells(alone)]
    failure = f"; then {markdown_text(loop['failure'][:200])}" if loop.get("failure") else ""
    return f"| {' | '.join([*cells, str(told.n), _said(told) + failure])} |"


def _ratio(turns: Sequence[dict[str, Any]], side: str, of: str = "per_second") -> Estimate | None:
    """Return a side's speed over castwise's, round by round; None where one was not measured."""
    speeds, rungs = _speeds(turns, side), _speeds(turns, RUNG, of)
    if not speeds or len(speeds) != len(rungs):
        return None
    return estimate([script / rung for script, rung in zip(speeds, rungs, strict=True)])


def _cells(ratio: Estimate | None) -> tuple[str, str]:
    if ratio is None:
        return "–", "–"
    return f"{ratio.value:.3f}", f"{ratio.low:.3f} … {ratio.high:.3f}" if ratio.n > 1 else "–"


def _speeds(turns: Sequence[dict[str, Any]], side: str, name: str = "per_second") -> list[float]:
    return [turn[name] for turn in turns if turn["side"] == side and turn.get(name) is not None]


def _said(ratio: Estimate) -> str:
    """Return whether the whole interval is within the goal, or beyond it."""
    if ratio.n == 1:
        return "open"
    if ratio.low >= 1 - _GOAL and ratio.high <= 1 + _GOAL:
        return "yes"
    return "no" if ratio.high < 1 - _GOAL or ratio.low > 1 + _GOAL else "open"
