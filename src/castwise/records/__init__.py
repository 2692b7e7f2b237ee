"""What was measured: the schema of records, and their files."""
