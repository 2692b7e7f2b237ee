"""Rows of data: precisions, techniques, workloads, GPUs, data sets, suites."""
