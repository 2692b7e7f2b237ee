"""The table of how fast a loop's steps are in blocks with pauses between them, beside steps at a stretch."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pauses import AT_A_STRETCH
from stored import place_of

from castwise.analyze.estimates import estimate
from castwise.report.units import format_seconds


def pauses_table(*paths: Path) -> str:
    """Return a line a loop and pattern: its step time over that at a stretch.

    Args:
        paths: Records of `pauses.py`, such as those of a host's GPUs, whose names begin with their dates.
    """
    documents = [json.loads(path.read_text()) for path in paths]
    places = [place_of(each["environment"], path.name[:10]) for each, path in zip(documents, paths, strict=True)]
    lines = [
        *dict.fromkeys(places),
        "",
        "| loop of the climb of | steps run | idle | step | over a stretch's | 95 % interval | SM clock | power |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    loops = [loop for document in documents for loop in document["loops"]]
    return "\n".join([*lines, *(line for loop in loops for line in _lines(loop["name"], loop["turns"])), ""])


def _lines(name: str, turns: Sequence[dict[str, Any]]) -> Iterator[str]:
    by_pattern: dict[str, list[dict[str, Any]]] = {}
    for turn in turns:
        by_pattern.setdefault(turn["pattern"], []).append(turn)
    stretch = by_pattern.pop(AT_A_STRETCH)
    for pattern, own in {
        AT_A_STRETCH: stretch,
        **dict(sorted(by_pattern.items(), key=lambda item: _idle(item[1]))),
    }.items():
        pairs = zip(own, stretch, strict=True)
        ratio = estimate([turn["step_seconds"] / other["step_seconds"] for turn, other in pairs])
        assert ratio is not None
        over = "1" if own is stretch else f"{ratio.value:.4f}"
        interval = f"{ratio.low:.4f} … {ratio.high:.4f}" if own is not stretch and ratio.n > 1 else "–"
        step = statistics.median(turn["step_seconds"] for turn in own)
        cells = [name, pattern, f"{_idle(own):.1%}", format_seconds(step), over, interval]
        yield f"| {' | '.join([*cells, *_drawn(own)])} |"


def _idle(turns: Sequence[dict[str, Any]]) -> float:
    return statistics.median(turn["idle_share"] for turn in turns)


def _drawn(turns: Sequence[dict[str, Any]]) -> tuple[str, str]:
    told = [turn for turn in turns if turn["clock_hertz"] is not None]
    if not told:
        return "–", "–"
    clock, power = (statistics.median(turn[key] for turn in told) for key in ("clock_hertz", "power_watts"))
    return f"{clock / 1e6:,.0f} MHz", f"{power:.0f} W"
