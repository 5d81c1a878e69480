"""What optimizers hold: layout of parameters, formats, storage, masters, shares of workers."""
