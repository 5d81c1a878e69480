"""The paths of a step: one per file, each a Cell that takes the step's rates and the gradients."""
