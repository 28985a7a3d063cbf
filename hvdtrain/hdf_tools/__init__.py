"""The subcommands for HDF files: dump, check."""
