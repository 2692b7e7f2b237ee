"""A chart: a drawing for each width, what it shows in a sentence, and the table of its values."""

import textwrap
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from castwise.analysis.result_table import Row
from castwise.analysis.statistics import Estimate, has_interval
from castwise.registry.gpus import short_device_name
from castwise.report.charts.svg import HATCH, WIDE, Drawing, Line, text
from castwise.report.collection import ComparisonGroup, FileOf, row_values
from castwise.show.fields import Field, FlatRow, find_field, find_fields
from castwise.show.table import DataTable
from castwise.show.theme import INK, LIGHT, PAGE, SOFT
from castwise.spec.quantities import TOO_NOISY, format_interval

MAX_BARS = 32
MAX_LINES = 12
_MAX_POINTS = 48  # of a line: of a dozen lines nobody sees more, and points are most of a page's bytes
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
RATE_FIELDS = (
    find_field("throughput_per_second"),
    Field("throughput_per_second_low", "from", "rate"),
    Field("throughput_per_second_high", "to", "rate"),
    find_field("processes"),
)


@dataclass(frozen=True)
class Chart:
    title: str
    summary: str  # what it shows, in a sentence, for those who do not see it
    draw: Callable[[int], Drawing]  # for a width in pixels
    table: DataTable[Any] | None = None  # of its values; lines over a run have none, `castwise export` has those
    note: str = ""  # what a reader must know of it

    def as_file(self, context: str) -> str:
        """Return it as an SVG file in light colours, below its title and of which model, machine and date it is."""
        drawing = self.draw(WIDE)
        titles, contexts = textwrap.wrap(self.title, 68), textwrap.wrap(context, 88)
        head = "".join(text(12, 26 + 20 * place, words, size=17) for place, words in enumerate(titles))
        top = 26 + 20 * len(titles)
        lines = "".join(text(12, top + 18 * place, words, fill=SOFT) for place, words in enumerate(contexts))
        top += 18 * len(contexts)
        width, height = drawing.width + 24, top + drawing.height + 12
        whole = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="Helvetica, Arial, sans-serif" fill="{INK}"><defs>{HATCH}</defs>'
            f'<rect width="100%" height="100%" fill="{PAGE}"/><g font-weight="700">{head}</g>'
            f'<g font-size="13">{lines}</g><g transform="translate(12 {top})">{drawing.content}</g></svg>\n'
        )
        for name, colour in LIGHT.items():
            whole = whole.replace(name, colour)
        return whole


@dataclass(frozen=True)
class GroupSubject:
    """What a chart is drawn from: a comparison group, a function that names a trial's file, and what to take."""

    group: ComparisonGroup
    file_of: FileOf
    taken: Sequence[Row] = ()

    @property
    def context(self) -> str:
        """Return of which model, machine and date the charts are."""
        first = self.group.first
        return f"{self.group.title}, {short_device_name(first.environment.device_name)}, {first.started_at[:10]}"

    def tip(self, config: Row, *lines: str) -> str:
        """Return the text at the pointer for a configuration: its label, these lines, and its file."""
        return "\n".join(each for each in (self.group.label(config), *lines, self.file_of(config.trial)) if each)

    def table(
        self,
        configurations: Sequence[Row],
        fields: Sequence[Field],
        more_values: Callable[[Row], FlatRow] = lambda _: {},
    ) -> DataTable[FlatRow]:
        """Return the table below a chart: which configurations, these fields, and the files."""
        settings = [self.group.setting(config) for config in configurations]
        rows: list[FlatRow] = [
            {**row_values(config), "setting": setting, "file": self.file_of(config.trial), **more_values(config)}
            for config, setting in zip(configurations, settings, strict=True)
        ]
        setting = [Field("setting", "setting")] if any(settings) else []
        return DataTable([find_field("precision"), *setting, *fields, *find_fields(("status", "file"))], rows)


def interval_of(found: Estimate | None) -> tuple[float, float] | None:
    """Return the 95 % interval of a figure, if it has one."""
    return (found.low, found.high) if found is not None and has_interval(found) else None


def interval_text(found: Estimate | None, form: Callable[[float], str]) -> str:
    """Return the 95 % interval of a figure in words; empty if there is no figure."""
    if found is not None and has_interval(found):
        if format_interval(found.value, found.low, found.high) == TOO_NOISY:
            return f"{TOO_NOISY}, {found.n} processes"
        return f"95 % interval {form(found.low)} to {form(found.high)}, {found.n} processes"
    return "no interval: one process" if found is not None and found.n < 2 else ""


def varied(lines: Iterable[Line]) -> list[Line]:
    """Return lines of which those of one colour have different dashes and markers; lines of one name stay alike."""
    names: dict[str, list[str]] = {}
    found = []
    for each in lines:
        of_colour = names.setdefault(each.colour, [])
        if each.name not in of_colour:
            of_colour.append(each.name)
        variant = of_colour.index(each.name)
        first = _DASHES.index(each.dash) if each.dash in _DASHES else 0
        dash = _DASHES[(first + variant) % len(_DASHES)]
        found.append(replace(each, dash=dash, marker=each.marker and each.marker + "-open" * (variant % 2)))
    return found


def downsample(count: int) -> list[int]:
    """Return which of `count` points to draw: the first, the last, and points at even distances between them."""
    if count <= _MAX_POINTS:
        return list(range(count))
    return sorted({round(index * (count - 1) / (_MAX_POINTS - 1)) for index in range(_MAX_POINTS)})


def left_out(text: str, shown: Sized, every: Sized) -> str:
    """Return how many of all are drawn, in a text with a place for each number; empty if all are drawn."""
    return text.format(len(shown), len(every)) if len(shown) < len(every) else ""
