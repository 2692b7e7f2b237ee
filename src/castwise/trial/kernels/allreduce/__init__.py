"""The mean of all ranks' gradients, by collectives or in memory that all GPUs share."""
