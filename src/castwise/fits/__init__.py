"""Whether a training fits into the memory of GPUs that are not there."""
