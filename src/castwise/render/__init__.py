"""Scripts with the loop of a recommendation: `emit`."""
