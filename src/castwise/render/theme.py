"""How precisions look: one colour, marker, dash and shape each, the same in every chart, page and image.

The colours are Okabe and Ito's, which people who see red and green alike still tell apart; tests hold them to that by
simulation. Colour is never the only sign: bars stand over their names, lines differ in marker and dash too.

Source: M. Okabe, K. Ito, "Color Universal Design" (2008); black, which no dark page shows, is a grey here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How a precision looks.

    Attributes:
        colour: Its colour, as #rrggbb.
        marker: Its marker in line charts, by plotly's names.
        dash: Its line in line charts, by plotly's names.
    """

    colour: str
    marker: str
    dash: str


LOOKS: dict[str, Look] = {
    "fp32": Look("#7f7f7f", "circle", "solid"),
    "tf32": Look("#56b4e9", "square", "dash"),
    "fp16-mixed": Look("#0072b2", "diamond", "solid"),
    "bf16-mixed": Look("#e69f00", "triangle-up", "dash"),
    "fp16-master": Look("#009e73", "triangle-down", "dot"),
    "bf16-master": Look("#882255", "hexagon", "solid"),
    "fp16-true": Look("#d55e00", "x", "dashdot"),
    "bf16-true": Look("#cc79a7", "cross", "longdash"),
    "fp8-mixed": Look("#f0e442", "star", "longdashdot"),
}
# A precision that this castwise does not know: a record may come from a newer one.
UNKNOWN = Look("#b9b9b9", "circle-open", "solid")

# Kinds of memory or time in a stack, dark to light: five steps of cividis, made for the colour-blind, none of them a
# precision's. Source: J. Nuñez, C. Anderton, R. Renslow, PLOS ONE 13 (2018).
STACK = ("#00306f", "#4e576c", "#8a8678", "#c3b369", "#fdea45")

# Colours that depend on the page's theme: what draws a chart writes these words in their place.
INK = "theme:ink"  # text and outlines
FAINT = "theme:faint"  # grid lines
THEMES = {
    "light": {INK: "#1b1f24", FAINT: "#e3e6ea"},
    "dark": {INK: "#e8eaed", FAINT: "#343a42"},
}


def ink_on(colour: str) -> str:
    """Return black or white, whichever is easier to read on a colour.

    Source: WCAG 2.1, relative luminance; black and white are equally easy to read at 0.179.
    """
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"


def look_of(precision: str) -> Look:
    """Return how a precision looks; unknown ones all look alike."""
    return LOOKS.get(precision, UNKNOWN)
