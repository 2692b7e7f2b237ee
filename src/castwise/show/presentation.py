"""What a command shows, and the writers that show it: in a terminal, as Markdown, as HTML, as CSV and as JSON."""

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from castwise.registry.techniques import NONE
from castwise.show.console import print_line
from castwise.show.fields import Field, FlatRow, find_fields, worth_showing
from castwise.show.table import DataTable, csv_grid, json_text, markdown_grid, markdown_text, print_data_table
from castwise.show.units import pluralize

_CODE_INDENT = "    "


class Part(Protocol):
    def print(self, console: Console) -> None: ...

    def markdown(self) -> str:
        """Return it as Markdown; empty if there is nothing to show."""
        ...

    def html(self) -> str: ...


@dataclass(frozen=True)
class Lines:
    """Sentences: a list, or a paragraph each."""

    lines: Sequence[str]
    style: str = ""  # in a terminal; what is bold there is bold everywhere, and what is yellow are notes
    is_list: bool = True
    gap: bool = False  # whether an empty line is above them in a terminal
    full: Sequence[str] = ()  # what is said in their place where there is more room than in a terminal

    def print(self, console: Console) -> None:
        if self.gap and self.lines:
            console.print()
        for line in self.lines:
            print_line(console, line, self.style or None)

    def _written(self, form: Callable[[str], str], bold: str) -> list[str]:
        lines = [form(line.strip()) for line in self.full or self.lines if line]
        return [bold.format(line) for line in lines] if "bold" in self.style else lines

    def markdown(self) -> str:
        lines = self._written(markdown_text, "**{}**")
        return "\n".join(f"- {line}" for line in lines) if self.is_list else "\n\n".join(lines)

    def html(self) -> str:
        lines = self._written(escape, "<b>{}</b>")
        if self.style != "yellow" or not lines:
            return "\n".join(f"<p>{line}</p>" for line in lines)
        items = "".join(f"<li>{line}</li>" for line in lines)
        return f"<details><summary>Notes</summary><ul>{items}</ul></details>"


def paragraph(text: str, style: str = "bold", *, gap: bool = False) -> Lines:
    return Lines([text], style, is_list=False, gap=gap)


