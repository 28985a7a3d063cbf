"""The version, in a file that imports nothing: setup.py and `--version` read it."""

__version__ = "0.1.0"
