"""The colours of charts and pages; a precision's own are in its row (`registry/precisions.py`)."""

from castwise.registry.precisions import Look, precision_row

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
    return precision_row(precision).look
