"""Castwise's own Triton kernels."""
