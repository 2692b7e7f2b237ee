"""The HTML report in a real browser: headless Chromium, driven as a reader would use the page.

Skipped where there is no Chromium; CASTWISE_REQUIRE_BROWSER makes that a failure, so that CI cannot skip them unseen.
"""

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import axe_playwright_python
import pytest
from fake_engine import PRECISION_NAMES, fake_run, fake_spec, fake_training, fake_trial, step_time_of
from fake_records import HOSTILE, every_kind, many, other_machine, poisoned, steady
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from castwise.records.schema import Trial
from castwise.render.theme import look_of
from castwise.report.charts.registry import GROUP_CHARTS
from castwise.report.collection import collect
from castwise.report.html.compare_page import render_comparison
from castwise.report.html.page_frame import Source
from castwise.report.html.report_page import render
from castwise.report.machine_comparison import compare_machines
from castwise.report.machines import Origin, measured_machines

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser(browser_path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=browser_path)
        yield launched
        launched.close()


_CUT_OFF = """() => [...document.querySelectorAll("figure.chart")].flatMap((figure) => {
    const place = figure.querySelector(".plot").getBoundingClientRect();
    const outside = [...figure.querySelectorAll(".main-svg text")].filter((text) => {
        const box = text.getBoundingClientRect();
        return box.width && (box.left < place.left - 2 || box.right > place.right + 2
            || box.top < place.top - 2 || box.bottom > place.bottom + 2);
    });
    const scrolls = [...figure.querySelectorAll(".legend .scrollbar")]
        .filter((bar) => bar.getBoundingClientRect().height > 0);
    return [...outside.map((text) => `${figure.id}: ${text.textContent}`),
        ...scrolls.map(() => `${figure.id}: its legend scrolls`)];
})"""


@dataclass
class Opened:
    """A page, and what it did that a report must not do."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def draw_all(self) -> None:
        """Scroll until every chart that is to be seen is drawn."""
        for figure in self.page.locator("figure.chart:visible").all():
            figure.scroll_into_view_if_needed()
            figure.locator(".main-svg").first.wait_for()

    def cut_off(self) -> list[str]:
        """Return the charts' words that reach out of their place, and the legends that scroll."""
        self.page.wait_for_timeout(300)
        found = self.page.evaluate(_CUT_OFF)
        assert isinstance(found, list)
        return found

    def column(self, table: str, title: str) -> list[str]:
        """Return the texts of a table's column."""
        place = self.page.locator(f"[data-table={table}]")
        titles = place.locator("thead th").all_inner_texts()
        index = [each.rstrip(" ▲▼") for each in titles].index(title)
        return place.locator(f"tbody td:nth-child({index + 1})").all_inner_texts()


