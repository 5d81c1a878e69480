"""Optimizers on DTensors: parameters and gradients that are sharded over a device mesh."""
