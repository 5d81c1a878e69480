"""Deep gradient compression: what travels, how, and the step made of it."""
