"""The colours of charts and pages; a precision's own are in its row (`registry/precisions.py`)."""

from castwise.registry.precisions import Look, precision_row

# Kinds of memory or time in a stack, dark to light: five steps of cividis, made for the colour-blind, none of them a
# precision's. Source: J. Nuñez, C. Anderton, R. Renslow, PLOS ONE 13 (2018).
STACK = ("#00306f", "#4e576c", "#8a8678", "#c3b369", "#fdea45")

# Kinds of kernels in a step: P. Tol's "muted", with brown and violet in place of the two that a precision has.
# Source: P. Tol, "Colour schemes" (SRON, 2021).
KERNELS = ("#332288", "#88ccee", "#44aa99", "#661100", "#ddcc77", "#117733", "#cc6677", "#aa4499", "#a860f0")

# Colours that depend on the page's theme: variables of its stylesheet, and what a file of its own has in their place.
INK = "var(--ink)"  # text and outlines
SOFT = "var(--soft)"  # titles of axes
FAINT = "var(--line)"  # grid lines
PAGE = "var(--page)"
LIGHT = {INK: "#1b1f24", SOFT: "#4d5661", FAINT: "#d5dae0", PAGE: "#ffffff"}


def look_of(precision: str) -> Look:
    """Return how a precision looks; unknown ones all look alike."""
    return precision_row(precision).look
