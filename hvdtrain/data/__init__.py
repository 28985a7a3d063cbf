"""Datasets, the plan of an epoch, and its batches. Knows numpy and h5py; of the other ranks, two integers."""
