from html.parser import HTMLParser

from fake_engine import fake_spec, fake_trial

from castwise.analysis.advice import recommend
from castwise.analysis.result_table import compare
from castwise.render.notebook import to_html
from castwise.render.steady_columns import shown_columns


class Tables(HTMLParser):
    """Collects a document's cells, and complains of a tag that is not closed in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def parsed(*trials: object) -> Tables:
    rows = compare(trials)  # type: ignore[arg-type]
    tables = Tables()
    tables.feed(to_html(rows, recommend(rows)))
    tables.close()
    assert tables.open == []
    return tables


def test_the_table_has_what_the_terminals_has() -> None:
    times = {"fp32": 0.3, "bf16-mixed": 0.1}
    trials = [fake_trial(fake_spec(name), step_seconds=(seconds,)) for name, seconds in times.items()]
    tables = parsed(*trials)
    rows = compare(trials)
    columns = shown_columns(rows)
    assert tables.rows == [[c.title for c in columns], *([c.text(row) for c in columns] for row in rows)]
    assert "take bf16-mixed" in tables.text
    assert 'Trainer(precision="bf16-mixed")' in tables.text


def test_what_a_model_says_is_text_and_no_markup() -> None:
    nasty = "<script>alert(1)</script>"
    tables = parsed(fake_trial(fake_spec("fp32"), status="crashed", message=nasty))
    assert "script" not in tables.open
    assert nasty in tables.text
