"""How a step runs: each path is a Cell that takes the step's rates and the gradients."""
