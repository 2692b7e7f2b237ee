"""The table of how fast a loop's steps are in blocks with pauses between them, beside steps at a stretch."""

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pauses import AT_A_STRETCH, RESTED
from stored import place_of, ratio_with_interval

from castwise.analysis.statistics import estimate
from castwise.render.units import format_seconds

_AFTER_REST = re.compile(r"(\d+)\.(\d) to .* after a rest of (.*)")
_BEHIND = re.compile(r"each behind (\d+) ms")
_SECONDS_SHOWN, _SHOWN_FROM = 3, 100
Turns = Sequence[dict[str, Any]]


def pauses_table(*paths: Path) -> str:
    """Return a line a pattern: of each loop its step time over that at a stretch, and the clock.

    Args:
        paths: Records of `pauses.py` with the same patterns, whose names begin with their dates.
    """
    documents = [json.loads(path.read_text()) for path in paths]
    places = [place_of(each["environment"], path.name[:10]) for each, path in zip(documents, paths, strict=True)]
    loops = {loop["name"]: _by_pattern(loop["turns"]) for document in documents for loop in document["loops"]}
    heads = [head for name in loops for head in (f"{name.replace(':', ', ')}: step over a stretch's", "SM clock")]
    stretches = [turns[AT_A_STRETCH] for turns in loops.values()]
    steps = [format_seconds(statistics.median(turn["step_seconds"] for turn in turns)) for turns in stretches]
    first = [cell for step, turns in zip(steps, stretches, strict=True) for cell in (f"1 ({step})", _clock(turns))]
    lines = [
        *dict.fromkeys(places),
        "",
        f"| steps run | idle | {' | '.join(heads)} |",
        f"|---|---:|{'---:|' * len(heads)}",
        f"| {AT_A_STRETCH} | – | {' | '.join(first)} |",
        *_lines(list(loops.values())),
    ]
    return "\n".join([*lines, ""])


def _by_pattern(turns: Turns) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for turn in turns:
        found.setdefault(turn["pattern"], []).append(turn)
    return found


def _lines(loops: Sequence[dict[str, list[dict[str, Any]]]]) -> Iterator[str]:
    """Yield a line for every pattern but the stretch: after a rest, then those with pauses, the longest last."""
    idle = {name: statistics.fmean(_idle(turns[name]) for turns in loops) for name in loops[0]}
    del idle[AT_A_STRETCH]
    for name in sorted(idle, key=lambda each: idle[each]):
        cells = [cell for turns in loops for cell in (_ratio(turns[name], turns[AT_A_STRETCH]), _clock(turns[name]))]
        if _is_shown(name):
            yield f"| {_said(name)} | {f'{idle[name]:.1%}' if idle[name] else '–'} | {' | '.join(cells)} |"


def _is_shown(name: str) -> bool:
    """Return whether a pattern has a line: of those that run whole launches as others do, not all."""
    after, rest = _AFTER_REST.match(name), _BEHIND.search(name)
    return (after is None or int(after[1]) < _SECONDS_SHOWN) and (rest is None or int(rest[1]) >= _SHOWN_FROM)


def _said(name: str) -> str:
    after = _AFTER_REST.match(name)
    if after is not None:
        return f"half a second, the {2 * int(after[1]) + int(after[2] == '5') + 1}. after a rest of {after[3]}"
    return name.replace(RESTED, "blocks with telemetry's looks between them").replace(
        " ms of steps", " ms of steps or more"
    )


def _ratio(turns: Turns, stretch: Turns) -> str:
    pairs = zip(turns, stretch, strict=True)
    found = estimate([turn["step_seconds"] / other["step_seconds"] for turn, other in pairs])
    assert found is not None
    return ratio_with_interval(found)


def _idle(turns: Turns) -> float:
    return statistics.median(turn["idle_share"] for turn in turns)


def _clock(turns: Turns) -> str:
    told = [turn["clock_hertz"] for turn in turns if turn["clock_hertz"] is not None]
    return f"{statistics.median(told) / 1e6:,.0f} MHz" if told else "–"