Opener = Callable[..., Opened]
PageOf = Callable[[list[Trial]], str]


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Return a function that makes a report of trials and opens it; at the end no page may have complained."""
    contexts, opened = [], []

    def open_it(
        trials: list[Trial], viewport: dict[str, int] = WIDE, scheme: str = "light", page_of: PageOf | None = None
    ) -> Opened:
        path = tmp_path / f"report-{len(opened)}.html"
        path.write_text((page_of or report_of)(trials), encoding="utf-8")
        context = browser.new_context(viewport=viewport, color_scheme=scheme, accept_downloads=True)
        context.set_default_timeout(60_000)
        page = context.new_page()
        made = Opened(page)
        page.on("console", lambda message: made.complaints.extend(_complaint(message)))
        page.on("pageerror", lambda error: made.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (made.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: made.complaints.extend(_network(request, path)))
        page.goto(path.as_uri())
        page.locator("html[data-ready]").wait_for(state="attached")
        contexts.append(context)
        opened.append(made)
        return made

    yield open_it
    for context in contexts:
        context.close()
    assert [complaint for each in opened for complaint in each.complaints] == []


def source_of(trials: list[Trial]) -> Source:
    names = {id(trial): f"results/{number}.json" for number, trial in enumerate(trials)}
    return Source(lambda trial: names[id(trial)], [("results/alien.json", "not a record of schema 1")])


def _complaint(message: ConsoleMessage) -> list[str]:
    return [f"console: {message.text}"] if message.type in ("error", "warning") else []


def _network(request: Request, page: Path) -> list[str]:
    quiet = request.url == page.as_uri() or request.url.startswith(("data:", "blob:", page.as_uri() + "#"))
    return [] if quiet else [f"request: {request.url}"]


def test_the_answer_comes_first_and_charts_follow(open_page: Opener) -> None:
    made = open_page(every_kind())
    assert "take bf16-mixed for resnet50" in made.page.locator("p.answer").inner_text()
    made.draw_all()
    drawn = {
        name.split("-", 2)[-1] for name in made.page.locator("figure.chart").evaluate_all("all => all.map(e => e.id)")
    }
    assert drawn >= set(GROUP_CHARTS)
    assert made.page.locator("figure.chart[data-drawn]").count() == made.page.locator("figure.chart").count()


def test_a_table_sorts_by_figures_and_back(open_page: Opener) -> None:
    # As many as one screen of the table has: what comes last is to be seen.
    made = open_page([trial for trial in every_kind() if not trial.spec.protocol.memory_parts])
    head = made.page.locator("[data-table=trials] th", has_text="step time")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    descending = made.column("trials", "step time")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    ascending = made.column("trials", "step time")
    assert milliseconds(descending) == sorted(milliseconds(descending), reverse=True)
    assert milliseconds(ascending) == sorted(milliseconds(ascending))
    assert descending[-1] == ascending[-1] == "–", "what was not measured comes last, whichever way"


def milliseconds(texts: list[str]) -> list[float]:
    """Return the figures among texts; "9.50 ms" would come after "10.0 ms" if words were sorted."""
    return [float(text.removesuffix(" ms")) for text in texts if text.endswith(" ms")]


def test_a_table_filters_by_words_and_by_choice(open_page: Opener) -> None:
    trials = every_kind()
    ended = sum(trial.status == "oom" for trial in trials)
    mixed = sum(trial.spec.precision == "fp16-mixed" for trial in trials)
    made = open_page(trials)
    table = made.page.locator("[data-table=trials]")
    table.get_by_label("Filter").fill("oom memory")
    table.get_by_text(f"{ended} of {len(trials)} rows").wait_for()
    assert made.column("trials", "status") == ["oom"] * ended
    table.get_by_label("Filter").fill("")
    table.get_by_label("precision").select_option("fp16-mixed")
    table.get_by_text(f"{mixed} of {len(trials)} rows").wait_for()
    assert set(made.column("trials", "precision")) == {"fp16-mixed"}


def test_a_long_table_has_pages(open_page: Opener) -> None:
    made = open_page(list(many(120)))
    table = made.page.locator("[data-table=trials]")
    assert len(made.column("trials", "precision")) == 50
    table.get_by_role("button", name="More").click()
    table.get_by_role("button", name="More").click()
    table.get_by_text("page 3 of 3").wait_for()
    assert len(made.column("trials", "precision")) == 20
    assert table.get_by_role("button", name="More").is_disabled()


def test_hovering_tells_value_interval_and_file(open_page: Opener) -> None:
    made = open_page(every_kind())
    figure = made.page.locator("figure.chart[id$=-throughput]").first
    figure.scroll_into_view_if_needed()
    figure.locator(".barlayer .point path").last.wait_for()
    figure.locator(".barlayer .point path").last.hover(force=True)
    said = figure.locator(".hoverlayer .hovertext")
    said.wait_for()
    words = said.text_content() or ""
    assert "images/s" in words
    assert "95 % interval" in words or "no interval: one process" in words
    assert "results/" in words


def test_a_click_on_the_legend_hides_a_precision(open_page: Opener) -> None:
    made = open_page(every_kind())
    figure = made.page.locator("figure.chart[id$=-batch]").first
    figure.scroll_into_view_if_needed()
    figure.locator(".scatterlayer .trace").first.wait_for()
    lines = figure.locator(".scatterlayer .trace").count()
    figure.locator(".legendtoggle").first.click(force=True)
    made.page.wait_for_function(
        "([id, before]) => document.querySelectorAll(`#${id} .scatterlayer .trace`).length < before",
        arg=[figure.get_attribute("id"), lines],
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_reader_s_and_the_button_turns_it(open_page: Opener, scheme: str) -> None:
    made = open_page([steady(precision) for precision in PRECISION_NAMES], scheme=scheme)
    other = "dark" if scheme == "light" else "light"
    figure = made.page.locator("figure.chart").first
    figure.scroll_into_view_if_needed()
    made.page.locator(f"figure.chart[data-drawn={scheme}]").first.wait_for()
    before = made.page.evaluate("getComputedStyle(document.body).backgroundColor")
    made.page.get_by_role("button", name=f"{other.title()} theme").click()
    made.page.locator(f"figure.chart[data-drawn={other}]").first.wait_for()
    after = made.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (before, after) == (PAGES[scheme], PAGES[other])


PAGES = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}


def test_a_precision_has_its_colour_in_every_chart(open_page: Opener) -> None:
    made = open_page(every_kind())
    made.draw_all()
    colours = made.page.evaluate(
        """() => [...document.querySelectorAll("figure.chart .plot")].flatMap((plot) => plot.data
            .filter((trace) => trace.name && (trace.line || typeof trace.marker?.color === "string"))
            .map((trace) => [trace.name.split(",")[0].split(" ")[0], trace.line?.color ?? trace.marker.color]))"""
    )
    of_precisions = {(name, colour) for name, colour in colours if name in PRECISION_NAMES}
    assert len(of_precisions) >= 7
    assert of_precisions <= {(name, look_of(name).colour) for name in PRECISION_NAMES}


@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (NARROW, "dark")], ids=["wide-light", "narrow-dark"])
def test_no_accessibility_violation_is_serious(open_page: Opener, viewport: dict[str, int], scheme: str) -> None:
    made = open_page([*every_kind(), other_machine(steady())], viewport, scheme)
    made.draw_all()
    made.page.locator("figure.chart details summary").first.click()
    made.page.evaluate(AXE)
    result = made.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    serious = [each for each in result["violations"] if each["impact"] in ("serious", "critical")]
    assert [(each["id"], [node["html"][:120] for node in each["nodes"]][:3]) for each in serious] == []


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_nothing_is_wider_than_the_screen_and_nothing_of_a_chart_is_cut_off(open_page: Opener, width: int) -> None:
    spread = [
        steady(precision, 0, workload="resnet101", world_size=number, parallelism=way)
        for precision in ("fp32", "fp16-mixed", "bf16-mixed")
        for number, way in ((1, "none"), (2, "ddp"), (2, "dp"), (4, "ddp"), (4, "dp"))
    ]
    made = open_page([*every_kind(), *spread], {"width": width, "height": 800})
    made.draw_all()
    assert made.cut_off() == []
    assert made.page.evaluate("document.documentElement.scrollWidth") <= width
    wide = made.page.evaluate(
        """() => [...document.querySelectorAll("figure.chart .main-svg")]
            .map((svg) => [svg.closest("figure"), svg.getBoundingClientRect().right])
            .filter(([figure, right]) => right > figure.getBoundingClientRect().right + 1)
            .map(([figure]) => figure.id)"""
    )
    assert wide == []


@pytest.mark.parametrize("spared", [(), ("precision", "loss_scale")], ids=["every-field", "but-precisions"])
def test_hostile_words_are_words(open_page: Opener, spared: tuple[str, ...]) -> None:
    made = open_page([poisoned(trial, *spared) for trial in every_kind()])
    made.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    made.draw_all()
    for point in made.page.locator(".barlayer .point path").all()[:5]:
        point.hover(force=True)
    assert made.page.evaluate("window.pwned") is None
    elements = (
        "[...document.querySelectorAll('img, iframe, object, embed, [onerror], [onload], a')].map((e) => e.outerHTML)"
    )
    found = [html for html in made.page.evaluate(elements) if not html.startswith('<a href="#')]
    assert [html for html in found if 'class="skip"' not in html] == []
    assert made.page.locator("script").count() == 4, "data, plotly packed and unpacked, and the page's own"
    assert HOSTILE.split("\u2028")[0] in made.page.locator("[data-table=trials] td").first.inner_text()


def test_downloads_are_what_the_chart_shows(open_page: Opener, tmp_path: Path) -> None:
    made = open_page([steady(precision, repeat) for repeat in range(3) for precision in PRECISION_NAMES])
    figure = made.page.locator("figure.chart[id$=-speedup]")
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for()
    for kind, starts in (("CSV", b"precision,"), ("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with made.page.expect_download() as waiting:
            figure.get_by_role("button", name=kind).click()
        path = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(path)
        assert path.suffix == f".{kind.lower()}"
        assert path.read_bytes().startswith(starts)
        if kind == "CSV":
            rows = list(csv.DictReader(io.StringIO(path.read_text())))
            assert [row["precision"] for row in rows] == list(STEP_TIME_IN_ORDER)
            assert float(rows[3]["speedup"]) == pytest.approx(1 / step_time_of("bf16-mixed"), rel=0.01)


STEP_TIME_IN_ORDER = (
    "fp32",
    "tf32",
    "fp16-mixed",
    "bf16-mixed",
    "fp16-master",
    "bf16-master",
    "fp16-true",
    "bf16-true",
)


def test_a_chart_s_table_has_its_figures(open_page: Opener) -> None:
    made = open_page([steady(precision) for precision in PRECISION_NAMES])
    figure = made.page.locator("figure.chart[id$=-throughput]")
    figure.get_by_text("Table").click()
    assert "bf16-mixed" in figure.locator("tbody tr").nth(3).inner_text()
    assert "6,394 images/s" in figure.locator("tbody tr").nth(3).inner_text()


@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_on_paper_all_charts_are_drawn_in_light_colours_and_fit(open_page: Opener, kind: str) -> None:
    trials = [*every_kind(), *([other_machine(each) for each in every_kind()] if kind == "comparison" else [])]
    made = open_page(trials, scheme="dark", page_of=comparison_of if kind == "comparison" else None)
    made.draw_all()
    before = made.page.locator("figure.chart .main-svg").first.get_attribute("width")
    assert made.page.pdf().startswith(b"%PDF")
    made.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    charts = made.page.locator("figure.chart")
    assert charts.count() == made.page.locator("figure.chart[data-drawn=light]").count() > 0
    widths = charts.evaluate_all("all => all.map((each) => each.querySelector('.main-svg').getAttribute('width'))")
    assert set(widths) <= {"660", "305"}, "A4 has room for 700"
    made.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    charts.first.scroll_into_view_if_needed()
    made.page.locator("figure.chart[data-drawn=dark]").first.wait_for()
    made.page.locator("figure.chart").first.locator(f".main-svg[width='{before}']").first.wait_for(state="attached")


def test_many_topics_are_folded_and_unfold(open_page: Opener) -> None:
    trials = [steady("bf16-mixed", workload=f"model-{number}") for number in range(12)]
    made = open_page(trials)
    assert made.page.locator("details.topic[open]").count() == 0
    made.page.get_by_role("button", name="Unfold all").click()
    assert made.page.locator("details.topic[open]").count() == 12
    made.page.evaluate("location.hash = '#topic-3'")
    assert made.page.locator("#topic-3").get_attribute("open") is not None


def test_one_trial_alone_makes_a_page(open_page: Opener) -> None:
    made = open_page([fake_trial(fake_spec())])
    assert "stay with fp32" in made.page.locator("p.answer").inner_text()


def test_several_answers_share_the_lines_that_switch_a_precision_on(open_page: Opener) -> None:
    made = open_page([steady(precision, batch_size=b) for precision in ("fp32", "bf16-mixed") for b in (32, 64)])
    topic = made.page.locator("details.topic")
    assert topic.locator(".sentences li").count() == 2
    assert topic.locator("details.code summary").all_inner_texts() == ["The lines that switch bf16-mixed on"]


def test_what_came_out_of_runs_cut_short_stands_in_brackets(open_page: Opener) -> None:
    cut = [fake_run(fake_training(precision, {"epochs": 4, "stop_after": 1})) for precision in ("fp32", "fp16-mixed")]
    made = open_page([*cut, steady("fp32"), steady("bf16-mixed")])
    taken = made.column("answers", "take")
    assert "bf16-mixed" in taken
    assert {"(fp16-mixed)", "(fp32)"} & set(taken)
    assert "That is no recommendation." in made.page.locator("section[aria-labelledby=answers-title]").inner_text()


def test_a_machine_is_a_column_that_fits_a_phone(open_page: Opener) -> None:
    made = open_page([steady()], NARROW)
    assert made.column("machines", "of the machine")[0] == "device"
    assert made.page.evaluate(
        "(s => s.scrollWidth <= s.clientWidth)(document.querySelector('[data-table=machines] .scroll'))"
    )


def test_the_best_of_a_table_is_marked(open_page: Opener) -> None:
    made = open_page([steady(precision) for precision in PRECISION_NAMES])
    table = made.page.locator("[data-table=topic-1-results]")
    best = table.locator("td.best").all_inner_texts()
    assert any(text.endswith("images/s") for text in best)
    assert "2.86×" in best
    table.locator("th", has_text="throughput").get_by_role("button").click()
    assert table.locator("tbody tr").first.locator("td.best").count() >= 2, "marks move with their rows"


@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (NARROW, "dark")], ids=["wide-light", "narrow-dark"])
def test_machines_side_by_side(open_page: Opener, viewport: dict[str, int], scheme: str) -> None:
    here = [steady(precision, repeat) for repeat in range(3) for precision in PRECISION_NAMES]
    there = [other_machine(trial) for trial in here]
    made = open_page([*here, *there], viewport, scheme, page_of=comparison_of)
    made.draw_all()
    assert made.cut_off() == []
    assert "Slow GPU is 0.50× as fast in fp32" in made.page.locator("p.answer").inner_text()
    assert set(made.column("ratios", "verdict")) == {"▼ slower"}
    figure = made.page.locator("figure.chart").first
    assert figure.locator(".subplot.xy .barlayer .trace").count() == len(PRECISION_NAMES)
    assert figure.locator(".subplot.x2y2 .barlayer .trace").count() == len(PRECISION_NAMES) - 1
    assert made.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    figure.locator(".barlayer .point path").last.hover(force=True)
    figure.locator(".hoverlayer .hovertext").wait_for()
    assert "95 % interval" in (figure.locator(".hoverlayer .hovertext").text_content() or "")
    made.page.evaluate(AXE)
    result = made.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    assert [each["id"] for each in result["violations"] if each["impact"] in ("serious", "critical")] == []


@pytest.mark.parametrize("spared", [(), ("precision", "loss_scale")], ids=["every-field", "but-precisions"])
def test_hostile_words_are_words_beside_each_other_too(open_page: Opener, spared: tuple[str, ...]) -> None:
    trials = [poisoned(trial, *spared) for each in every_kind() for trial in (each, other_machine(each))]
    made = open_page(trials, page_of=comparison_of)
    made.draw_all()
    for point in made.page.locator(".barlayer .point path").all()[:5]:
        point.hover(force=True)
    assert made.page.evaluate("window.pwned") is None
    assert made.page.locator("main img, main iframe, main [onerror], main [onload], main a").count() == 0


def comparison_of(trials: list[Trial]) -> str:
    """Return the page that sets the trials' machines side by side."""
    (machines,) = measured_machines([Origin("records", trials)])
    return render_comparison(compare_machines(machines), source_of(trials))


def report_of(trials: list[Trial]) -> str:
    """Return the report of trials."""
    return render(collect(trials), source_of(trials))


def test_without_scripts_the_tables_stand(browser: Browser, tmp_path: Path) -> None:
    trials = [steady(precision) for precision in PRECISION_NAMES]
    path = tmp_path / "report.html"
    path.write_text(render(collect(trials), source_of(trials)), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator("[data-table=trials] tbody tr").count() == len(trials)
    assert page.locator("noscript").first.is_visible()
    context.close()
