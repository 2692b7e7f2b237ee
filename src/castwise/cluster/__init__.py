"""One plan on many machines: shards on existing engines, and their records in one folder."""
