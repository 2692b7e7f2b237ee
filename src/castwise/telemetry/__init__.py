"""GPU and host readings, taken by the parent while a trial is timed."""
