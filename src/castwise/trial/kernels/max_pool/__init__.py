"""Max pooling of 3 by 3 with stride 2 by Triton kernels."""
