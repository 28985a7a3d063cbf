"""The tasks of a config other than training."""
