"""Paths that run MindSpore's operators, and kernels that AKG compiles."""
