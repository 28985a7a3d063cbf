"""Checkpoints: what a training has to remember, and where it starts from."""
