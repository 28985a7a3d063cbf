"""Datasets that are not HDF files."""
