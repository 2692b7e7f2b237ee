"""Charts: pure functions of a collection that give plotly figures as plain documents, each with its table."""
