"""How long a report takes to be made, how large it is, and how long its page takes to answer a reader.

    python benchmarks/report_speed.py [--trials 200,1000,10000]

The trials are the records under benchmarks/records/trials at ever more batch sizes, all of them different questions.
What it takes is the whole command as a user starts it, `castwise report`, in a new process; the page is opened in
headless Chromium (`make browser`), where the slowest of a few sorts, filters and turns of a page is timed from the
event to the next frame. Needs no GPU.
"""

import argparse
import itertools
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import sync_playwright

RECORDS = Path(__file__).resolve().parent / "records" / "trials"

# Runs in the page: an action, and milliseconds until the frame behind it has been drawn.
_TIMED = """async (action) => {
    const after = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    await after();
    const table = document.querySelector("[data-table=trials]");
    const start = performance.now();
    if (action === "filter") {
        const input = table.querySelector("input[type=search]");
        input.value = "fp16 4";
        input.dispatchEvent(new Event("input"));
        await new Promise((done) => setTimeout(done, 61));
    } else if (action === "page") table.querySelectorAll(".bar:last-child button")[1].click();
    else [...table.querySelectorAll("thead button")].find((each) => each.textContent === action).click();
    await after();
    return performance.now() - start;
}"""
_ACTIONS = ("throughput", "precision", "step time", "page", "filter")


def main() -> None:
    """Print a line for each number of trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", default="200,1000,10000", help="numbers of trials, comma-separated")
    counts = [int(part) for part in parser.parse_args().trials.split(",")]
    print(f"{'trials':>7} {'wall':>8} {'CPU':>8} {'page':>8} {'opens':>8} {'slowest answer':>15}")
    for count in counts:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _write(folder / "records", count)
            wall, cpu = _report(folder / "records", folder / "report.html")
            size = (folder / "report.html").stat().st_size
            opens, answers = _use(folder / "report.html")
        slowest = max(answers, key=lambda action: answers[action])
        print(
            f"{count:>7,} {wall:>6.2f} s {cpu:>6.2f} s {size / 1e6:>5.1f} MB {opens:>6.2f} s "
            f"{answers[slowest]:>6.0f} ms ({slowest})"
        )


def _write(folder: Path, count: int) -> None:
    folder.mkdir()
    for number, text in enumerate(itertools.islice(_records(), count)):
        (folder / f"{number:05}.json").write_text(text, encoding="utf-8")


def _records() -> Iterator[str]:
    originals = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.rglob("*.json"))]
    for batch in itertools.count(1):
        for record in originals:
            yield json.dumps({**record, "spec": {**record["spec"], "batch_size": batch}}, indent=1)


def _report(folder: Path, output: Path) -> tuple[float, float]:
    """Return the seconds that the command takes: on the wall, and of a CPU."""
    before, start = _cpu_seconds(), time.perf_counter()
    command = [sys.executable, "-m", "castwise", "report", str(folder), "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start, _cpu_seconds() - before


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _use(page_file: Path) -> tuple[float, dict[str, float]]:
    """Return the seconds until the page is ready, and the milliseconds that each action takes."""
    path = next(found for name in ("chromium", "google-chrome") if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        start = time.perf_counter()
        page.goto(page_file.as_uri())
        page.locator("html[data-ready]").wait_for(state="attached")
        opens = time.perf_counter() - start
        answers = {action: float(page.evaluate(_TIMED, action)) for action in _ACTIONS}
        browser.close()
    return opens, answers


if __name__ == "__main__":
    main()
