"""Tables of what `castwise tune` found: from its JSON, without the trials, under benchmarks/records/searches/."""

import json
from functools import cache
from typing import Any

from stored import RECORDS, markdown, place_of

from castwise.registry.gpus import short_device_name
from castwise.registry.techniques import join
from castwise.show.table import markdown_text
from castwise.show.units import format_bytes, format_duration, format_rate, format_ratio, format_seconds

Search = dict[str, Any]
_ENDINGS = {"nothing left": "nothing left to try", "budget": "the budget", "failed": "the first loop failed"}


@cache
def searches() -> dict[str, Search]:
    """Return every search on record by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((RECORDS / "searches").glob("*.json"))}


def summary() -> str:
    """Return a line per search: its first loop, the fastest loop, and what it took to find it."""
    heading = (
        "workload | GPU | batch | first loop | fastest loop | throughput | over the first loop | peak memory, first "
        "| peak memory | first step | trials | time | ended by"
    )
    cells = []
    places: dict[str, list[str]] = {}
    for name, search in searches().items():
        places.setdefault(_place(search), []).append(name)
        first, last = search["rows"][0], fastest_row(search)
        row = (
            name,
            short_device_name(search["environment"]["gpu"]),
            search["batch_size"],
            f"{first['precision']}, {_rate(search, first)}",
            markdown_text(_loop(search["fastest"])),
            _rate(search, last),
            _total(first, last, _proof(last)),
            format_bytes(first["peak_allocated_bytes"]),
            format_bytes(last["peak_allocated_bytes"]),
            format_seconds(last["first_step_seconds"]),
            search["num_trials"],
            format_duration(search["seconds"]),
            _ENDINGS[search["ending"]],
        )
        cells.append(row)
    measured = [f"- {', '.join(names)}: {place}" for place, names in places.items()]
    return "\n".join([*markdown(heading, "llrrlrrrrrrrl", cells), "", *measured]) + "\n"


def accepted(name: str) -> str:
    """Return the accepted changes of one search, in order."""
    search = searches()[name]
    cells = []
    for row in search["rows"]:
        if row is search["rows"][0]:
            change, ratio = f"first loop, {row['precision']}", "–"
        elif row["outcome"] in ("accepted", "taken"):  # "taken" in older files
            change = row["tried"]
            has_interval = row["speedup_low"] is not None
            ratio = f"{row['speedup']:.3f}"
            ratio += f" [{row['speedup_low']:.3f}, {row['speedup_high']:.3f}]" if has_interval else ""
        else:
            continue
        total, peak = _total(search["rows"][0], row), format_bytes(row["peak_allocated_bytes"])
        cells.append((markdown_text(change), ratio, row["num_processes"] or "–", _rate(search, row), total, peak))
    heading = "change | speed-up over the loop before | processes | throughput | over the first loop | peak memory"
    return "\n".join([_place(search), "", *markdown(heading, "lrrrrr", cells)]) + "\n"


def sentence(name: str) -> str:
    """Return what one search found in a sentence, with its command, machine and date."""
    search = searches()[name]
    first, last = search["rows"][0], fastest_row(search)
    limit = search["memory_limit_bytes"]
    command = f"castwise tune {name}" + (f" --memory {limit / 2**30:g}GiB" if limit else "")
    small = search["fastest_within_memory"] if limit else None
    within = ""
    if small and small != search["fastest"]:
        within = (
            f" (within {limit / 2**30:g} GiB {_rate(search, row_of(search, small))} at batch {small['batch_size']})"
        )
    return (
        f"`{command}` ({_place(search)}): from {_rate(search, first)} to {_rate(search, last)}, "
        f"{_total(first, last, _proof(last))} as fast as the {first['precision']} loop without changes, in "
        f"{format_bytes(last['peak_allocated_bytes'])} instead of {format_bytes(first['peak_allocated_bytes'])}"
        f"{within}; {search['num_trials']} trials in {format_duration(search['seconds'])}.\n"
    )


def fastest_row(search: Search) -> dict[str, Any]:
    """Return the last row of the fastest loop: the one compared with the accepted loop before it."""
    return row_of(search, search["fastest"])


def row_of(search: Search, loop: dict[str, Any]) -> dict[str, Any]:
    """Return the last row of a loop."""
    wanted = (loop["precision"], join(loop["techniques"]), loop["batch_size"])
    rows = [row for row in search["rows"] if row["throughput_per_second"] is not None]
    return next(row for row in reversed(rows) if (row["precision"], row["techniques"], row["batch_size"]) == wanted)


def _rate(search: Search, row: dict[str, Any]) -> str:
    return f"{format_rate(row['throughput_per_second'])} {search['unit']}/s"


def _total(first: dict[str, Any], row: dict[str, Any], *notes: str) -> str:
    """Return a row's speed-up over the first loop, and over fp32 if the first loop is in another precision."""
    over_fp32 = row.get("fp32_speedup") if first["precision"] != "fp32" else None  # not in older files
    more = "; ".join([*([f"{format_ratio(over_fp32)} fp32"] if over_fp32 else []), *notes])
    return format_ratio(row["total_speedup"]) + (f" ({more})" if more else "")


def _proof(row: dict[str, Any]) -> str:
    """Return the interval of a loop's speed-up over the first in the final session, or that there was none."""
    if not is_proven(row):
        return "not measured again"
    return f"proven: {row['total_speedup_low']:.2f} to {row['total_speedup_high']:.2f}"


def is_proven(row: dict[str, Any]) -> bool:
    """Return whether a final session, which older files lack, showed that a loop is faster than the first."""
    return (row.get("total_speedup_low") or 0.0) > 1


def _loop(loop: dict[str, Any]) -> str:
    return ", ".join((loop["precision"], *loop["techniques"]))


def _place(search: Search) -> str:
    return place_of(search["environment"], search["started_at"][:10])
