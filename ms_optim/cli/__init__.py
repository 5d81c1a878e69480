"""The commands of python -m ms_optim, one per module."""
