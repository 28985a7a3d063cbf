"""A framework: models of numpy arrays."""
