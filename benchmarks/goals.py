"""The speed goals: castwise's best loop and the best one by hand, in turns in one process tree, and their ratio.

    python benchmarks/goals.py [--rows resnet50,mlp] [--out FILE] [--data DIR] [--first] [--warm] ...
    python benchmarks/goals.py --bounds-only "NVIDIA H200" --out benchmarks/records/least_time/nvidia-h200.json

Every turn is a process of its own: each loop by hand, each of castwise's, then the fastest by hand again, so that a
noisy machine shows. Beside them stands the least time that the step's operations and bytes allow. `goal_rows.py` has
the rows; docs/benchmarks.md says what is assumed.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from goal_bounds import bounds_of, units_of, work_of
from goal_rows import GoalRow, find_rows, with_max_autotune
from goal_specs import Setting, data_set_of, run_recipe, steps_per_epoch, tiny
from goal_summary import HAND, OURS, Turn, line_of, side_of
from goal_turns import HERE, ChildFailedError, Referee, run_child

from castwise.orchestrator.machine import detect_machine
from castwise.records.store import Store
from castwise.registry.datasets import default_data_dir
from castwise.registry.workloads import find_workload
from castwise.render.units import format_seconds

_TINY_SECONDS = 0.05
_CEILINGS_SECONDS = 180.0


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
        "units_per_step": row.batch_size * units_of(workload) * row.world_size,
        "times": row.num_steps if recipe is None else recipe.epochs,
        "epochs_run": None if recipe is None else recipe.num_epochs,
        "steps_per_epoch": None if recipe is None else steps_per_epoch(row, recipe),
        "data_set": data_set_of(row, setting),
        # What is not the row as it stands has no figure to be held against its goal.
        "is_whole": not setting.is_tiny and (recipe is None or recipe.max_steps is None),
    }


def measure(row: GoalRow, referee: Referee, ceilings: dict[str, float] | None) -> dict[str, Any]:
    """Return a row's record."""
    setting = referee.setting
    started = time.monotonic()
    document = describe(row, setting) | {"turns": [turn.document() for turn in referee.turns(row)]}
    fastest = side_of(document, OURS) or side_of(document, HAND)
    precision = fastest.turn.precision if fastest is not None else row.ours[0].precision
    work = work_of(row, run_recipe(row, setting))
    document["bounds"] = bounds_of(work, precision, referee.bench.environment.gpu, ceilings)
    document["seconds"] = time.monotonic() - started
    return document


def measure_ceilings(setting: Setting) -> dict[str, float] | None:
    """Return what the device does at the most; None where that failed."""
    sizes = ["--side", "64", "--copy-bytes", "65536"] if setting.is_tiny or setting.device == "cpu" else []
    try:
        return run_child([str(HERE / "ceilings.py"), "--device", setting.device, *sizes], _CEILINGS_SECONDS)
    except ChildFailedError as failure:
        print(f"ceilings: {failure}", file=sys.stderr)
        return None


def bounds_document(rows: tuple[GoalRow, ...], device_name: str) -> dict[str, Any]:
    """Return the least times of the rows' steps on a device, by its datasheet alone."""
    setting = Setting("cpu", Path())
    found = []
    for row in rows:
        bounds = bounds_of(work_of(row, run_recipe(row, setting)), row.ours[0].precision, device_name, None)
        found.append(describe(row, setting) | {"data_set": row.data_set, "turns": [], "bounds": bounds})
    return {"device": device_name, "rows": found}


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
    parser.add_argument("--max-autotune", action="store_true", help="try castwise's loops under max-autotune too")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--hand-only", action="store_true")
    only.add_argument("--ours-only", action="store_true")
    only.add_argument("--bounds-only", metavar="GPU", help="measure nothing; the least times by this GPU's datasheet")
    parser.add_argument("--no-ceilings", action="store_true", help="do not measure products and copies")
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
    if arguments.bounds_only:
        write(arguments.out, bounds_document(rows, arguments.bounds_only))
        return 0
    bench = detect_machine(arguments.device, arguments.data)
    seconds = _TINY_SECONDS if arguments.tiny else arguments.seconds
    setting = Setting(
        bench.device, arguments.data, seconds, arguments.epochs, arguments.max_steps, is_tiny=arguments.tiny
    )
    sides = (HAND,) if arguments.hand_only else (OURS,) if arguments.ours_only else (HAND, OURS)
    store = Store(arguments.results) if arguments.results else None
    referee = Referee(bench, setting, store, sides, arguments.rounds, arguments.time_limit, _tell, arguments.first)
    ceilings = None if arguments.no_ceilings else measure_ceilings(setting)
    document: dict[str, Any] = {
        "environment": bench.environment.model_dump(mode="json"),
        "ceilings": ceilings,
        "rows": [],
    }
    if arguments.warm:
        referee = referee.warm([_as_asked(row, arguments, bench.device) for row in rows])
    for row in rows:
        num_gpus = bench.environment.num_gpus
        if row.world_size > num_gpus and bench.device != "cpu":
            print(f"{row.name:13} needs {row.world_size} GPUs; here are {num_gpus}", flush=True)
            continue
        document["rows"].append(measure(_as_asked(row, arguments, bench.device), referee, ceilings))
        _report(document["rows"][-1])
        write(arguments.out, document)
    return 0


def _as_asked(row: GoalRow, arguments: argparse.Namespace, device: str) -> GoalRow:
    if arguments.max_autotune:
        row = with_max_autotune(row)
    return tiny(row, device) if arguments.tiny else row


def _report(row: dict[str, Any]) -> None:
    print(f"{line_of(row)} ({row['seconds']:.0f} s)", flush=True)
    for name in ("datasheet", "measured"):
        if name in row["bounds"]:
            times = (row["bounds"][name][key] for key in ("arithmetic", "memory", "by_operation"))
            said = "arithmetic {}, memory {}, operation by operation {}".format(*map(format_seconds, times))
            print(f"    least step by {name}: {said}", flush=True)


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
