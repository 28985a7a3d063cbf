"""Checkpoints: the state of a training, its files, and the model that a training starts from."""
