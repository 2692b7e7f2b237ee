"""The tables of climbs: their accounts (climbs.py) beside the trials under benchmarks/records/tune/."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from climbs import Account
from stored import IMAGES, NOT_MEASURED, where_of

from castwise.analysis import steady_metrics
from castwise.analysis.speedup import speedup_estimate
from castwise.analysis.statistics import Estimate
from castwise.records.schema import Trial
from castwise.registry.techniques import join, parse_techniques
from castwise.render.console import took_words
from castwise.render.provenance import measured_on
from castwise.render.table import markdown_grid, markdown_text
from castwise.render.units import format_bytes, format_duration, format_rate, format_ratio, format_seconds
from castwise.spec.plan import SYNTHETIC, TrialSpec
from castwise.tune.candidates import Ending, by_units, said_of
from castwise.tune.changes import Change, change_between
from castwise.tune.render import COLUMNS, why_of
from castwise.tune.rows import LIMITED, ResultRow, each_once
from castwise.tune.time_budget import BUDGET_SECONDS, SHORT_BUDGET_SECONDS

Climb = tuple[str, Account, Sequence[Trial]]  # the folder's name, the account, the trials
_ENDINGS: dict[Ending, str] = {"nothing left": "nothing left", "budget": "budget", "failed": "no plain loop"}
_DEFAULT_BUDGETS = (BUDGET_SECONDS, SHORT_BUDGET_SECONDS)


def picture_of(name: str) -> str:
    """Return what the picture of a climb's waterfall is called."""
    return f"tune-{name}.png"


