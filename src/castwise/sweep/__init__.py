"""Run a plan: start the processes, keep the records, go on where a job was cut off."""
