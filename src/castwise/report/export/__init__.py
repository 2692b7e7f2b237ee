"""Records for other programs: flat tables as CSV, Parquet and JSON, and runs for experiment trackers."""
