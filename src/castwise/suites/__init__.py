"""`castwise suite`: published benchmarks beside the same measured here."""
