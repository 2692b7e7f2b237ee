"""`castwise report`, `compare` and `export`: conclusions from records of any origin."""
