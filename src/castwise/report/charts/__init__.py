"""Charts: pure functions of a collection that draw SVG, each with its table."""
