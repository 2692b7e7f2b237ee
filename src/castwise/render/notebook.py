"""A job's rows as HTML for a notebook's cell: one table, no scripts, no styles but its own."""

from collections.abc import Sequence
from html import escape

from castwise.analysis.advice import Advice
from castwise.analysis.result_table import Row
from castwise.render.snippets import snippet_lines
from castwise.render.steady_columns import headline, remarks, shown_columns

_RIGHT = ' style="text-align:right"'
_LEFT = ' style="text-align:left"'


def to_html(rows: Sequence[Row], advice: Sequence[Advice]) -> str:
    """Return the headline, the table, its remarks, the advice and the code to paste as HTML."""
    parts = [f"<p><b>{escape(headline(rows))}</b></p>", *_table(rows, {item.key for item in advice})]
    lines = remarks(rows)
    if lines:
        parts += ["<ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"]
    for item in advice:
        parts.append(f"<p><b>{escape(item.sentence)}</b></p>")
        code = "\n".join(filter(None, [item.code, *snippet_lines(item)]))
        parts += [f"<pre>{escape(code)}</pre>"] if code else []
    return "\n".join(parts)


def _table(rows: Sequence[Row], taken: set[str | None]) -> list[str]:
    columns = shown_columns(rows)
    sides = [_LEFT if column.left else _RIGHT for column in columns]
    heads = (f"<th{side}>{escape(column.title)}</th>" for column, side in zip(columns, sides, strict=True))
    lines = ["<table>", f"<thead><tr>{''.join(heads)}</tr></thead>", "<tbody>"]
    for row in rows:
        tag = "b" if row.trial.spec.key in taken else "span"
        texts = (column.text(row) for column in columns)
        cells = (f"<td{side}><{tag}>{escape(text)}</{tag}></td>" for text, side in zip(texts, sides, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return [*lines, "</tbody>", "</table>"]
