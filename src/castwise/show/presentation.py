"""What a command shows, and the writers that show it: in a terminal, as Markdown, as HTML, as CSV and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console
from rich.text import Text

from castwise.registry.techniques import NONE
from castwise.show.console import print_line
from castwise.show.fields import Field, FlatRow, find_fields, worth_showing
from castwise.show.table import IN_CSV, DataTable, csv_grid, json_text, markdown_grid, markdown_text, print_data_table
from castwise.show.units import pluralize


@dataclass(frozen=True)
class Lines:
    """Sentences: a list, or a paragraph each."""

    lines: Sequence[str]
    style: str = ""  # in a terminal; what is bold there is bold everywhere, and what is yellow are notes
    is_list: bool = True
    gap: bool = False  # whether an empty line is above them in a terminal
    full: Sequence[str] = ()  # what is said in their place where there is more room than in a terminal


@dataclass(frozen=True)
class Grid:
    """A table, and how it looks in a terminal (see `print_data_table`)."""

    table: DataTable[FlatRow]
    style: Callable[[FlatRow], str | None] = lambda _: None
    cell_style: Callable[[FlatRow, Field], str] = lambda *_: ""
    setting: Sequence[str] = ()  # fields that tell rows apart: lines above the rows in a terminal, columns elsewhere
    drop_first: Sequence[str | tuple[str, ...]] = ()
    elsewhere: str = IN_CSV

    @property
    def with_setting(self) -> list[Field]:
        """Return the columns, and before them those that differ in the setting."""
        names = {column.name for column in self.table.columns}
        setting = worth_showing(find_fields(self.setting), self.table.rows)
        return [*(each for each in setting if each.name not in names), *self.table.columns]

    def is_bold(self, row: FlatRow) -> bool:
        """Return whether a row is in bold, such as the one to take."""
        return "bold" in (self.style(row) or "")


@dataclass(frozen=True)
class Code:
    """Lines to copy, which are never wrapped."""

    lines: Sequence[str]
    language: str = "python"


@dataclass(frozen=True)
class Fold:
    """Parts below a title; folded in Markdown."""

    title: str
    parts: "Sequence[Part]"
    style: str = "bold"


Part = Lines | Grid | Code | Fold


@dataclass(frozen=True)
class Presentation:
    """What a command shows."""

    parts: Sequence[Part]
    csv: Callable[[], DataTable[FlatRow]] | None = None
    document: Callable[[], Mapping[str, Any]] | None = None  # of JSON
    longest: int | None = None  # characters of Markdown

    def text(self, output_format: str) -> str:
        """Return it as "markdown", "csv" or "json"."""
        if output_format == "markdown":
            return markdown(self.parts, self.longest)
        if output_format == "csv":
            assert self.csv is not None
            table = self.csv()
            return csv_grid(table.columns, table.rows)
        assert self.document is not None
        return json_text(self.document())


def setting_text(rows: Sequence[FlatRow], names: Sequence[str]) -> Callable[[FlatRow], str]:
    """Return a function for what differs between rows besides the precision, the line above them in a terminal."""
    varied = [name for name in names if len({row.get(name) for row in rows}) > 1]

    def words(row: FlatRow, name: str) -> str:
        value = row.get(name)
        match name:
            case "batch_size" | "seed":
                return f"{name.partition('_')[0]} {value}"
            case "gpus" if isinstance(value, str):
                return f"GPUs: {value}"
            case "gpus" | "parallelism":
                is_said = name == "parallelism" and "gpus" in varied
                gpus = "1 GPU" if row["gpus"] == 1 else f"{row['gpus']} GPUs ({row['parallelism']})"
                return "" if is_said else gpus
            case "techniques" if value == NONE:
                return "plain loop"
        return str(value).replace("+", " + ")

    return lambda row: ", ".join(filter(None, (words(row, name) for name in varied)))


def print_parts(parts: Sequence[Part], console: Console) -> None:
    """Print parts to a terminal."""
    for part in parts:
        match part:
            case Lines(lines=lines) if lines:
                if part.gap:
                    console.print()
                for line in lines:
                    print_line(console, line, part.style or None)
            case Grid(table=table) if table.rows:
                section = setting_text(table.rows, part.setting)
                looks = {"style": part.style, "cell_style": part.cell_style, "section": section}
                more = {"drop_first": part.drop_first, "elsewhere": part.elsewhere}
                print_data_table(console, table, **looks, **more)  # type: ignore[arg-type]
            case Code(lines=lines):
                for line in lines:
                    console.print(Text(f"    {line}"), highlight=False, soft_wrap=True)
            case Fold():
                print_line(console, f"\n{part.title}", part.style)
                print_parts(part.parts, console)


def markdown(parts: Sequence[Part], longest: int | None = None) -> str:
    """Return parts as Markdown, as GitHub takes it: the first ones, if there is no room for all."""
    blocks: list[tuple[str, bool]] = []  # each with whether it is a list
    for place, part in enumerate(parts):
        match part:
            case Lines():
                lines = [markdown_text(line.strip()) for line in part.full or part.lines if line]
                if part.is_list:
                    blocks.append(("\n".join(f"- {line}" for line in lines), True))
                else:
                    blocks += [(f"**{line}**" if "bold" in part.style else line, False) for line in lines]
            case Grid(table=table) if table.rows:
                rows = [
                    {**row, "precision": f"**{row['precision']}**"} if part.is_bold(row) else row for row in table.rows
                ]
                blocks.append(("\n".join(markdown_grid(part.with_setting, rows)), False))
            case Code(language="sh"):
                blocks += [(markdown_text(line), False) for line in part.lines]
            case Code():
                blocks.append(("\n".join([f"```{part.language}", *part.lines, "```"]), False))
            case Fold():
                title, content = markdown_text(part.title), markdown(part.parts).rstrip("\n")
                blocks.append((f"<details><summary>{title}</summary>\n\n{content}\n\n</details>", False))
                if longest is not None and sum(len(block) for block, _ in blocks) > longest:
                    left = pluralize(len(parts) - place, "more comparison")
                    blocks[-1] = f"{left} in the HTML report: this one would be too long for GitHub.", False
                    break
    text, was_list = "", False
    for block, is_list in blocks:
        if block:
            text += ("\n" if was_list and is_list else "\n\n" if text else "") + block
            was_list = is_list
    return f"{text}\n"


def html(parts: Sequence[Part]) -> str:
    """Return parts as HTML for a notebook."""
    found = []
    for part in parts:
        match part:
            case Lines():
                lines = [escape(line.strip()) for line in part.full or part.lines if line]
                if not lines:
                    continue
                if part.style == "yellow":
                    items = "".join(f"<li>{line}</li>" for line in lines)
                    found.append(f"<details><summary>Notes</summary><ul>{items}</ul></details>")
                else:
                    found += [f"<p><b>{line}</b></p>" if "bold" in part.style else f"<p>{line}</p>" for line in lines]
            case Grid(table=table):
                columns = part.with_setting
                sides = [f' style="text-align:{"left" if column.left else "right"}"' for column in columns]
                heads = (f"<th{side}>{escape(c.title)}</th>" for c, side in zip(columns, sides, strict=True))
                found.append(f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>")
                for row in table.rows:
                    tag = "b" if part.is_bold(row) else "span"
                    texts = (escape(column.text(row)) for column in columns)
                    cells = (f"<td{side}><{tag}>{t}</{tag}></td>" for t, side in zip(texts, sides, strict=True))
                    found.append(f"<tr>{''.join(cells)}</tr>")
                found.append("</tbody></table>")
            case Code():
                found.append(f"<pre>{escape(chr(10).join(part.lines))}</pre>")
            case Fold():
                found.append(f"<p><b>{escape(part.title)}</b></p>{html(part.parts)}")
    return "\n".join(found)
