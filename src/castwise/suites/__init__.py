"""`castwise suite`: published benchmarks, measured here and compared with their published figures."""
