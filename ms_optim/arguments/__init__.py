"""What users pass: checks with errors in words, shared keywords and docstrings, parameters, gradients, rates."""
