"""HDF files: reading every layout of RETURNN's, and writing them."""
