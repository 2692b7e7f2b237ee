"""The long form of the fault suite: `python tests/faults/run_faults.py --faults 1000 --inputs 100000`.

It goes on from where it was stopped, keeps what did not hold with its seed, and writes the table of
docs/reliability.md.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])

from faults.clusters_that_break import CLUSTER_FAULTS  # noqa: E402
from faults.hostile_files import FAULTS, INPUTS  # noqa: E402
from programs import heed_signals  # noqa: E402

_KINDS = {**FAULTS, **INPUTS, **CLUSTER_FAULTS}
_SLOW = {"files with a model": 0.05}  # of the inputs: a process is started for each
_MEMORY_BYTES = 8 * 2**30  # of a process: an input that takes more does not hold
_TABLE = "<!-- table of faults -->"


def holds(kind: str, seed: int) -> str:
    """Try a fault or an input; return what did not hold, empty if all did."""
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        try:
            _KINDS[kind](random.Random(f"{kind} {seed}"), Path(folder))
        except Exception:  # noqa: BLE001  whatever it is, castwise did not hold
            return traceback.format_exc()
    return ""


def main() -> int:
    """Try what is left, kind by kind in turn; return 1 if anything did not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=1000, help="of whole commands, over all kinds")
    parser.add_argument("--inputs", type=int, default=100_000, help="hostile ones, over all kinds")
    parser.add_argument("--clusters", type=int, default=0, help="only faults of clusters, so many of each kind")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop before")
    parser.add_argument("--state", type=Path, default=ROOT / ".faults.json")
    parser.add_argument("--try", nargs=2, dest="one", metavar=("KIND", "SEED"), help="one again, to see what fails")
    given = parser.parse_args()
    heed_signals()
    if not given.clusters:  # Ray reserves more than it takes
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    if given.one:
        print(holds(given.one[0], int(given.one[1])) or "held")
        return 0
    state = json.loads(given.state.read_text()) if given.state.exists() else {}
    wanted = {kind: given.faults // len(FAULTS) + 1 for kind in FAULTS}
    share = (1 - sum(_SLOW.values())) / (len(INPUTS) - len(_SLOW))
    wanted |= {kind: round(given.inputs * _SLOW.get(kind, share)) for kind in INPUTS}
    if given.clusters:
        wanted = dict.fromkeys(CLUSTER_FAULTS, given.clusters)
    began = time.monotonic()
    while time.monotonic() - began < given.seconds:
        left = [kind for kind, most in wanted.items() if state.get(kind, {"tried": 0})["tried"] < most]
        if not left:
            break
        for kind in left:
            own = state.setdefault(kind, {"tried": 0, "failed": {}})
            for _ in range(1 if kind not in INPUTS else min(100, wanted[kind] - own["tried"])):
                own["tried"] += 1
                failure = holds(kind, own["tried"])
                if failure:
                    own["failed"][str(own["tried"])] = failure[-3000:]
                    print(f"did not hold: {kind} {own['tried']}\n{failure}", file=sys.stderr, flush=True)
        temporary = given.state.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=1))
        temporary.replace(given.state)
    if not given.clusters:
        write_table(state)
    return int(any(own["failed"] for own in state.values()))


def write_table(state: dict[str, dict[str, object]]) -> None:
    """Write what was tried and what held into the document."""
    lines = ["| | tried | held |", "|---|---:|---:|"]
    for kind in (*FAULTS, *INPUTS):
        tried, failed = state.get(kind, {}).get("tried", 0), state.get(kind, {}).get("failed", {})
        assert isinstance(tried, int)
        assert isinstance(failed, dict)
        lines.append(f"| {kind} | {tried:,} | {tried - len(failed):,} |")
    document = ROOT / "docs" / "reliability.md"
    with contextlib.suppress(FileNotFoundError):
        before, _, rest = document.read_text(encoding="utf-8").partition(_TABLE)
        after = rest.partition(_TABLE)[2]
        text = f"{before}{_TABLE}\n\n" + "\n".join(lines) + f"\n\n{_TABLE}{after}"
        document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
