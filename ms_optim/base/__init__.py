"""FusedOptimizer, and the objects that it delegates to."""
