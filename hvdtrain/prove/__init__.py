"""The command prove: whether a training on N ranks computes what one rank computes from the same global batches."""
