"""What a config can be run for beside training."""
