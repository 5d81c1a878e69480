"""Paths that run the fused kernels."""
