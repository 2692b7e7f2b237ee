"""A measured loop as a script in plain PyTorch."""
