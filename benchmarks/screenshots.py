"""Take the pictures of docs/reports.md: reports and a comparison of benchmarks/records/, in headless Chromium.

docs/report.html is the report of all of them.

    python benchmarks/screenshots.py [--out docs/images]

Needs Chromium on the PATH (`make browser`).
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from castwise.cli.compare import CompareOptions, compare_folders, write_comparison
from castwise.report.files import SelectionOptions, find, write_report

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "records"
WIDE, NARROW = {"width": 1280, "height": 1000}, {"width": 360, "height": 780}


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images")
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    _take(out)


def _take(out: Path) -> None:
    """Take pictures of pages."""
    path = next(found for name in ("chromium", "google-chrome") if (found := shutil.which(name)))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        steady, runs = Path(folder) / "steady.html", Path(folder) / "runs.html"
        write_report(find([RECORDS / "trials"], SelectionOptions()), steady)
        write_report(find([RECORDS / "suites" / "full"], SelectionOptions()), runs)
        scaling, compared = Path(folder) / "scaling.html", Path(folder) / "compared.html"
        write_report(find([RECORDS / "scaling"], SelectionOptions()), scaling)
        loops = Path(folder) / "loops.html"
        write_report(find([RECORDS / "techniques"], SelectionOptions()), loops)
        names = ["published:T4", "published:P100", str(RECORDS / "suites" / "full")]
        write_comparison(compare_folders(CompareOptions(machines=tuple(names), results=RECORDS)), compared)
        browser = playwright.chromium.launch(executable_path=path)
        for name, file, viewport, scheme, anchor in (
            ("report-wide", steady, WIDE, "light", ""),
            ("report-topic", steady, WIDE, "light", "group-1"),
            ("report-narrow", steady, NARROW, "dark", "group-2"),
            ("report-runs", runs, WIDE, "dark", "wrn-28-10"),
            ("report-scaling", scaling, WIDE, "light", "[id$=-scaling]"),
            ("report-waterfall", loops, WIDE, "light", "[id$=-waterfall]"),
            ("compare-chart", compared, WIDE, "light", ""),
        ):
            page = browser.new_context(viewport=viewport, color_scheme=scheme).new_page()
            page.goto(file.as_uri())
            page.locator("html[data-ready]").wait_for(state="attached")
            _go_to(page, anchor)
            page.wait_for_timeout(1500)
            _go_to(page, anchor)  # what was drawn meanwhile has moved it
            page.wait_for_timeout(500)
            page.screenshot(path=out / f"{name}.png")
            print(out / f"{name}.png")
        browser.close()


def _go_to(page: Page, anchor: str) -> None:
    """Scroll to an element, or to a group by its anchor or by what its heading begins with."""
    if anchor.startswith(("#", "[")):
        page.locator(anchor).first.evaluate(
            "element => { element.closest('details.group')?.setAttribute('open', ''); element.scrollIntoView(); }"
        )
    elif anchor:
        groups = page.locator("details.group")
        place = page.locator(f"#{anchor}") if anchor.startswith("group-") else groups.filter(has_text=anchor).first
        place.evaluate("element => { element.open = true; element.scrollIntoView(); }")


if __name__ == "__main__":
    main()
