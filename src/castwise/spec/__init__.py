"""What is asked: trial specs, plans, recipes. Pure data."""
