"""Checkpoints: the state of a training, the files it is saved in, and which model a training starts from."""
