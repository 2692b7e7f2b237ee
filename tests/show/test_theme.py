"""Colours that stay apart for everyone."""

import itertools
import math
import re
from collections.abc import Sequence
from importlib import resources

import pytest

from castwise.registry.precisions import NAMED_PRECISIONS, PRECISIONS, UNKNOWN_LOOK
from castwise.show.theme import FAINT, INK, KERNELS, LIGHT, PAGE, SOFT, STACK, look_of

# What remains of linear RGB for people without one kind of cone.
# Source: G. Machado, M. Oliveira, L. Fernandes, IEEE TVCG 15 (2009), severity 1.0.
SIGHTS = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


LOOKS = {row.name: row.look for row in (*PRECISIONS, *NAMED_PRECISIONS) if row.is_trained}


def linear(colour: str) -> tuple[float, float, float]:
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return red, green, blue


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """Return a colour as someone sees it, in CIE L*a*b* under D65."""
    rgb = linear(colour)
    r, g, b = (min(1.0, max(0.0, sum(f * c for f, c in zip(row, rgb, strict=True)))) for row in SIGHTS[sight])
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def contrast(one: str, other: str) -> float:
    """Return WCAG's contrast of two colours."""
    light, dark = sorted(
        (0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(one), linear(other))), reverse=True
    )
    return (light + 0.05) / (dark + 0.05)


def test_every_precision_has_a_look_of_its_own() -> None:
    for field in ("colour", "marker", "dash"):
        values = [getattr(look, field) for look in LOOKS.values()]
        if field != "dash":  # there are six
            assert len(set(values)) == len(values), field


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("colours", [[look.colour for look in LOOKS.values()], STACK, KERNELS])
def test_colours_stay_apart_for_everyone(colours: Sequence[str], sight: str) -> None:
    closest = min(
        (math.dist(seen(one, sight), seen(other, sight)), one, other)
        for one, other in itertools.combinations(colours, 2)
    )
    # 2.3 is what can just be distinguished; neighbouring bars need several times that.
    assert closest[0] > 9, closest


def test_colours_of_stacks_are_no_precisions() -> None:
    assert not {*STACK, *KERNELS} & {look.colour for look in LOOKS.values()}


def test_an_unknown_precision_has_the_unknown_look() -> None:
    assert look_of("int4-mixed") is UNKNOWN_LOOK
    assert look_of("fp32") is LOOKS["fp32"]


STYLE = resources.files("castwise.report.html").joinpath("page.css").read_text()


def theme(name: str) -> dict[str, str]:
    """Return the colours that the page's stylesheet has in a theme, as files of charts name them."""
    found = {variable: re.findall(rf"{variable}: light-dark\((#\w+), (#\w+)\)", STYLE)[0] for variable in VARIABLES}
    return {f"var({variable})": colours[name == "dark"] for variable, colours in found.items()}


VARIABLES = ("--ink", "--soft", "--line", "--page")


@pytest.mark.parametrize("name", ["light", "dark"])
def test_text_can_be_read_in_both_themes(name: str) -> None:
    colours = theme(name)
    assert contrast(colours[INK], colours[PAGE]) > 7
    assert contrast(colours[SOFT], colours[PAGE]) > 4.5
    assert 1.05 < contrast(colours[FAINT], colours[PAGE]) < 2, "a grid is to be seen, and no more"


def test_files_of_charts_have_the_colours_of_the_light_page() -> None:
    assert theme("light") == LIGHT
