"""What README and docs promise is there: files, headings, commands and options; and the site is built of them."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from playwright.sync_api import sync_playwright

from castwise.analysis.warnings import WARNING_NAMES
from castwise.cli.app import app
from castwise.registry.precisions import PRECISIONS
from castwise.spec.types import CauseName

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
DOCUMENTS.append(ROOT / "benchmarks" / "README.md")
MOST_WORDS = 26_500
MOST_WORDS_OF_A_PAGE, MOST_WORDS_OF_METHOD = 2_500, 1_500
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def anchors(path: Path) -> set[str]:
    """Return a document's anchors, as GitHub makes them of its headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue  # the network is not asked
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{path.name}: {target}"


@every_document
def test_documents_that_are_named_are_there(path: Path) -> None:
    """But for files of an older castwise, which is named with its commit."""
    text = re.sub(r"`[^`]+` of castwise [0-9a-f]{7,}", "", path.read_text().replace("\n", " "))
    for name in re.findall(r"\b(?:docs|tests|benchmarks|src)/[\w/.-]+\.(?:md|py|toml)\b", text):
        assert (ROOT / name).exists(), f"{path.name}: {name}"


@every_document
def test_make_targets_that_are_named_exist(path: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"`make ([\w-]+)", path.read_text())) <= set(targets)


