"""Fields, tables, units and code for the terminal, Markdown, CSV and JSON."""
