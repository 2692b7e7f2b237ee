"""Records to conclusions: pure functions, no torch, no input or output."""
