"""The mean of all ranks' gradients in memory that all GPUs see."""
