"""Own Triton kernels."""
