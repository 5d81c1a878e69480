"""How a step runs: one path a file, each a Cell that takes this step's rates and the gradients."""
