"""Whether a faster precision trains as well: paired runs on real data, verdicts, and the time to the same score."""
