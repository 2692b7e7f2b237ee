"""What the turns of a speed goal's row come to. Pure: from the record that `goals.py` writes, without torch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from castwise.render.units import format_rate, format_seconds

HAND, OURS = "hand", "castwise"


@dataclass(frozen=True)
class Turn:
    """One process's measurement of one loop."""

    side: str  # `hand` or `castwise`
    loop: str  # in words
    precision: str
    # of a step, or of an epoch of a run with its validation; None where nothing was measured
    seconds: float | None = None
    alone_seconds: float | None = None  # of a step of the same loop on one GPU, where several share one; None else
    # of the first steps, which search and compile; of a run, what its first epoch took longer than the others
    start_seconds: float | None = None
    total_seconds: float | None = None  # of a whole run; None of steps
    accuracy: float | None = None  # after a run's last epoch, where it validates
    message: str = ""  # why nothing was measured

    def document(self) -> dict[str, Any]:
        """Return what a record keeps of it."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


@dataclass(frozen=True)
class Side:
    """What the turns of one side come to: those of its fastest loop."""

    turn: Turn  # turn in the middle, by seconds
    value: float  # goal's figure
    low: float  # of a turn
    high: float
    seconds: tuple[float, ...]  # of each turn


def turn_of_run(turn: Turn, epochs: Sequence[float], accuracy: float | None) -> Turn:
    """Return a run's turn with the figures of its epochs' seconds: the middle of those after the first, if any."""
    middle = statistics.median(epochs[1:] or epochs)
    values = {
        **asdict(turn),
        "seconds": middle,
        "start_seconds": max(0.0, epochs[0] - middle),
        "total_seconds": sum(epochs),
        "accuracy": accuracy,
    }
    return Turn(**values)


def side_of(row: Mapping[str, Any], side: str) -> Side | None:
    """Return what a side's turns come to; None where none of them measured anything."""
    turns = [Turn(**turn) for turn in row["turns"] if turn["side"] == side and turn.get("seconds")]
    if not turns:
        return None
    best = min(turns, key=lambda turn: turn.seconds or 0.0).loop
    own = sorted((turn for turn in turns if turn.loop == best), key=lambda turn: turn.seconds or 0.0)
    values = sorted(value_of(row, turn) for turn in own)
    middle = own[(len(own) - 1) // 2]
    return Side(middle, statistics.median(values), values[0], values[-1], tuple(turn.seconds or 0.0 for turn in own))


def value_of(row: Mapping[str, Any], turn: Turn) -> float:
    """Return the goal's figure of a turn, in SI units."""
    assert turn.seconds is not None
    if row["measure"] == "rate":
        return float(row["units_per_step"]) / turn.seconds
    if row["measure"] == "efficiency":
        assert turn.alone_seconds is not None
        return turn.alone_seconds / turn.seconds
    return float(row["times"]) * turn.seconds


def ratio_of(hand: Side | None, ours: Side | None) -> tuple[float, float, float] | None:
    """Return how many times as fast castwise's loop is, and the least and the most that any two turns give."""
    if hand is None or ours is None:
        return None
    return (
        statistics.median(hand.seconds) / statistics.median(ours.seconds),
        min(hand.seconds) / max(ours.seconds),
        max(hand.seconds) / min(ours.seconds),
    )


def is_reached(row: Mapping[str, Any], value: float) -> bool:
    """Return whether a figure reaches the row's goal."""
    return bool(value >= row["goal"] if row["measure"] in ("rate", "efficiency") else value <= row["goal"])


def format_value(row: Mapping[str, Any], value: float) -> str:
    """Return a figure of the goal in words: "8,123 images/s"."""
    if row["measure"] == "rate":
        return f"{format_rate(value)} {row['unit']}/s"
    if row["measure"] == "efficiency":
        return f"{100 * value:.1f} %"
    return format_seconds(value)


def what_of(row: Mapping[str, Any]) -> str:
    """Return what a row is, in words: "resnet50, batch 256"."""
    said = f"{row['workload']}, batch {row['batch_size']}"
    if row["world_size"] > 1:
        said += f" each, {row['world_size']} GPUs"
    if row["measure"] == "steps":
        said += f", {row['times']} steps"
    if row["measure"] == "run":
        said += f", {row['times']} epochs on {row['data_set']}"
    return said


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row's result in a line."""
    hand, ours = side_of(row, HAND), side_of(row, OURS)
    parts = [
        f"{name} {'–' if side is None else _spread_of(row, side)}" for name, side in (("by hand", hand), (OURS, ours))
    ]
    ratio = ratio_of(hand, ours)
    if ratio is not None:
        parts.append("ratio {:.3f} [{:.3f}, {:.3f}]".format(*ratio))
    sign = "≥" if row["measure"] in ("rate", "efficiency") else "≤"
    goal = f"goal {sign} {format_value(row, row['goal'])}"
    if not row["is_whole"]:
        goal += ": cut short, which tells nothing of it"
    elif ours is not None:
        goal += ": reached" if is_reached(row, ours.value) else ": not reached"
    return f"{row['name']:13} {'; '.join([*parts, goal])}"


def _spread_of(row: Mapping[str, Any], side: Side) -> str:
    said = format_value(row, side.value)
    if len(side.seconds) > 1:
        said += f" ({format_value(row, side.low)} to {format_value(row, side.high)})"
    return said
