"""Predict the peak memory of all records of steady trials on a GPU without one, as `castwise fits` does.

    python benchmarks/fits_errors.py --out benchmarks/records/fits/DATE.json [--only NAME]

Each workload is traced, in each precision and loop, at the smallest and the largest batch that records have, with
checkpoints at all, and at two sizes if they have one; scripts (`--only python`) at their own. What is in the file is
not traced again. `fits_tables.py` compares the predictions with the records.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from stored import RECORDS, load, write

from castwise.max_batch.result import available_bytes, held_bytes, max_batches_of
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.session import TrialFailedError
from castwise.records.schema import Trial
from castwise.records.store import load_folder
from castwise.registry.techniques import hiding_operators
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.spec.user_model import UserModel

BENCHMARKS = Path(__file__).resolve().parent
# Scripts of benchmarks/records/causes/scripts-h200 and script_masters; those of other folders need what is not here.
_FOLDERS = (BENCHMARKS / "cause_scripts", BENCHMARKS.parent / "tests" / "training_scripts")
_TIMEOUT_SECONDS = 1800.0


def measured() -> list[Trial]:
    """Return the trials on record whose peak can be predicted: of castwise's loop, eager, on one GPU."""
    found = []
    for folder in sorted(path for path in RECORDS.iterdir() if path.is_dir() and path.name != "fits"):
        found += [trial for trial in load_folder(folder)[0] if _can_be_predicted(trial)]
    return found


def _can_be_predicted(trial: Trial) -> bool:
    spec = trial.spec
    if trial.status not in ("ok", "diverged") or spec.device_type != "cuda" or spec.world_size > 1:
        return False
    if spec.is_script and (spec.user_model is None or _file_of(spec.user_model) is None):
        return False
    return spec.kind == "steady" and not hiding_operators(spec.techniques) and bool(held_bytes(trial))


def _file_of(model: UserModel) -> Path | None:
    """Return a user's file, whose folder records do not have; None if it is not among those here."""
    folders = _FOLDERS if model.kind == "script" else (BENCHMARKS,)
    return next((folder / model.path for folder in folders if (folder / model.path).exists()), None)


def loop_of(spec: TrialSpec) -> tuple[str, str, str]:
    return spec.workload, spec.precision, "+".join(spec.techniques)


def _spec_to_trace(spec: TrialSpec) -> TrialSpec:
    """Return a record's spec on random data, with the folder of the user's file, which records do not have."""
    spec = spec.model_copy(update={"data_set": SYNTHETIC})
    if spec.user_model is None:
        return spec
    path = str(_file_of(spec.user_model))
    return spec.model_copy(update={"user_model": spec.user_model.model_copy(update={"path": path, "digest": ""})})


@cache
def rooms() -> dict[tuple[str, str, str], set[int]]:
    """Return by loop what the allocator may hold where the largest batch was searched, in bytes."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for each in max_batches_of([*load(RECORDS / "little_memory"), *load(RECORDS / "fit")]):
        if each.largest is not None and (room := available_bytes(each.largest)):
            found.setdefault(loop_of(each.spec), set()).add(room)
    return found


def _trace(spec: TrialSpec, sizes: tuple[int, ...]) -> dict[str, Any]:
    session = ForkserverEngine().start(_TIMEOUT_SECONDS)
    workload, precision, techniques = loop_of(spec)
    found: dict[str, Any] = {"workload": workload, "precision": precision, "techniques": techniques}
    try:
        environment = session.open("cpu")
        traced = session.trace_memory(_spec_to_trace(spec), sizes, tuple(rooms().get(loop_of(spec), ())))
        found |= {"torch": environment.torch, **traced.model_dump(mode="json", exclude_defaults=True)}
    except TrialFailedError as failure:
        found["failed"] = failure.message
    finally:
        session.close()
    print(f"{' '.join(loop_of(spec))}: {found.get('failed') or found.get('needs_values') or 'traced'}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="workloads whose names have this in them")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    traces: list[dict[str, Any]] = json.loads(options.out.read_text())["traces"] if options.out.exists() else []
    known = {(each["workload"], each["precision"], each["techniques"]) for each in traces}
    loops: dict[tuple[str, str, str], list[TrialSpec]] = {}
    for trial in measured():
        if options.only in trial.spec.workload and loop_of(trial.spec) not in known:
            loops.setdefault(loop_of(trial.spec), []).append(trial.spec)

    def trace(specs: list[TrialSpec]) -> None:
        sizes = sorted({spec.batch_size for spec in specs})
        # With checkpoints the peak is no line over the batch size; of small batches in bf16-sr the update has it.
        if "checkpointing" not in loop_of(specs[0])[2] and specs[0].precision != "bf16-sr":
            sizes = [sizes[0], sizes[-1]]
        sizes = sizes if len(set(sizes)) > 1 else [sizes[0], 2 * sizes[0]]
        traces.append(_trace(specs[0], tuple(sizes)))
        traces.sort(key=lambda each: (each["workload"], each["precision"], each["techniques"]))
        write(options.out, {"traces": traces})

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(trace, loops.values()))


if __name__ == "__main__":
    main()
