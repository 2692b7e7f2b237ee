"""`castwise tune`: the search for the fastest loop that computes the same."""