def summary(climbs: Sequence[Climb], document: str) -> str:
    """Return a line a climb: where it began, the fastest loop, what it took to find it.

    Args:
        climbs: The folder's name, the account and the trials of each.
        document: Where its ladder is written out, from the document that this table is in.
    """
    if not climbs:
        return NOT_MEASURED
    lines = [
        "| what | plain loop | fastest loop | throughput | over the plain loop | peak memory, plain | peak memory "
        "| first step | trials | wall time | ended by |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, account, trials in climbs:
        first, last = account["rows"][0], fastest_row(account)
        unit = steady_metrics.unit_of(trials[0])
        cells = (
            f"[{name}]({document}#{_anchor(name)}), batch {trials[0].spec.batch_size}",
            f"{format_rate(first['throughput_per_second'])} {unit}/s",
            markdown_text(_loop(account["fastest"])),
            f"{format_rate(last['throughput_per_second'])} {unit}/s",
            format_ratio(last["total_speedup"]),
            format_bytes(first["peak_allocated_bytes"]),
            format_bytes(last["peak_allocated_bytes"]),
            format_seconds(last["first_step_seconds"]),
            str(len(trials)) + (f", {known} on record already" if (known := account.get("num_recorded")) else ""),
            format_duration(account["seconds"]),
            _ended(account),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n" + _places(climbs) + "\n"


def ladders(climbs: Sequence[Climb]) -> str:
    """Return every climb with its heading and its picture."""
    if not climbs:
        return NOT_MEASURED
    return "\n".join(f"## {name}\n\n{_shown(name)}{ladder(account, trials)}" for name, account, trials in climbs)


def ladder(account: Account, trials: Sequence[Trial]) -> str:
    """Return what was tried, rung by rung, and what it came to, as `castwise tune` prints it."""
    unit = steady_metrics.unit_of(trials[0])
    lines = _over_rungs([_line(row, trials[0].spec, unit) for row in account["rows"]], trials)
    tried = [line for line in lines if line.outcome != "unsupported"]
    refused = [why_of(line) for line in lines if line.outcome == "unsupported"]
    failed = [f"{line.tried}: {line.reason}" for line in lines if line.outcome == "failed"]
    said = [*account["sentences"], *failed, *(f"unsupported: {reason}" for reason in refused)]
    remarks = (f"- {markdown_text(line)}" for line in said)
    return "\n".join([markdown_text(_headline(trials)), "", *markdown_grid(COLUMNS, tried), "", *remarks]) + "\n"


def in_a_sentence(name: str, account: Account, trials: Sequence[Trial]) -> str:
    """Return what a climb came to in a sentence, with where and when."""
    first, last = account["rows"][0], fastest_row(account)
    unit, spec = steady_metrics.unit_of(trials[0]), trials[0].spec
    took = took_words(len(trials), account.get("num_recorded", 0), account["seconds"])
    command = f"castwise tune {name}{_limit(account)}{_budget(account)}"
    return (
        f"`{command}` ({where_of(trials[0])}): from {format_rate(first['throughput_per_second'])} to "
        f"{format_rate(last['throughput_per_second'])} {unit}/s, {format_ratio(last['total_speedup'])} the plain "
        f"{spec.precision} loop's, in {format_bytes(last['peak_allocated_bytes'])} instead of "
        f"{format_bytes(first['peak_allocated_bytes'])}; {took}.\n"
    )


def _limit(account: Account) -> str:
    """Return the memory limit that a climb was given, as its command has it."""
    limit = account["memory_limit_bytes"]
    return f" --memory {limit / 2**30:g}GiB" if limit else ""


def _budget(account: Account) -> str:
    """Return the budget that a climb was given, as its command has it."""
    budget = account["budget_seconds"]
    return "" if budget is None or budget in _DEFAULT_BUDGETS else f" --budget {budget:g}s"


def _ended(account: Account) -> str:
    """Return why a climb ended, with the time that it had where that was it."""
    ending, budget = account["ending"], account["budget_seconds"]
    return _ENDINGS[ending] + (f", {format_duration(budget)}" if ending == "budget" and budget is not None else "")


def fastest_row(account: Account) -> dict[str, Any]:
    """Return the row of the fastest loop: its last mention is the one beside the rung below."""
    fastest = account["fastest"]
    wanted = (fastest["precision"], join(tuple(fastest["techniques"])), fastest.get("batch_size"))
    rows = [row for row in account["rows"] if row["throughput_per_second"] is not None]
    return next(row for row in reversed(rows) if (row["precision"], row["techniques"], row.get("batch_size")) == wanted)


def _over_rungs(lines: Sequence[ResultRow], trials: Sequence[Trial]) -> list[ResultRow]:
    """Return lines with all ratios over the rung below, each loop once on a rung.

    Accounts of before have some over a loop that is no rung, and say so by a change that is not one of the rung below.
    """
    rungs = {line.rung: line.spec for line in lines if line.outcome in (None, "taken") and not line.is_limited}
    told = (_over_rung(line, rungs, trials) for line in lines)
    return each_once([_unproven(line) if _is_alone(line, rungs) else line for line in told])


def _is_alone(line: ResultRow, rungs: Mapping[int, TrialSpec]) -> bool:
    """Return whether a line is called the second best where nothing was better."""
    return line.outcome == "second best" and line.rung not in rungs and not line.is_limited


def _unproven(line: ResultRow) -> ResultRow:
    return replace(line, outcome="unproven")


def _over_rung(line: ResultRow, rungs: Mapping[int, TrialSpec], trials: Sequence[Trial]) -> ResultRow:
    below = rungs.get(line.rung - 1, line.spec)
    change = change_between(below, line.spec).name
    if line.ratio is None or line.is_limited or set(line.tried.split(" + ")) == set(change.split(" + ")):
        return line
    sides = [[trial for trial in trials if trial.spec.cell == spec.cell] for spec in (below, line.spec)]
    ratio = by_units(speedup_estimate(*sides), below, line.spec)
    if ratio is None:
        return replace(line, tried=change, ratio=None)
    outcome, reason = said_of(ratio)
    return replace(line, tried=change, ratio=ratio, outcome=outcome, reason=reason)


def _spec(row: dict[str, Any], plain: TrialSpec) -> TrialSpec:
    """Return the loop that a row is about."""
    techniques = parse_techniques(row["techniques"])
    batch_size = row.get("batch_size", plain.batch_size)
    return Change(row["precision"], batch_size=batch_size).on(plain.model_copy(update={"techniques": techniques}))


def _line(row: dict[str, Any], plain: TrialSpec, unit: str) -> ResultRow:
    low, high = row["speedup_low"], row["speedup_high"]
    ratio = None
    if row["speedup"] is not None:
        bounds = (math.nan if low is None else low, math.nan if high is None else high)
        ratio = Estimate(row["speedup"], *bounds, row["num_processes"])
    return ResultRow(
        rung=row["rung"],
        tried=row["tried"],
        is_limited=row["tried"].endswith(LIMITED),  # accounts have but the words
        spec=_spec(row, plain),
        ratio=ratio,
        total=row["total_speedup"],
        outcome=row["outcome"],
        reason=row["reason"],
        throughput=row["throughput_per_second"],
        unit=unit,
        first_step_seconds=row["first_step_seconds"],
        peak_bytes=row["peak_allocated_bytes"],
        held_bytes=row.get("peak_reserved_bytes"),
    )


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower())


def _headline(trials: Sequence[Trial]) -> str:
    first = trials[0]
    data = "synthetic data" if first.spec.data_set == SYNTHETIC else first.spec.data_set
    timed = "steps" if first.spec.kind == "steady" else "epochs"
    return f"{first.spec.workload}, batch {first.spec.batch_size}, {timed} on {data}, on {measured_on(trials)}"


def _places(climbs: Sequence[Climb]) -> str:
    """Return where and when they were measured; with their names where that differs."""
    places: dict[str, list[str]] = {}
    for name, _, trials in climbs:
        places.setdefault(measured_on(trials), []).append(name)
    if len(places) == 1:
        return f"Measured on {next(iter(places))}."
    return "\n".join(f"- {', '.join(names)}: on {place}" for place, names in places.items())


def _shown(name: str) -> str:
    picture = picture_of(name)
    return f"![What each change to {name} bought](images/{picture})\n\n" if (IMAGES / picture).is_file() else ""


def _loop(loop: dict[str, Any]) -> str:
    return f"{loop['precision']}, {', '.join(loop['techniques']) or 'plain loop'}"
