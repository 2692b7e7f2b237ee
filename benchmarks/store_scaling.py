"""How long stored trials take to be read, compared and printed, and a job that finds nothing to do, at 100 to 10,000.

    python benchmarks/store_scaling.py [--out FILE] [COUNT ...]

Needs no GPU: the records are copies of a real one with other seeds.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

from castwise.analysis.advice import recommend
from castwise.analysis.result_table import compare
from castwise.records.collector import gc_disabled
from castwise.records.schema import Trial
from castwise.records.store import Store, load_folder
from castwise.render.run_report import to_markdown

RECORDS = Path(__file__).resolve().parent / "records" / "trials"


def measure(count: int) -> dict[str, float]:
    """Return the seconds of each part for a folder of so many trials."""
    template = next(trial for trial in load_folder(RECORDS)[0] if trial.spec.precision == "fp32")
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        machine = store.machine_folder(template.environment)
        machine.mkdir(parents=True)
        specs = []
        for number in range(count):
            spec = template.spec.model_copy(update={"seed": number})
            trial = template.model_copy(update={"spec": spec})
            specs.append(spec)
            (machine / f"{spec.key}.json").write_text(trial.model_dump_json())
        started = time.perf_counter()
        recorded, _ = store.load(template.environment)
        missing = [spec for spec in specs if spec.key not in recorded]
        loaded = time.perf_counter()
        assert not missing
        trials: list[Trial] = list(recorded.values())
        with gc_disabled():  # as `castwise report` does
            rows = compare(trials)
            text = to_markdown(rows, recommend(rows))
        reported = time.perf_counter()
        assert text.count("\n") >= count
    return {"trials": count, "resume_seconds": loaded - started, "report_seconds": reported - started}


def main() -> None:
    """Measure each count and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", nargs="*", type=int, default=[100, 1000, 10_000])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for count in arguments.counts:
        results.append(measure(count))
        row = results[-1]
        print(
            f"{count:6} trials: nothing to do after {row['resume_seconds']:.2f} s, "
            f"a report after {row['report_seconds']:.2f} s",
            flush=True,
        )
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": platform.processor(), "counts": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
