"""The trial's process: the only importer of torch, entered only through `worker/entry.py`."""
