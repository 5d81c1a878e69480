"""Beside the optimizer in training: monitor, averages of weights, gradient release, QK-clip, workers in one process."""
