"""The averages of checkpoints that a training makes at its end."""
