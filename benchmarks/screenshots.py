"""Take the pictures of docs/reports.md: reports and a comparison of benchmarks/records/, in headless Chromium.

    python benchmarks/screenshots.py [--out docs/images]

Needs Chromium on the PATH (`make browser`).
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from castwise.cli.compare import CompareOptions, compare_folders, write_comparison
from castwise.report.files import SelectionOptions, find, write_report

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "records"
# A group is closed until someone opens it.
_SHOW = """element => {
    for (let each = element; each; each = each.parentElement) if (each.localName === "details") each.open = true;
    element.scrollIntoView({behavior: "instant"});
}"""
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
        files = {}
        for name in ("trials", "suites/full"):
            files[name] = Path(folder) / f"{name.replace('/', '-')}.html"
            write_report(find([RECORDS / name], SelectionOptions()), files[name])
        files["compared"] = Path(folder) / "compared.html"
        names = ["published:T4", "published:P100", str(RECORDS / "suites" / "full")]
        write_comparison(compare_folders(CompareOptions(machines=tuple(names), results=RECORDS)), files["compared"])
        browser = playwright.chromium.launch(executable_path=path)
        for name, page_of, viewport, scheme, anchor in (
            ("report-wide", "trials", WIDE, "light", ""),
            ("report-topic", "trials", WIDE, "light", "[id^=resnet50][id$=-b256]"),
            ("report-narrow", "trials", NARROW, "dark", ""),
            ("report-runs", "suites/full", WIDE, "dark", "[id^=wrn-28-10]"),
            ("compare-chart", "compared", WIDE, "light", ""),
        ):
            page = browser.new_context(viewport=viewport, color_scheme=scheme).new_page()
            page.goto(files[page_of].as_uri())
            page.locator("html[data-ready]").wait_for(state="attached")
            if anchor:
                page.locator(anchor).first.evaluate(_SHOW)
            page.screenshot(path=out / f"{name}.png")
            print(out / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
