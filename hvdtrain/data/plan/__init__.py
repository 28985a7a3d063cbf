"""The plan of an epoch: order, selection, chunks, batches, each rank's share."""
