"""Write the tables of README and docs from the records under benchmarks/records/.

    python benchmarks/tables.py [--check]

A table stands between `<!-- table: NAME ARGUMENT -->` and `<!-- /table -->`. With --check nothing is written, and
the exit code says whether every table is what its records give.
"""

import json
import re
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from castwise.analyze.compare import Row, compare
from castwise.analyze.recommend import recommend
from castwise.report.tables import markdown_table
from castwise.report.units import format_rate, format_seconds
from castwise.sweep.store import load_folder
from castwise.workloads import find_workload

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "records"
DOCUMENTS = (HERE.parent / "README.md", *sorted((HERE.parent / "docs").glob("*.md")))
_MARKED = re.compile(r"(<!-- table: (\w+)(?: ([^\n]+?))? -->\n).*?(<!-- /table -->)", re.DOTALL)


@cache
def rows() -> tuple[Row, ...]:
    """Return every stored trial beside its baseline, in the order it was measured."""
    trials, problems = load_folder(RECORDS / "trials")
    for problem in problems:
        sys.exit(f"{problem.path}: {problem.reason}")
    return tuple(compare(trials))


def results(workload: str) -> str:
    """Return the table of one workload's trials."""
    return markdown_table([row for row in rows() if row.trial.spec.workload == workload])


def advice(workload: str) -> str:
    """Return what castwise says of one workload's trials, and the code it prints."""
    (item,) = recommend([row for row in rows() if row.trial.spec.workload == workload])
    return f"> {item.sentence}\n\n```python\n{item.code}\n```\n"


def hand_written(_: str) -> str:
    """Return castwise's throughput beside that of the loops written by hand for the design."""
    lines = ["| workload | precision | hand-written loop | castwise | difference |", "|---|---|---:|---:|---:|"]
    for figure in tomllib.loads((HERE / "hand_written.toml").read_text())["figure"]:
        row = next(
            row
            for row in rows()
            if (row.trial.spec.workload, row.trial.spec.precision) == (figure["workload"], figure["precision"])
        )
        unit = find_workload(figure["workload"]).unit
        difference = (row.throughput or 0.0) / figure["per_second"] - 1
        lines.append(
            f"| {figure['workload']} | {figure['precision']} | {format_rate(figure['per_second'])} {unit}/s "
            f"| {format_rate(row.throughput)} {unit}/s | {100 * difference:+.1f} % |"
        )
    return "\n".join(lines) + "\n"


def overhead(name: str) -> str:
    """Return what castwise's step costs beside the same loop by hand, in one process, as one run found it."""
    document = json.loads((RECORDS / "overhead" / f"{name}.json").read_text())
    environment = document["environment"]
    lines = [
        f"{environment['gpu']}, torch {environment['torch']}, driver {environment['driver']}, {name[:10]}, "
        f"castwise at {environment['commit']}",
        "",
        "| cell | models a side | step by hand | step in castwise | castwise costs | 95 % interval |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for cell in document["cells"]:
        cost, low, high = (100 * (cell[key] - 1) for key in ("ratio", "ratio_low", "ratio_high"))
        by_hand = format_seconds(cell["hand_step_seconds"])
        lines.append(
            f"| {cell['cell'].replace(':', ', ')} | {cell['models_a_side']} | {by_hand} "
            f"| {format_seconds(cell['castwise_step_seconds'])} | {cost:+.2f} % | {low:+.2f} … {high:+.2f} % |"
        )
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[str], str]] = {
    "results": results,
    "advice": advice,
    "hand_written": hand_written,
    "overhead": overhead,
}


def fill(text: str) -> str:
    """Return a document with every marked table made anew."""
    return _MARKED.sub(lambda match: match[1] + TABLES[match[2]](match[3] or "") + match[4], text)


def main() -> int:
    """Write the documents, or check them."""
    stale = []
    for path in DOCUMENTS:
        before = path.read_text()
        after = fill(before)
        if before != after:
            stale.append(path)
            if "--check" not in sys.argv:
                path.write_text(after)
                print(f"{path.relative_to(HERE.parent)}: tables written")
    if stale and "--check" in sys.argv:
        print("Out of date, run `make tables`: " + ", ".join(path.name for path in stale), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
