"""Where techniques are applied: `loop.py` says which setting each makes, the other modules carry a setting out."""
