"""Where the seconds of `castwise run --within` go, sitting by sitting.

    python benchmarks/round_cost.py FOLDER ...
    python benchmarks/round_cost.py --run resnet50 --batch-size 128 --within 1% ...

Reads results folders; `--run` makes one first, by `castwise run` with what follows (where a `--results FOLDER` keeps
it), and says what passed before the first sitting and after the last one too. Seconds of a sitting, of all its cells:

- ready: from the request for the processes until the last one's device was open; they start side by side.
- set up: the longest set-up with its first step, which are side by side too, but on a CPU in the first round.
- warm-up, turns: one after another. Of the turns, *timed* are the blocks by the device's clock; the rest is asking and
  telling.
- energy: what the counter's ticks span, a tick or so less than the stretches of steps.
- rest: waiting for the processes of the sitting before to end, telemetry's looks before and after each block, fetching
  results. In records from before a round's
  processes ended beside the next one's start, ending them too, and the first round's set-up of float32 alone.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from castwise.records.schema import Trial
from castwise.records.store import load_folder

_PARTS = ("ready", "set up", "warm-up", "turns", "timed", "energy", "rest", "all")


@dataclass(frozen=True)
class Sitting:
    """What one sitting took.

    Attributes:
        trials: One a cell.
        begun: When the first process was asked for, in seconds since the epoch.
        ended: When the last record was made.
        parts: Seconds, by `_PARTS`.
    """

    trials: Sequence[Trial]
    begun: float
    ended: float
    parts: dict[str, float]


def sittings_of(trials: Sequence[Trial]) -> list[Sitting]:
    """Return the sittings of trials, in the order in which they took place."""
    names = dict.fromkeys(trial.sitting for trial in trials if trial.sitting is not None)
    found = [_sitting([trial for trial in trials if trial.sitting == name]) for name in names]
    return sorted(found, key=lambda each: each.begun)


def _sitting(trials: Sequence[Trial]) -> Sitting:
    begun = [datetime.fromisoformat(trial.started_at).timestamp() for trial in trials]
    ended = max(start + trial.duration_seconds for start, trial in zip(begun, trials, strict=True))
    facts = [trial.facts for trial in trials if trial.facts is not None]
    parts = {
        "ready": max(each.ready_seconds for each in facts),
        "set up": max(each.set_up_seconds + each.first_step_seconds for each in facts),
        "warm-up": sum(each.warm_up_seconds for each in facts),
        "turns": sum(reading.seconds for trial in trials for reading in trial.readings),
        "energy": sum(trial.metered.seconds for trial in trials if trial.metered is not None),
    }
    total = ended - min(begun)
    timed = sum(block.seconds for trial in trials for rank in trial.ranks[:1] for block in rank.blocks)
    parts |= {"rest": total - sum(parts.values()), "timed": timed, "all": total}
    return Sitting(trials, min(begun), ended, parts)


def table_of(sittings: Sequence[Sitting]) -> list[str]:
    """Return a Markdown table, a row a sitting and one of sums."""
    rows = [
        (
            f"{each.trials[0].spec.workload}, batch {each.trials[0].spec.batch_size}, {len(each.trials)} cells",
            each.parts,
        )
        for each in sittings
    ]
    rows.append(("all", {part: sum(each.parts[part] for each in sittings) for part in _PARTS}))
    lines = [f"| sitting | {' | '.join(_PARTS)} |", "|---|" + "---:|" * len(_PARTS)]
    return lines + [f"| {name} | {' | '.join(f'{parts[part]:.1f}' for part in _PARTS)} |" for name, parts in rows]


def main() -> int:
    """Print the table of each folder, or of the command's."""
    if sys.argv[1:2] == ["--run"]:
        return _run(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args().folders:
        print("\n".join([f"{folder}:", *table_of(sittings_of(load_folder(folder)[0]))]))
    return 0


def _run(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        given = _results_of(arguments)
        folder = given or temporary
        command = [sys.executable, "-m", "castwise", "run", *arguments]
        started = time.time()
        code = subprocess.run(command if given else [*command, "--results", folder], check=False).returncode
        ended = time.time()
        sittings = [each for each in sittings_of(load_folder(Path(folder))[0]) if each.begun >= started]
    if not sittings:
        return code or 1
    print("\n".join(table_of(sittings)))
    between = sum(later.begun - earlier.ended for earlier, later in itertools.pairwise(sittings))
    print(
        f"the command took {ended - started:.1f} s: {sittings[0].begun - started:.1f} s before the first sitting, "
        f"{between:.1f} s between sittings, {ended - sittings[-1].ended:.1f} s after the last"
    )
    return code


def _results_of(arguments: Sequence[str]) -> str | None:
    """Return the folder that arguments of `castwise run` name, behind a space or an `=`; None where they name none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--results")
    return parser.parse_known_args(arguments)[0].results  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
