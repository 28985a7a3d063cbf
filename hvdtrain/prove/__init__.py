"""The command prove: checks that a training on N ranks computes the same as one rank from the same global batches."""
