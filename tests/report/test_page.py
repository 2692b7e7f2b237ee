"""The HTML pages in a real browser: headless Chromium, used as a reader would.

Skipped without Chromium; CASTWISE_REQUIRE_BROWSER makes that a failure, so that CI cannot skip them unnoticed.
Most tests look at one loaded page and leave it as it was.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import axe_playwright_python
import pytest
from fake_engine import PRECISION_NAMES, fake_run, fake_spec, fake_training, fake_trial, step_time_of
from fake_records import HOSTILE, every_kind, many, other_machine, poisoned, profiled, steady
from playwright.sync_api import Browser, Locator, Page, sync_playwright
from programs import PATIENCE_SECONDS

from castwise.records.schema import Collectives, Communication, RankStep, Trial
from castwise.registry.precisions import precision_sort_key
from castwise.report.charts.registry import GROUP_CHARTS
from castwise.report.collection import collect
from castwise.report.html.compare_page import render_comparison
from castwise.report.html.page_frame import MAX_SECTIONS, Source
from castwise.report.html.report_page import _steady_table, render
from castwise.report.machine_comparison import Origin, compare_machines, measured_machines
from castwise.show.why_report import GPUS_TITLE

pytestmark = pytest.mark.xdist_group("pages")  # one process has the browser
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
WIDE, PHONE = 1440, 360
PAGES = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
SPREAD = [
    steady(precision, 0, workload="resnet101", world_size=number, parallelism=way)
    for precision in ("fp32", "fp16-mixed", "bf16-mixed")
    for number, way in ((1, "none"), (2, "ddp"), (2, "dp"), (4, "ddp"), (4, "dp"))
]
PROFILED = [profiled(precision) for precision in ("fp32", "bf16-mixed")]

# Text of charts outside of their drawing, and charts wider than their figure.
_CUT_OFF = """() => [...document.querySelectorAll("figure.chart > svg")].flatMap((svg) => {
    if (!svg.checkVisibility()) return [];
    const place = svg.getBoundingClientRect();
    const outside = [...svg.querySelectorAll("text")].filter((text) => {
        const box = text.getBoundingClientRect();
        return box.width && (box.left < place.left - 2 || box.right > place.right + 2
            || box.top < place.top - 2 || box.bottom > place.bottom + 2);
    });
    const name = svg.parentElement.id;
    const wide = !svg.closest(".more") && place.right > svg.parentElement.getBoundingClientRect().right + 1;
    return [...outside.map((text) => `${name}: ${text.textContent}`), ...(wide ? [`${name}: too wide`] : [])];
})"""


@dataclass
class Opened:
    """A page, and what it did that a report must not do."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def unfold_all(self) -> None:
        """Open everything that is folded."""
        self.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")

    def chart(self, name: str) -> Locator:
        """Return the first chart of a name."""
        return self.page.locator(f"figure.chart[id$=-{name}]").first

    def cut_off(self) -> list[str]:
        """Return what of the charts is cut off, and whether the page is wider than the screen."""
        found: list[str] = self.page.evaluate(_CUT_OFF)
        fits = self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        return found + ([] if fits else ["the page is too wide"])

    def column(self, table: str, title: str) -> list[str]:
        """Return the texts of a table's column."""
        place = self.page.locator(f"[data-table={table}]")
        titles = [each.rstrip(" ▲▼") for each in place.locator("thead th").all_inner_texts()]
        return place.locator(f"tbody td:nth-child({titles.index(title) + 1})").all_inner_texts()

    def violations(self) -> list[object]:
        """Return the violations of accessibility."""
        self.page.evaluate(AXE)
        result = self.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        found = result["violations"]
        return [(each["id"], [node["html"][:120] for node in each["nodes"]][:3]) for each in found]


def source_of(trials: list[Trial]) -> Source:
    names = {id(trial): f"results/{number}.json" for number, trial in enumerate(trials)}
    return Source(lambda trial: names[id(trial)], [("results/alien.json", "not a record of schema 1")])