def test_ci_runs_the_test_command_of_readme_and_the_long_form(tmp_path: Path) -> None:
    """`.ci/run` is a program, here with a `make` that only notes what it is called with."""
    named = set(re.findall(r"`make ([\w-]+)`", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named
    (tmp_path / "make").write_text('#!/bin/sh\necho "$@" >> "$CALLS"\n')
    (tmp_path / "make").chmod(0o755)
    search = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [ROOT / ".ci" / "run"], env=os.environ | {"PATH": search, "CALLS": str(tmp_path / "calls")}, check=True
    )
    assert {"browser", "test", "test-long"} <= set((tmp_path / "calls").read_text().split())


def commands_of(path: Path) -> Iterator[list[str]]:
    """Yield the words behind `castwise` of each command that a document shows."""
    text = path.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if language in ("", "sh") for line in block.splitlines()]
    lines += re.findall(r"`(castwise [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in lines:
        if line.startswith("castwise "):
            yield shlex.split(re.split(r"\s[|>]|\s+#", line.replace("\n", " "))[0])[1:]


@every_document
def test_commands_and_options_that_are_shown_exist(path: Path) -> None:
    for name, *words in commands_of(path):
        if name.startswith("-"):
            continue
        assert name in COMMANDS, f"{path.name}: castwise {name}"
        known = {"--help"} | {
            option for parameter in COMMANDS[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        own = words[: words.index("--")] if "--" in words else words  # behind it are a script's arguments
        options = {word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)}
        assert options <= known, f"{path.name}: castwise {name} {options - known}"


def test_the_readme_shows_every_command() -> None:
    shown = {name for name, *_ in commands_of(ROOT / "README.md")}
    assert shown >= {name for name, command in COMMANDS.items() if not command.hidden}


def test_the_readme_shows_every_precision() -> None:
    text = (ROOT / "README.md").read_text()
    (table,) = re.findall(r"<!-- table: results gpt2 -->\n(.*?)<!-- /table -->", text, flags=re.DOTALL)
    names = [row.name for row in PRECISIONS]
    assert re.findall(r"^\| \**([a-z0-9-]+)\** \|", table, flags=re.MULTILINE) == ["precision", *names]
    assert len(text.splitlines()) <= 130


def words_of(path: Path) -> int:
    """Return how many words of a document were written by hand: all but those between the marks of a table.

    The table of faults has marks of its own, since `make faults` writes it.
    """
    if path.suffix == ".ipynb":
        return sum(len("".join(cell["source"]).split()) for cell in json.loads(path.read_text())["cells"])
    tables = r"<!-- table: .*?<!-- /table -->|<!-- table of faults -->.*<!-- table of faults -->"
    return len(re.sub(tables, "", path.read_text(), flags=re.DOTALL).split())


def test_documents_stay_short_enough_to_be_read() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    assert sum(map(words_of, pages)) <= MOST_WORDS
    assert max(map(words_of, pages)) <= MOST_WORDS_OF_A_PAGE
    assert words_of(ROOT / "docs" / "method.md") <= MOST_WORDS_OF_METHOD


def test_every_command_has_a_picture_on_its_page() -> None:
    part = (ROOT / "mkdocs.yml").read_text().partition("- Commands:\n")[2].partition("- Reference:")[0]
    pages = re.findall(r"[\w-]+\.md", part)
    assert len(pages) > 5
    assert not [name for name in pages if "](images/" not in (ROOT / "docs" / name).read_text()]


def test_every_warning_has_its_cause_and_what_to_do() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert re.findall(r"^\| `([a-z0-9-]+)` \|.+\|.+\|.+\|$", text.partition("## Warnings")[2], re.MULTILINE) == list(
        WARNING_NAMES
    )


def test_every_cause_has_its_evidence_and_what_to_try() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|.+\|.+\|$", (ROOT / "docs" / "why.md").read_text(), re.MULTILINE)
    assert rows == list(get_args(CauseName))


site_group = pytest.mark.xdist_group("site")  # one process builds the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built as `make docs` does: a broken link or anchor fails."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


@site_group
def test_site_has_every_page(site: Path) -> None:
    docs = ROOT / "docs"
    pages = [*docs.rglob("*.md"), docs / "quickstart.ipynb"]
    assert not [path for path in pages if not (site / path.relative_to(docs)).with_suffix(".html").exists()]


# How much wider than their place the tables of a page are, if they do not scroll in a box of their own.
_TOO_WIDE = """() => [...document.querySelectorAll("article table")].filter((table) => {
    const box = table.closest(".md-typeset__scrollwrap");
    return !box || !["auto", "scroll"].includes(getComputedStyle(box).overflowX);
}).map((table) => table.scrollWidth - table.closest("article").clientWidth).filter((excess) => excess > 0)"""


@pytest.mark.slow
@site_group
def test_no_page_of_the_site_scrolls_sideways(site: Path, browser_path: str) -> None:
    names = ("evidence/suites.html", "evidence/searches.html", "python-api.html", "techniques.html", "tune.html")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        for name, width in itertools.product(names, (1440, 390)):
            page.set_viewport_size({"width": width, "height": 900})
            if width == 1440:
                page.goto((site / name).as_uri())
                page.wait_for_selector("article table")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate(_TOO_WIDE) == [], name
        page.goto((site / "tune.html").as_uri())
        padding = page.evaluate("getComputedStyle(document.querySelector('article td')).paddingLeft")
        assert float(padding.removesuffix("px")) < 12, "the site's own style sheet is used"
        browser.close()


# What people type, and the title of a page that is among the first three then.
_FOUND_BY = {
    "undecided": "Troubleshooting",
    "nan": "My loss is NaN",
    "rent": "Which GPU should I rent?",
    "faq": "FAQ",
    "colab": "What should I use on my GPU?",
    "mac": "What should I use on my GPU?",
    "channels_last": "It is not faster",
    "out of memory": "It does not fit",
}


@site_group
def test_site_opens_and_searches_without_a_server_or_a_network(site: Path, browser_path: str) -> None:
    requests: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / "index.html").as_uri())
        for words, title in _FOUND_BY.items():
            page.goto((site / "index.html").as_uri())
            page.keyboard.press("/")
            page.keyboard.type(words)
            page.wait_for_selector(f".md-search-result__item:nth-child(-n+3) h1 >> text={title}")
        browser.close()
    assert requests
    assert not [url for url in requests if not url.startswith(("file:", "blob:", "data:"))]
