"""Training scripts of real packages under castwise, and by hand: the table, the losses, and what is left behind.

    python benchmarks/real_packages.py [--environment DIR] [--out FILE] [DRIVER ...]

The drivers are those of benchmarks/real_scripts/. Their packages are installed into an environment of their own, unless
it exists. Each driver runs under castwise in three precisions, then alone, changed by hand to each precision: all on
one thread, with the same seeds. Their first losses must be the same, bit for bit. Files that castwise's run left in the
driver's folder, or in TMPDIR if the script alone does not, are named. The record is written after each driver.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from real_scripts.by_hand import DRIVERS, NARROW, SEEDED
from stored import RECORDS, markdown, place_of, write

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks" / "real_scripts"
PRECISIONS = ("as-written", "fp32", "bf16-mixed")
_OPTIONS = ("--device", "cpu", "--rounds", "1", "--steps", "20", "--warm-up", "10", "--budget", "150s")
_OPTIONS += ("--format", "json", "--precision", ",".join(PRECISIONS))
_LIMIT_SECONDS = 300  # of any process
_VERSIONS = "import json, sys, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


class Place:
    """A folder with a driver, changed by hand, and its data; beside it one for temporary files and noted losses."""

    def __init__(self, driver: str, precision: str, folder: Path, prepared: Path, python: Path) -> None:
        self.folder, self.python = folder, python
        self.temporary = folder.with_name(f"{folder.name} tmp")
        self._noted = self.temporary / "noted"  # castwise lets a script write there
        shutil.copytree(prepared, folder)
        self._noted.mkdir(parents=True)
        self.command, text = f"python {driver}", (SCRIPTS / driver).read_text().strip()
        text = SEEDED + text if driver.endswith(".py") else text
        for old, new in DRIVERS[driver][1].get(precision, []):
            assert old in text, (driver, old)
            text = text.replace(old, new)
        if driver.endswith(".sh"):
            *first, self.command = text.split(" && ")
            for command in first:
                self.run(["bash", "-c", command])
            text = SEEDED + (SCRIPTS / "accelerate_loop.py").read_text()
        (folder / (driver if driver.endswith(".py") else "accelerate_loop.py")).write_text(text)

    def run(self, command: list[str], **variables: str) -> tuple[int, str, str]:
        """Run a command with the environment's programs, on one thread; end all that it started."""
        own = {"PATH": f"{self.python.parent}:{os.environ['PATH']}", "TMPDIR": str(self.temporary)}
        own |= {"PYTHONPATH": f"{ROOT / 'src'}:{SCRIPTS / 'noting'}", "NOTED": str(self._noted), "PYTHONHASHSEED": "0"}
        own |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1") | variables
        pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"stdin": subprocess.DEVNULL}
        process = subprocess.Popen(
            command, cwd=self.folder, env=os.environ | own, text=True, start_new_session=True, **pipes
        )
        try:
            out, err = process.communicate(timeout=_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, out, err

    def losses(self) -> dict[str, list[list[str]]]:
        """Return the losses that each process has noted, by its precision."""
        found: dict[str, list[list[str]]] = {}
        for path in sorted(self._noted.iterdir()):
            found.setdefault(path.name.split()[0], []).append(path.read_text().splitlines())
        return found

    def temporaries(self) -> set[str]:
        """Return the names there, but for the noted losses and torch.compile's cache."""
        names = (path.name for path in self.temporary.iterdir())
        return {re.sub(r"\d+", "#", name) for name in names if not name.startswith(("noted", "torchinductor_"))}

    def digests(self) -> dict[str, str]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    """Measure, print a line for each driver, and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drivers", nargs="*", metavar="DRIVER")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-real")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    python = arguments.environment.absolute() / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", arguments.environment], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--requirement", SCRIPTS / "requirements.txt"]
        subprocess.run([*install, f"{ROOT}[measure]"], check=True)
    packages = sorted({package for package, _ in DRIVERS.values()})
    versions = json.loads(subprocess.check_output([python, "-c", _VERSIONS, *packages], text=True))
    rows, environment = list[dict[str, Any]](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as base:
        prepared = Path(base, "prepared")
        prepared.mkdir()
        subprocess.run([python, SCRIPTS / "prepare.py"], cwd=prepared, check=True, capture_output=True)
        for driver in arguments.drivers or DRIVERS:
            row, where = measure(driver, Path(base, driver), prepared, python)
            rows.append({"driver": driver, "package": (name := DRIVERS[driver][0]), "version": versions[name]} | row)
            print(json.dumps(rows[-1]), flush=True)
            date = f"{datetime.now(UTC):%Y-%m-%d}"
            write(arguments.out, {"environment": (environment := environment or where), "date": date, "rows": rows})


def measure(driver: str, base: Path, prepared: Path, python: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a driver under castwise and by hand; return its row, and where it ran."""
    place = Place(driver, "as-written", base / "castwise", prepared, python)
    before, started = place.digests(), time.monotonic()
    command = [str(python), "-m", "castwise", "run", *_OPTIONS, "--results", str(base / "results"), "--"]
    exit_code, out, err = place.run([*command, *place.command.split()])
    row: dict[str, Any] = {"exit": exit_code, "seconds": time.monotonic() - started}
    after, left = place.digests(), place.temporaries()
    shown = {each["precision"]: each for each in json.loads(out)["rows"]} if out.startswith("{") else {}
    trials = [json.loads(path.read_text()) for path in sorted((base / "results").rglob("*.json"))]
    messages = {trial["spec"]["precision"]: trial["message"] for trial in trials}
    lines = [line for line in err.splitlines() if line.strip()]
    row["message"] = "" if shown else "".join(lines[-1:])[:400]
    row["notes"] = [line for line in lines if line.startswith(("Note:", "Warning:"))]
    row["rows"], noted = {}, place.losses()
    for precision in PRECISIONS:
        hooked = noted.get(precision, [])
        found: dict[str, Any] = {key: shown.get(precision, {}).get(key) for key in ("status", "throughput_per_second")}
        found |= {"message": messages.get(precision, ""), "losses": max(map(len, hooked), default=0)}
        by_hand: list[list[str]] = []
        # The second time is for what differs: does this, too, by hand?
        ways = [precision, precision, NARROW][: 2 + (precision == "bf16-mixed" and NARROW in DRIVERS[driver][1])]
        for number, way in enumerate(ways if hooked else ()):
            alone = Place(driver, way, base / f"{precision} {number}", prepared, python)
            exit_code, _, err = alone.run(["bash", "-c", alone.command], NOTED_ENDS="1")
            by_hand += alone.losses().get("alone", [[f"exit code {exit_code}: {err[-400:]}"]])[:1]
            left -= alone.temporaries()
            found |= {"equal": is_same(by_hand[0], hooked), "equal_by_hand": is_same(by_hand[0], by_hand[1:2])}
            if found["equal"]:
                break
            found |= {"castwise": hooked, "by_hand": by_hand, "equal_narrow": is_same(by_hand[-1], hooked)}
        row["rows"][precision] = found
    row["left"] = sorted(name for name in {*before, *after} if before.get(name) != after.get(name)) + sorted(left)
    shutil.rmtree(base)
    return row, next((trial["environment"] for trial in trials), {})


def is_same(first: list[str], others: list[list[str]]) -> bool:
    """Return whether all others begin as the first one does, or the other way round."""
    return all(a == b for other in others for a, b in zip(first, other, strict=False))


def cell(row: dict[str, Any], precision: str) -> str:
    """Return what became of a precision of a driver."""
    found = row["rows"][precision]
    if precision == "fp32" and any("fp32 is here the same" in note for note in row["notes"]):
        return "as written"
    if found["status"] != "ok" or found["equal"]:
        return "equal" if found["status"] == "ok" else found["status"] or "–"
    if found["by_hand"][0][0].startswith("exit code") or not DRIVERS[row["driver"]][1]:
        return "not by hand"  # it fails, or no other precision is known by hand
    lines = [pair for hooked in found["castwise"] for pair in zip(found["by_hand"][0], hooked, strict=False)]
    if found.get("equal_narrow"):
        return "equal, loss in float32"
    pairs = [map(float.fromhex, pair) for line in lines for pair in zip(*map(str.split, line), strict=True)]
    apart = max(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs)
    return f"{apart:.0e}" + ("" if found["equal_by_hand"] else ", by hand too")


def table(name: str) -> str:
    """Return what became of each driver, by the newest of the records whose names begin so."""
    records = [json.loads(path.read_text()) for path in sorted((RECORDS / "real_scripts").glob(f"{name}*.json"))]
    rows = {row["driver"]: row for each in records for row in each["rows"]}
    cells = [
        [
            f"`{driver}`",
            f"{rows[driver]['package']} {rows[driver]['version']}",
            rows[driver]["exit"],
            *(cell(rows[driver], precision) for precision in PRECISIONS),
            len(rows[driver]["left"]) or "none",
        ]
        for driver in DRIVERS
        if driver in rows
    ]
    heading = " | ".join(("driver | package | exit code", *PRECISIONS, "files left"))
    places = dict.fromkeys(place_of(each["environment"], each["date"]) for each in records)
    return "\n".join(["; ".join(places), "", *markdown(heading, "llrlllr", cells)]) + "\n"


if __name__ == "__main__":
    main()