def rounds(precision: str, batch_size: int) -> list[Trial]:
    return [steady(precision, repeat, batch_size=batch_size) for repeat in range(3)]


def report_of(trials: list[Trial]) -> str:
    return render(collect(trials), source_of(trials))


def comparison_of(trials: list[Trial]) -> str:
    (machines,) = measured_machines([Origin("records", trials)])
    return render_comparison(compare_machines(machines), source_of(trials))


@pytest.fixture(scope="module")
def browser(browser_path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=browser_path)
        yield launched
        launched.close()


Opener = Callable[..., Opened]


@pytest.fixture(scope="module")
def open_page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    """Return a function that writes a page and opens it; at the end no page may have complained."""
    folder, opened = tmp_path_factory.mktemp("pages"), list[Opened]()

    def open_it(text: str, width: int = WIDE, scheme: str = "light") -> Opened:
        path = folder / f"report-{len(opened)}.html"
        path.write_text(text, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
        context.set_default_timeout(1000 * PATIENCE_SECONDS)
        made = Opened(context.new_page())
        opened.append(made)
        page, complaints, own = made.page, made.complaints, path.as_uri()
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        allowed = (own, "data:", "blob:")
        page.on("request", lambda r: None if r.url.startswith(allowed) else complaints.append(f"request: {r.url}"))
        page.goto(own)
        page.locator("html[data-ready]").wait_for(state="attached")
        return made

    yield open_it
    for each in opened:
        each.page.context.close()
    assert [complaint for each in opened for complaint in each.complaints] == []


@pytest.fixture(scope="module")
def full(open_page: Opener) -> Opened:
    """Return a page with every chart; tests leave it as it was."""
    made = open_page(report_of([*every_kind(), *PROFILED, *SPREAD, other_machine(steady())]))
    made.unfold_all()
    return made


@pytest.fixture(scope="module")
def small(open_page: Opener) -> Opened:
    """Return a page of one group with intervals; tests leave it as it was."""
    return open_page(report_of([steady(precision, repeat) for repeat in range(3) for precision in PRECISION_NAMES]))


def test_the_first_screen_answers(small: Opened) -> None:
    page = small.page
    assert (
        page.locator("h1").inner_text() == "resnet50 on Fake GPU: take bf16-mixed, 1.75× as fast as PyTorch's default"
    )
    assert page.title() == page.locator("h1").inner_text()
    chips = page.locator(".chips span").all_inner_texts()
    assert {"memory 0.82×", "how sure 3 runs each"} <= set(chips)
    assert any(each.startswith("× default 1.75× [") for each in chips)
    assert chips[-1].startswith("accuracy untested")
    assert any(
        each.endswith("· 1.75× · take") for each in small.chart("throughput").locator("text").all_text_contents()
    )
    lines = page.locator(".lines details").first
    assert lines.locator("summary").inner_text() == "Which lines: bf16-mixed"
    assert 'precision="bf16-mixed"' in lines.locator("pre").inner_text()
    for part in (small.chart("throughput"), lines):
        assert part.bounding_box()["y"] + part.bounding_box()["height"] < 850  # type: ignore[index]
    assert page.locator("#answers").count() == 0, "nothing is said twice"


def test_answers_of_several_models_are_a_table_with_a_dot_for_each_precision(open_page: Opener) -> None:
    models = [steady(name, n, workload=model) for model in "ab" for n in range(2) for name in PRECISION_NAMES]
    row = open_page(report_of(models)).page.locator("#answers tbody tr").first
    assert row.locator(".pill").inner_text() == "bf16-mixed"
    assert row.locator(".figure[data-name='× fp32']").inner_text().startswith("2.50×")
    assert row.locator("td.strip svg title").count() == len(PRECISION_NAMES)
    assert row.locator("td.strip circle[r='8.5']").count() == 1, "what to take is ringed"
    assert (row.locator("td.sure").inner_text(), row.locator("td.why").inner_text() != "") == ("2 runs each", True)


def test_an_axis_without_a_mark_is_left_out(open_page: Opener) -> None:
    models = [steady(name, n, workload=own) for own in "ab" for n in range(3) for name in ("bf16-mixed", "fp16-mixed")]
    page = open_page(report_of(models)).page
    assert page.locator("#answers tbody tr").count() == 2
    assert page.locator("#answers .strip").count() == 0


def test_lines_are_copied_by_the_keyboard_from_a_file(open_page: Opener) -> None:
    paces = {"fp32": 1.0, "bf16-mixed": 1.0, "bf16-master": 0.5}
    page = open_page(report_of([steady(name, n, pace) for n in range(3) for name, pace in paces.items()])).page
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.evaluate("document.addEventListener('copy', () => { window.copied = String(getSelection()); })")
    code = page.locator(".lines details").nth(1)
    assert code.locator("summary").inner_text().startswith("Simpler: bf16-mixed, 2.50×")
    code.locator("summary").focus()
    page.keyboard.press("Enter")
    button = code.get_by_role("button", name="Copy")
    button.focus()
    page.keyboard.press("Enter")
    code.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("window.copied").strip() == (code.locator("code").text_content() or "").strip()


def test_what_a_mark_says_is_shown_by_touch_and_by_keys(open_page: Opener) -> None:
    page = open_page(report_of([steady(name) for name in ("fp32", "bf16-mixed")])).page
    chart, tip = page.locator("figure.chart svg.wide").first, page.locator(".tip")
    chart.locator("rect").first.click()
    assert tip.inner_text().startswith("fp32\n")
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("bf16-mixed\n")
    assert "results/" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_links_are_named_after_workload_and_batch(small: Opened, full: Opened) -> None:
    assert small.page.locator("section#resnet50-b256").count() == 1
    targets = full.page.locator("nav a, #answers a").evaluate_all("all => all.map((each) => each.hash.slice(1))")
    assert all(full.page.locator(f"[id='{target}']").count() == 1 for target in targets)
    # A wheel scrolls some time later, and the page's policy forbids Playwright's waiting for a function.
    small.page.evaluate("window.scrollTo({top: 4000, behavior: 'instant'})")
    assert small.page.evaluate("window.scrollY") > 100
    assert small.page.locator("nav").bounding_box()["y"] == 0, "it stays in sight"  # type: ignore[index]
    small.page.evaluate("window.scrollTo({top: 0, behavior: 'instant'})")


def test_every_chart_is_on_the_page(full: Opened, small: Opened) -> None:
    ids = full.page.locator("figure.chart").evaluate_all("all => all.map((each) => each.id)")
    assert {name.rpartition("-")[2] for name in ids} >= set(GROUP_CHARTS)
    assert small.chart("throughput").is_visible()
    assert not small.page.locator("[data-table=trials]").is_visible()


def test_why_no_faster_needs_a_profile(open_page: Opener, small: Opened) -> None:
    assert small.page.locator(".why").count() == 0
    made = open_page(report_of([*PROFILED, *rounds("fp32", 64)]), PHONE, "dark")
    page = made.page
    assert page.locator("details.why").count() == 1
    fp32, mixed = page.locator(".causes > li").all_inner_texts()
    assert fp32.startswith("fp32: 60\u00a0% of the step only moves data, most of it normalisation and element-wise.\n")
    assert "Try torch.compile" in mixed
    assert "(memory: at most" in mixed
    assert made.chart("kernels").is_visible()
    assert page.locator("#answers tr.limit").inner_text().startswith("Limited by: bf16-mixed: 60\u00a0% of the step")
    assert made.cut_off() == []
    assert made.violations() == []


def test_steps_on_several_gpus_are_told_beside_one() -> None:
    alone = profiled("bf16-mixed")
    assert alone.profile is not None
    own = [RankStep(compute_seconds=0.04, exposed_seconds=0.01, idle_seconds=0.002)] * 2
    reduced = Collectives(kind="all-reduce", format="fp32", launches=4, num_bytes=1e8)
    times = {"seconds": 0.01, "exposed_seconds": 0.01, "rank_seconds": (0.01, 0.01), "rank_steps": tuple(own)}
    told = Communication(collectives=(reduced,), **times)
    on_two = alone.spec.model_copy(update={"world_size": 2, "parallelism": "ddp"})
    profile = alone.profile.model_copy(update={"communication": told})
    page = report_of([alone, alone.model_copy(update={"spec": on_two, "profile": profile})])
    assert GPUS_TITLE.partition("'")[2] in page, "its apostrophe is escaped"
    assert ">+10.00<" in page, "the collectives"
    assert GPUS_TITLE.partition("'")[2] not in report_of([alone])


def test_what_failed_beside_a_diagnosis_is_there_with_its_reason(open_page: Opener) -> None:
    first = PROFILED[0]
    spec = first.spec.model_copy(update={"precision": "fp16-mixed"})
    failed = fake_trial(spec, status="oom", message="CUDA out of memory.", step_seconds=())
    hidden = profiled("tf32")
    assert hidden.profile is not None
    unseen = hidden.profile.model_copy(update={"class_seconds": {}, "missing": "torch's profiler saw no kernel"})
    page = open_page(report_of([*PROFILED, failed, hidden.model_copy(update={"profile": unseen})])).page
    lines = page.locator(".causes > li").all_inner_texts()
    assert "fp16-mixed: oom: CUDA out of memory." in lines
    assert "tf32: no cause known, torch's profiler saw no kernel." in lines


def test_the_pointer_tells_value_interval_and_file(small: Opened) -> None:
    text = small.chart("throughput").locator("svg.wide rect title").last.text_content() or ""
    assert "images/s" in text
    assert "95 % interval" in text
    assert "results/" in text


def test_columns_of_all_trials_with_one_value_are_a_line(small: Opened) -> None:
    small.page.locator("#all-trials summary").click()
    titles = small.page.locator("[data-table=trials] thead th").all_inner_texts()
    assert "workload" not in titles
    assert "precision" in titles
    assert "workload resnet50" in small.page.locator("#all-trials > p").inner_text()
    small.page.locator("#all-trials > summary").click()


def test_table_filters_by_words_and_by_choice(full: Opened) -> None:
    trials = [*every_kind(), *PROFILED, *SPREAD, other_machine(steady())]
    table = full.page.locator("[data-table=trials]")
    num_failed = sum(trial.status == "oom" for trial in trials)
    table.get_by_label("Filter").fill("oom memory")
    table.get_by_text(f"{num_failed} of ").wait_for()
    assert full.column("trials", "status") == ["oom"] * num_failed
    with full.page.expect_download() as waiting:
        table.get_by_role("button", name="CSV").click()
    rows = list(csv.DictReader(io.StringIO(waiting.value.path().read_text())))
    assert {(row["status"], row["throughput_per_second"]) for row in rows} == {("oom", "")}, "what is missing is empty"
    table.get_by_label("Filter").fill("no such word")
    table.get_by_text("No row has all of these.").wait_for()
    table.get_by_role("button", name="Clear").click()
    table.get_by_text(f"{len(collect(trials).trials)} rows").wait_for()
    table.get_by_label("precision").select_option("fp16-true")
    table.get_by_text(f"{sum(trial.spec.precision == 'fp16-true' for trial in trials)} of ").wait_for()
    assert set(full.column("trials", "precision")) == {"fp16-true"}
    table.get_by_label("precision").select_option("")


def test_table_sorts_by_values_and_marks_the_best(small: Opened) -> None:
    table = small.page.locator("[data-table=resnet50-b256-results]")
    head = table.locator("th", has_text="step time")
    best = table.locator("td.best").all_inner_texts()
    assert len(best) >= 3
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    descending = [float(text.removesuffix(" ms")) for text in small.column("resnet50-b256-results", "step time")]
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    ascending = [float(text.removesuffix(" ms")) for text in small.column("resnet50-b256-results", "step time")]
    assert ascending == sorted(ascending) == descending[::-1] != []
    assert table.locator("tbody tr").first.locator("td.best").count() >= 2, "marks move with their rows"
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") is None
    assert small.column("resnet50-b256-results", "precision")[0] == "default", "in their own order again"


def test_missing_values_are_sorted_last(open_page: Opener) -> None:
    failed = fake_trial(steady("fp32", batch_size=64).spec, status="oom", step_seconds=())
    made = open_page(report_of([failed, steady("fp32"), steady("tf32")]))
    made.unfold_all()
    button = made.page.locator("[data-table=trials] th", has_text="step time").get_by_role("button")
    for _ in range(2):
        button.click()
        assert made.column("trials", "step time")[-1] == "–"


def test_downloads_are_what_the_chart_shows(small: Opened, tmp_path: Path) -> None:
    figure = small.chart("throughput")
    for kind, start in (("CSV", b"precision,"), ("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with small.page.expect_download() as waiting:
            figure.get_by_role("button", name=kind).click()
        path = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(path)
        assert path.name == f"resnet50-b256-throughput.{kind.lower()}"
        assert path.read_bytes().startswith(start)
        if kind == "SVG":
            assert "resnet50, Fake GPU, 2000-01-01" in path.read_text(encoding="utf-8")
            assert "var(" not in path.read_text(encoding="utf-8")
        if kind == "CSV":
            rows = list(csv.DictReader(io.StringIO(path.read_text())))
            assert [row["precision"] for row in rows] == sorted(PRECISION_NAMES, key=precision_sort_key)
            speedups = {row["precision"]: float(row["times_reference"]) for row in rows}
            expected = step_time_of("default") / step_time_of("bf16-mixed")
            assert speedups["bf16-mixed"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_is_the_readers_and_the_button_changes_it(open_page: Opener, scheme: str) -> None:
    made = open_page(report_of([steady(precision) for precision in PRECISION_NAMES]), scheme=scheme)
    other = "dark" if scheme == "light" else "light"
    background = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('figure text')).fill === getComputedStyle(document.body).color"
    assert made.page.evaluate(background) == PAGES[scheme]
    assert made.page.evaluate(ink)
    made.page.get_by_role("button", name=f"{other.title()} theme").click()
    assert made.page.evaluate(background) == PAGES[other]
    assert made.page.evaluate(ink)


@pytest.mark.slow
def test_wide_page_is_accessible_and_nothing_is_cut_off(full: Opened) -> None:
    assert full.cut_off() == []
    assert full.violations() == []


@pytest.mark.parametrize(("width", "scheme"), [(768, "light"), (PHONE, "dark")])
@pytest.mark.slow
def test_narrow_page_is_accessible_and_nothing_is_cut_off(open_page: Opener, width: int, scheme: str) -> None:
    made = open_page(report_of([*every_kind(), *SPREAD]), width, scheme)
    made.unfold_all()
    assert made.cut_off() == []
    assert made.violations() == []
    scroll = "(s => s.scrollWidth <= s.clientWidth)(document.querySelector('[data-table=machines] .scroll'))"
    assert made.page.evaluate(scroll), "a machine is a column, which fits"


@pytest.mark.parametrize("page_of", [report_of, comparison_of])
def test_long_names_break_after_a_separator_on_a_phone(
    open_page: Opener, page_of: Callable[[list[Trial]], str]
) -> None:
    names = ("torchvision:mobilenet_v3_large", "train_classifier.py:build_model_with_everything", "fastai-resnet50")
    trials = [
        steady(precision, repeat, workload=name)
        for name in names
        for precision in ("fp32", "bf16-mixed")
        for repeat in range(2)
    ]
    text = page_of([*trials, *(map(other_machine, trials) if page_of is comparison_of else ())])
    made = open_page(text, width=390)
    assert made.cut_off() == []
    assert made.page.evaluate("document.documentElement.scrollWidth") == 390
    assert made.page.evaluate(
        "[...document.querySelectorAll('.answers th')].every(e => e.scrollWidth <= e.clientWidth)"
    )
    assert "torchvision:<wbr>mobilenet_<wbr>v3_<wbr>large" in text
    assert not re.search(r'<title>[^<]*<wbr>|="[^"]*<wbr>', text), "not in attributes"
    labels = made.page.locator("figure.chart svg.narrow text").all_text_contents()
    assert (page_of is comparison_of) == ({"torchvision:", "mobilenet_v3_large,"} <= set(labels))


@pytest.mark.parametrize("page_of", [report_of, comparison_of])
@pytest.mark.parametrize("spared", [(), ("precision", "loss_scale")], ids=["every-field", "but-precisions"])
def test_hostile_text_is_text(
    open_page: Opener, spared: tuple[str, ...], page_of: Callable[[list[Trial]], str]
) -> None:
    trials = [poisoned(trial, *spared) for trial in [*every_kind(), *PROFILED]]
    if page_of is comparison_of:
        trials += [other_machine(trial) for trial in trials]
    made = open_page(page_of(trials))
    made.unfold_all()
    assert made.page.evaluate("window.pwned") is None
    elements = "main img, main iframe, main object, main embed, main [onerror], main [onload], main a:not([href^='#'])"
    assert made.page.locator(elements).count() == 0
    assert made.page.locator("script").count() == 2, "data, and the page's own"
    assert HOSTILE.split("\u2028")[0] in made.page.locator("tbody").last.inner_text()


@pytest.mark.parametrize("page_of", [report_of, comparison_of])
def test_paper_is_white_and_has_no_diagnostics(open_page: Opener, page_of: Callable[[list[Trial]], str]) -> None:
    both = [trial for each in every_kind() for trial in (each, other_machine(each))]
    made = open_page(page_of(both if page_of is comparison_of else every_kind()), scheme="dark")
    made.page.emulate_media(media="print", color_scheme="dark")
    made.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert made.page.evaluate("getComputedStyle(document.body).backgroundColor") == PAGES["light"]
    assert made.page.locator("figure.chart:visible").count() > 0
    hidden = "[data-table=trials], [data-table=machines], #warnings, .more, nav, .tools, .copy"
    assert not made.page.locator(hidden).locator("visible=true").count()
    if page_of is report_of:
        assert made.page.locator(".lines pre:visible").count() > 0
    assert made.page.pdf().startswith(b"%PDF")


def test_many_groups_are_folded_and_long_tables_have_pages(open_page: Opener) -> None:
    models = [steady("bf16-mixed", workload=f"model-{number}") for number in range(12)]
    made = open_page(report_of([*models, *many(108)]))
    assert made.page.locator("details.group[open]").count() == 0
    made.page.evaluate("location.hash = '#model-2-b256'")
    assert made.page.locator("#model-2-b256").get_attribute("open") is not None
    made.page.locator("#all-trials summary").click()
    table = made.page.locator("[data-table=trials]")
    assert len(made.column("trials", "precision")) == 50
    table.get_by_role("button", name="Next").click()
    table.get_by_role("button", name="Next").click()
    table.get_by_text("page 3 of 3").wait_for()
    assert len(made.column("trials", "precision")) == 20
    assert table.get_by_role("button", name="Next").is_disabled()


def test_answers_of_cut_runs_are_in_brackets_and_code_is_shown_once(open_page: Opener) -> None:
    cut = [fake_run(fake_training(precision, {"epochs": 4, "stop_after": 1})) for precision in ("fp32", "fp16-mixed")]
    batches = [each for precision in ("fp32", "bf16-mixed") for b in (32, 64) for each in rounds(precision, b)]
    once = [steady(precision, batch_size=128) for precision in ("fp32", "tf32")]
    made = open_page(report_of([*cut, *batches, *once]))
    answers = made.page.locator("#answers")
    assert answers.locator(".pill").all_inner_texts() == ["bf16-mixed", "bf16-mixed", "(fp16-mixed)", "undecided"]
    assert answers.locator(".figure[data-name='× fp32']").last.inner_text() == "–"
    assert "not a recommendation" in made.page.locator("section[aria-label='What to take']").inner_text()
    group = made.page.locator("details.group").first
    titles = group.locator("details.code summary").all_inner_texts()
    assert [each for each in titles if each.startswith("Which lines")] == ["Which lines: bf16-mixed"]
    assert titles[-1] == "What decides it, batch 128"


def test_ratios_over_a_script_as_written_go_with_their_verdicts() -> None:
    times = [("as-written", (), 0.1), ("as-written", ("compile",), 0.08), ("bf16-mixed", ("compile",), 0.04)]
    (group,) = collect(
        fake_trial(fake_spec(name, techniques=techniques, repeat=repeat), step_seconds=(seconds,))
        for repeat in (0, 1)
        for name, techniques, seconds in times
    ).groups
    table = _steady_table(group, set())
    found = [(row["written_speedup"], row["verdict"]) for row in table.rows]
    assert found == [(1.0, None), (pytest.approx(1.25), "faster"), (pytest.approx(2.5), "faster")]
    assert "speedup" not in [field.name for field in table.columns]


def test_the_largest_gain_comes_first_and_every_section_can_be_reached(open_page: Opener) -> None:
    others = [fake_trial(fake_spec(workload=f"model-{n:02}")) for n in range(MAX_SECTIONS + 10)]
    gains = [steady(name, n, workload="faster") for n in range(2) for name in ("fp32", "bf16-mixed")]
    text = report_of([*others, *gains])
    page = open_page(text).page
    ids = page.locator("details.group:not(.screen, .paper)").evaluate_all("all => all.map((each) => each.id)")
    assert (ids[0], len(ids)) == ("faster-b256", MAX_SECTIONS + 11)
    page.get_by_label("Filter models").fill("model-03")
    assert page.locator("#answers tbody tr:visible").count() == 1
    assert text.count('<figure class="chart"') < 3 * MAX_SECTIONS, "the rest is packed"
    page.evaluate(f"location.hash = '#{ids[-1]}'")
    chart = page.locator(f"[id='{ids[-1]}'] figure.chart").first
    chart.wait_for()
    assert chart.get_by_role("button", name="CSV").is_visible()
    assert page.locator(f"[id='{ids[-1]}'] [data-table] tbody tr").count() == 1


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_compared_machines(open_page: Opener, width: int, scheme: str) -> None:
    here = [steady(precision, repeat) for repeat in range(3) for precision in PRECISION_NAMES]
    made = open_page(comparison_of([*here, *map(other_machine, here)]), width, scheme)
    assert made.cut_off() == []
    assert "Slow GPU over Fake GPU: 0.50×" in made.page.locator("main > p").first.inner_text()
    title = "resnet50: take bf16-mixed on both, Slow GPU is 0.50× as fast"
    assert made.page.locator("h1").inner_text() == title
    assert set(made.column("ratios", "verdict")) == {"▼ slower, this card"}
    assert "95 % interval" in (made.chart("ratios").locator("svg.wide title").first.text_content() or "")
    assert made.violations() == []


def test_page_is_complete_without_scripts(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_of([steady(precision) for precision in PRECISION_NAMES]), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator("[data-table=trials] tbody tr").count() == len(PRECISION_NAMES)
    assert page.locator("figure.chart:visible svg.wide").count() == 2
    assert page.locator("button:visible").count() == 0, "none that does nothing"
    assert page.locator("noscript").first.is_visible()
    context.close()
