"""Records to conclusions: pure functions."""
