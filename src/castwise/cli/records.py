"""What the commands that read records print about them, and the pictures that they write."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from castwise.cli.output import say
from castwise.errors import StoreError, unknown_name
from castwise.render.units import pluralize
from castwise.report.files import ChartOptions

if TYPE_CHECKING:
    from castwise.report.charts.static_images import Picture


def write_pictures(pictures: "Iterable[Picture]", options: ChartOptions) -> None:
    """Write pictures of charts into the folder that was asked for, and say how many.

    Raises:
        UsageError: There is no such format, or what draws pictures is not installed.
        StoreError: The folder cannot be written.
    """
    from castwise.report.charts.static_images import FORMATS
    from castwise.report.charts.static_images import write_pictures as write

    assert options.charts is not None
    for name in options.chart_formats:
        if name not in FORMATS:
            raise unknown_name("format of pictures", name, FORMATS)
    try:
        count = len(write(pictures, options.charts, options.chart_formats))
    except OSError as error:
        raise StoreError(f"'{options.charts}' cannot be written: {error.strerror or error}.") from None
    say(f"{options.charts}: {pluralize(count, 'picture')}")


def say_problems(problems: list[tuple[str, str]]) -> None:
    """Say which files were left out: first the records of a newer castwise, which are no accident."""
    ordered = sorted(problems, key=lambda problem: not problem[1].startswith("a record of schema"))
    for path, reason in ordered[:5]:
        say(f"Left out: {path}: {reason}")
    if len(problems) > 5:
        say(f"Left out: {pluralize(len(problems) - 5, 'more file')} without a record to read")
