"""The table of what `coalesced-reduce` takes of a step, in parts."""

import json
from pathlib import Path

from stored import place_of

from castwise.render.units import format_seconds


def exchange_table(path: Path) -> str:
    """Return a line a setting of NCCL.

    Args:
        path: A record of `exchange_time.py`, whose name begins with its date.
    """
    document = json.loads(path.read_text())
    runs = document["runs"]
    names = list(runs[0]["seconds"])
    lines = [
        place_of(document["environment"], path.name[:10]),
        "",
        f"{document['workload']}, {document['precision']}, {document['num_gpus']} GPUs",
        "",
        f"| NCCL | {' | '.join(names)} |",
        f"|---|{'---:|' * len(names)}",
    ]
    for run in runs:
        cells = [format_seconds(run["seconds"][name]) for name in names]
        lines.append(f"| {run['nccl'] or 'as it is'} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
