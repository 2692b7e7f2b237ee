"""Conclusions to what people read: terminal, Markdown, CSV, JSON."""
