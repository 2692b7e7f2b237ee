"""The trial's process: the only importer of torch, entered only through `trial/entry.py`."""
