"""Batch norm with its neighbours (additions, dropout, activation) by Triton kernels."""
