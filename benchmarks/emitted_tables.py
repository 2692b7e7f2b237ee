"""The table of emitted scripts beside the loops that were measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emitted import ALIKE, RUNG, SCRIPT
from stored import place_of

from castwise.analyze.estimates import Estimate, estimate
from castwise.plan import TrialSpec
from castwise.report.grid import markdown_text
from castwise.report.units import format_rate
from castwise.techniques import join
from castwise.workloads import find_workload

_GOAL = 0.02  # how far from its rung's a script's speed may be


def emitted_table(*paths: Path) -> str:
    """Return a line a loop: its speed, and that of its script over it.

    Args:
        paths: Records of `emitted.py`, such as those of a host's GPUs, whose names begin with their dates.
    """
    documents = [json.loads(path.read_text()) for path in paths]
    places = [place_of(each["environment"], path.name[:10]) for each, path in zip(documents, paths, strict=True)]
    loops = [loop for document in documents for loop in document["loops"]]
    lines = [
        *dict.fromkeys(places),
        "",
        "| what | loop | castwise | script, as many steps | 95 % interval | script as it stands | 95 % interval "
        "| processes a side | within 2 % |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [_line(loop) for loop in loops if loop["turns"] or loop.get("failure")]
    return "\n".join([*lines, ""])


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


def _ratio(turns: Sequence[dict[str, Any]], side: str) -> Estimate | None:
    """Return a side's speed over castwise's, round by round; None where it was not measured."""
    speeds = _speeds(turns, side)
    return estimate([script / rung for script, rung in zip(speeds, _speeds(turns, RUNG), strict=bool(speeds))])


def _cells(ratio: Estimate | None) -> tuple[str, str]:
    if ratio is None:
        return "–", "–"
    return f"{ratio.value:.3f}", f"{ratio.low:.3f} … {ratio.high:.3f}" if ratio.n > 1 else "–"


def _speeds(turns: Sequence[dict[str, Any]], side: str) -> list[float]:
    return [turn["per_second"] for turn in turns if turn["side"] == side]


def _said(ratio: Estimate) -> str:
    """Return whether the whole interval is within the goal, or beyond it."""
    if ratio.n == 1:
        return "open"
    if ratio.low >= 1 - _GOAL and ratio.high <= 1 + _GOAL:
        return "yes"
    return "no" if ratio.high < 1 - _GOAL or ratio.low > 1 + _GOAL else "open"
