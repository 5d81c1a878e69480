"""How a rule is stated: its arithmetic, matrices, and what its author states."""
