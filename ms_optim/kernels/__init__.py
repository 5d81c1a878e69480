"""Kernels: the table of them, their C interface, the libraries, and what each device can run."""
