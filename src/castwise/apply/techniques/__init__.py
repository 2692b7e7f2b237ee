"""How the techniques of `registry/techniques.py` change a training step."""
