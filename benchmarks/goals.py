"""The speed goals: castwise's best loop and the best one by hand, in turns in one process tree, and their ratio.

    python benchmarks/goals.py [--rows resnet50,mlp] [--out FILE] [--data DIR] [--first] [--warm] ...

Every turn is a process of its own: each loop by hand, each of castwise's, then the fastest by hand again, so that a
noisy machine shows. `goal_rows.py` has the rows.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from goal_rows import GoalRow, find_rows
from goal_specs import Setting, data_set_of, run_recipe, steps_per_epoch, tiny
from goal_summary import HAND, OURS, Turn, line_of
from goal_turns import Referee

from castwise.orchestrator.machine import detect_machine
from castwise.records.store import Store
from castwise.registry.datasets import default_data_dir
from castwise.registry.workloads import find_workload
from castwise.worker.models import build_task

_TINY_SECONDS = 0.05


def describe(row: GoalRow, setting: Setting) -> dict[str, Any]:
    """Return what a record says of a row before anything of it is measured."""
    recipe = run_recipe(row, setting)
    workload = find_workload(row.workload)
    return {
        "name": row.name,
        "workload": row.workload,
        "batch_size": row.batch_size,
        "world_size": row.world_size,
        "measure": row.measure,
        "goal": row.goal,
        "unit": workload.unit,
        "units_per_step": row.batch_size * build_task(workload).units_per_sample * row.world_size,
        "times": row.num_steps if recipe is None else recipe.epochs,
        "epochs_run": None if recipe is None else recipe.num_epochs,
        "steps_per_epoch": None if recipe is None else steps_per_epoch(row, recipe),
        "data_set": data_set_of(row, setting),
        # What is not the row as it stands has no figure to be held against its goal.
        "is_whole": not setting.is_tiny and (recipe is None or recipe.max_steps is None),
    }


def measure(row: GoalRow, referee: Referee) -> dict[str, Any]:
    """Return a row's record."""
    started = time.monotonic()
    document = describe(row, referee.setting) | {"turns": [turn.document() for turn in referee.turns(row)]}
    return document | {"seconds": time.monotonic() - started}


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="names joined by commas; all by default")
    parser.add_argument("--device", help="cpu, cuda:N; the first GPU by default")
    parser.add_argument("--data", type=Path, default=default_data_dir(), help="where real data lies")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the timed blocks of a turn")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="further turns by hand, with castwise's in between; 0 gives each loop one turn",
    )
    parser.add_argument("--epochs", type=int, help="cut runs short after so many epochs")
    parser.add_argument("--max-steps", type=int, help="cut a run's epochs short after so many steps")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds of a row")
    parser.add_argument(
        "--first", action="store_true", help="the first loop of either side, the next only where it fails"
    )
    parser.add_argument("--warm", action="store_true", help="compile all loops side by side first; no start is told")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--hand-only", action="store_true")
    only.add_argument("--ours-only", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to try this program itself")
    parser.add_argument("--results", type=Path, help="a folder for the records of castwise's trials")
    parser.add_argument("--out", type=Path, help="benchmarks/records/goals/DATE-NAME.json keeps a run")
    return parser.parse_args()


def main() -> int:
    """Measure the rows and print a line each."""
    arguments = parse()
    try:
        rows = find_rows(arguments.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    bench = detect_machine(arguments.device, arguments.data)
    seconds = _TINY_SECONDS if arguments.tiny else arguments.seconds
    setting = Setting(
        bench.device, arguments.data, seconds, arguments.epochs, arguments.max_steps, is_tiny=arguments.tiny
    )
    sides = (HAND,) if arguments.hand_only else (OURS,) if arguments.ours_only else (HAND, OURS)
    store = Store(arguments.results) if arguments.results else None
    referee = Referee(bench, setting, store, sides, arguments.rounds, arguments.time_limit, _tell, arguments.first)
    document: dict[str, Any] = {
        "environment": bench.environment.model_dump(mode="json"),
        "rows": [],
    }
    if arguments.warm:
        referee = referee.warm([_as_asked(row, arguments, bench.device) for row in rows])
    for row in rows:
        num_gpus = bench.environment.num_gpus
        if row.world_size > num_gpus and bench.device != "cpu":
            print(f"{row.name:13} needs {row.world_size} GPUs; here are {num_gpus}", flush=True)
            continue
        document["rows"].append(measure(_as_asked(row, arguments, bench.device), referee))
        print(f"{line_of(document['rows'][-1])} ({document['rows'][-1]['seconds']:.0f} s)", flush=True)
        write(arguments.out, document)
    return 0


def _as_asked(row: GoalRow, arguments: argparse.Namespace, device: str) -> GoalRow:
    return tiny(row, device) if arguments.tiny else row


def _tell(row: GoalRow, turn: Turn) -> None:
    # As it comes: what a machine that is taken away has measured stands in the output.
    figure = f"{1e3 * turn.seconds:.4f} ms" if turn.seconds is not None else turn.message
    alone = f", alone {1e3 * turn.alone_seconds:.4f} ms" if turn.alone_seconds is not None else ""
    start = f", start {turn.start_seconds:.1f} s" if turn.start_seconds is not None else ""
    print(f"    {row.name}, {turn.side}, {turn.loop}: {figure}{alone}{start}", flush=True)


def write(path: Path | None, document: dict[str, Any]) -> None:
    """Keep a record, if a file was asked for."""
    text = json.dumps(document, indent=1) + "\n"
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