@dataclass(frozen=True)
class Grid:
    """A table, and how it looks in a terminal."""

    table: DataTable[FlatRow]
    style: Callable[[FlatRow], str | None] = lambda _: None  # of a row
    cell_style: Callable[[FlatRow, Field], str] = lambda *_: ""  # on top of the row's
    setting: Sequence[str] = ()  # fields that tell rows apart: lines above the rows in a terminal, columns elsewhere
    drop_first: Sequence[str | tuple[str, ...]] = ()  # names of columns that need not fit; those in a tuple together
    elsewhere: str = "--format csv has all"  # where columns are that do not fit

    def print(self, console: Console) -> None:
        if self.table.rows:
            print_data_table(
                console,
                self.table,
                drop_first=self.drop_first,
                style=self.style,
                cell_style=self.cell_style,
                section=setting_text(self.table.rows, self.setting),
                elsewhere=self.elsewhere,
            )

    def _columns(self) -> list[Field]:
        """Return the columns, and before them those that differ in the setting."""
        names = {column.name for column in self.table.columns}
        setting = worth_showing(find_fields(self.setting), self.table.rows)
        return [*(each for each in setting if each.name not in names), *self.table.columns]

    def _is_bold(self, row: FlatRow) -> bool:
        return "bold" in (self.style(row) or "")

    def markdown(self) -> str:
        rows = [{**r, "precision": f"**{r['precision']}**"} if self._is_bold(r) else r for r in self.table.rows]
        return "\n".join(markdown_grid(self._columns(), rows)) if rows else ""

    def html(self) -> str:
        columns = self._columns()
        sides = [f' style="text-align:{"left" if column.left else "right"}"' for column in columns]
        heads = (f"<th{side}>{escape(c.title)}</th>" for c, side in zip(columns, sides, strict=True))
        lines = [f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>"]
        for row in self.table.rows:
            tag = "b" if self._is_bold(row) else "span"
            texts = (escape(column.text(row)) for column in columns)
            cells = (f"<td{side}><{tag}>{text}</{tag}></td>" for text, side in zip(texts, sides, strict=True))
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return "\n".join([*lines, "</tbody></table>"])


@dataclass(frozen=True)
class Code:
    """Lines to copy. A terminal breaks long ones where their language permits it, and nowhere else."""

    lines: Sequence[str]
    language: str = "python"

    def print(self, console: Console) -> None:
        width = console.width - len(_CODE_INDENT)
        for line in self.lines:
            for part in self._broken(line, width) if console.is_terminal else [line]:
                console.print(Text(f"{_CODE_INDENT}{part}"), highlight=False, soft_wrap=True)

    def _broken(self, line: str, width: int) -> list[str]:
        if len(line) <= width:
            return [line]
        if self.language == "sh":  # between options, each with its value
            lines = [""]
            for word in re.findall(r"--[\w-]+ (?!-)(?:'[^']*'|\S)+|(?:'[^']*'|\S)+", line):
                if lines[-1] and len(f"{lines[-1]} {word} \\") > width:
                    lines[-1] += " \\"
                    lines.append(f"    {word}")
                else:
                    lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
            return lines
        code, *comments = line.split("  # ")
        indent = line[: len(line) - len(line.lstrip())]
        if code.lstrip().startswith("#"):
            wrapper = textwrap.TextWrapper(width, subsequent_indent=f"{indent}#   ", break_on_hyphens=False)
            parts = [code, *(f"{indent}#   {comment}" for comment in comments)]
            return [each for part in parts for each in wrapper.wrap(part)]
        above = [f"{indent}# {comment}" for comment in comments]
        if len(code) > width and code.endswith(")") and code.count("(") == 1:
            head, arguments = code[:-1].split("(")
            parts = [arguments] if len(arguments) + 4 <= width else re.split(r", (?=\w+(?:=|,|$))", arguments)
            return [*above, f"{head}(", *(f"{indent}    {part}," for part in parts), f"{indent})"]
        return [*above, code]

    def markdown(self) -> str:
        if self.language == "sh":
            return "\n\n".join(map(markdown_text, self.lines))
        return "\n".join([f"```{self.language}", *self.lines, "```"])

    def html(self) -> str:
        return f"<pre>{escape(chr(10).join(self.lines))}</pre>"


@dataclass(frozen=True)
class Fold:
    """Parts below a title; folded in Markdown."""

    title: str
    parts: Sequence[Part]
    style: str = "bold"

    def print(self, console: Console) -> None:
        print_line(console, f"\n{self.title}", self.style)
        print_parts(self.parts, console)

    def markdown(self) -> str:
        content = markdown(self.parts).rstrip("\n")
        return f"<details><summary>{markdown_text(self.title)}</summary>\n\n{content}\n\n</details>"

    def html(self) -> str:
        return f"<p><b>{escape(self.title)}</b></p>\n{html(self.parts)}"


@dataclass(frozen=True)
class Presentation:
    parts: Sequence[Part]
    csv: Callable[[], DataTable[FlatRow]] | None = None
    document: Callable[[], Mapping[str, Any]] | None = None  # of JSON
    longest: int | None = None  # characters of Markdown

    def text(self, output_format: str) -> str:
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
                way = "" if row["parallelism"] == "none" else f" ({row['parallelism']})"  # a script has its own
                gpus = "1 GPU" if row["gpus"] == 1 else f"{row['gpus']} GPUs{way}"
                return "" if is_said else gpus
            case "techniques" if value == NONE:
                return "plain loop"
        return str(value).replace("+", " + ")

    return lambda row: ", ".join(filter(None, (words(row, name) for name in varied)))


def print_parts(parts: Sequence[Part], console: Console) -> None:
    for part in parts:
        part.print(console)


def markdown(parts: Sequence[Part], longest: int | None = None) -> str:
    """Return parts as Markdown, as GitHub takes it: the first ones, if there is no room for all."""
    text, was_list = "", False
    for index, part in enumerate(parts):
        block, is_list = part.markdown(), isinstance(part, Lines) and part.is_list
        is_too_long = longest is not None and len(text) + len(block) > longest
        if is_too_long:
            left = pluralize(len(parts) - index, "more comparison")
            block, is_list = f"{left} in the HTML report: this one would be too long for GitHub.", False
        if block:
            text += ("\n" if was_list and is_list else "\n\n" if text else "") + block
            was_list = is_list
        if is_too_long:
            break
    return f"{text}\n"


def html(parts: Sequence[Part]) -> str:
    return "\n".join(filter(None, (part.html() for part in parts)))
