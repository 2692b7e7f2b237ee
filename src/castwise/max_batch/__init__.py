"""`castwise max-batch`: the largest batch that trains, and where the memory goes."""
